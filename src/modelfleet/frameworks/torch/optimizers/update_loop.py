"""The update of all parameters of a lane as one loop in C.

As tensor operations, an update takes some ten passes over the parameters, the gradients and the optimizer's
tensors, which in a wide lane are in no cache of the processor. A loop takes one pass.

It is made from the traced update. It depends on the optimizer and on the dtype, not on the number of members or
parameters, so all lanes share it. Like the loops that draw, it is compiled in the background, in a fraction of a
second, once a process has updated enough to win that back, and kept in the user's cache. Until then, and without a
compiler, an update is made of tensor operations.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from modelfleet.frameworks.torch.cpu import c_library
from modelfleet.frameworks.torch.tracing.in_place import in_place

WORTH = 500_000_000  # numbers that operations update before a loop is compiled: more than a planner's trials do
GRAIN = 131_072  # numbers for which a second thread is worth its while
# As operations round: no product is added without being rounded, and every number may be NaN.
FLAGS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")

Run = Callable[..., Any]
aten = torch.ops.aten
logger = logging.getLogger("modelfleet")

_TYPES = {torch.float32: "float", torch.float64: "double"}
# torch multiplies by the value first, and adds last.
_FORMULAS: dict[Any, str] = {
    aten.abs.default: "ABS({0})",
    aten.add.Tensor: "{0} + {1}",
    aten.addcdiv.default: "{0} + {1} / {2}",
    aten.addcmul.default: "{0} + {1} * {2}",
    aten.div.Tensor: "{0} / {1}",
    aten.lerp.Tensor: "{2} < (T)0.5 ? {0} + {2} * ({1} - {0}) : {1} - ({1} - {0}) * ((T)1 - {2})",
    aten.maximum.default: "{0} > {1} || {0} != {0} ? {0} : {1}",
    aten.mul.Tensor: "{0} * {1}",
    aten.neg.default: "-{0}",
    aten.reciprocal.default: "(T)1 / {0}",
    aten.sign.default: "(T)(({0} > 0) - ({0} < 0))",
    aten.sqrt.default: "SQRT({0})",
    aten.sub.Tensor: "{0} - {1}",
    aten.where.self: "{0} ? {1} : {2}",
}

_SOURCE = """
#include <math.h>
#include <stdint.h>

typedef TYPE T;
#define SQRT sqrtSUFFIX
#define ABS fabsSUFFIX

void update(void *const *buffers, const void *const *columns,
            int64_t first, int64_t last, int64_t size, int64_t begin, int64_t end) {
    for (int64_t row = first; row < last; row++) {
HEAD
        for (int64_t i = begin; i < end; i++) {
BODY
        }
    }
}
"""


class _NoLoopError(Exception):
    """Raised for an update that can't be a loop."""


class UpdateLoop:
    """Traced update as a function that runs as operations at first, and as a loop once there is one.

    Args:
        graph: The traced update. It writes to tensors `(member, number)` of one shape.
        by_operations: The update by operations.
    """

    def __init__(self, graph: fx.GraphModule, by_operations: Run) -> None:
        self._by_operations = by_operations
        written = _Written(graph)
        self._buffers = written.buffers
        self._written = written.written
        self._shared = _shared(written.source)
        self._rest: Run = in_place(written.rest()).forward

    def __call__(self, *inputs: Tensor) -> Any:
        """Run one update."""
        buffers = [inputs[index] for index in self._buffers]
        loop = self._shared.wanted(buffers[0].numel())
        if loop is None or not all(buffer.is_contiguous() for buffer in buffers):
            return self._by_operations(*inputs)
        *results, last = self._rest(*inputs)
        columns = [column.contiguous() for column in last]
        _run(loop, buffers, columns)
        # Whoever asks if the weights have changed asks torch, which has not seen this.
        torch.autograd.graph.increment_version([inputs[index] for index in self._written])
        return results


def with_loop(graph: fx.GraphModule, by_operations: Run) -> Run:
    """Return a traced update as a function with a loop, if it can have one, or by operations."""
    if os.environ.get("MODELFLEET_COMPILE") == "never":
        return by_operations
    try:
        return UpdateLoop(graph, by_operations)
    except _NoLoopError as error:
        logger.debug("an update stays operations: %s", error)
        return by_operations


class _Written:
    """Update as a loop in C, as far as it is elementwise on tensors `(member, number)`, and what is left of it."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        writes = [node for node in module.graph.nodes if node.target is aten.copy_.default]
        wide = max((_value(node) for node in writes if _value(node).dim() == 2), key=Tensor.numel, default=None)
        if wide is None or wide.dtype not in _TYPES or wide.device.type != "cpu" or wide.shape[1] < 2:
            raise _NoLoopError("it does not write to packed tensors")
        self._shape, self._dtype = wide.shape, wide.dtype
        self._inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.buffers: list[int] = []
        """Indices of the inputs that the loop reads or writes."""
        self.written: list[int] = []
        """Indices of those that it writes."""
        self.columns: list[fx.Node] = []
        """Numbers of each member, or tensors `(member, 1)` of them."""
        self._names: dict[fx.Node, str] = {}
        self._core: list[fx.Node] = []
        operations = [node for node in module.graph.nodes if node.op == "call_function"]
        lines = [self._line(node) for node in operations if self._is_wide(node)]
        core = set(self._core)
        for node in self._core:
            if node.target is not aten.copy_.default and not core.issuperset(node.users):
                raise _NoLoopError(f"{node.target} is used elsewhere")
        head = [f"T *restrict b{at} = (T *)buffers[{at}] + row * size;" for at in range(len(self.buffers))]
        head += [f"const {self._column_type(c)} c{at} = {self._read(c, at)};" for at, c in enumerate(self.columns)]
        self.source = (
            _SOURCE.replace("TYPE", _TYPES[self._dtype])
            .replace("SUFFIX", "f" if self._dtype == torch.float32 else "")
            .replace("HEAD", "\n".join(f"        {line}" for line in head))
            .replace("BODY", "\n".join(f"            {line}" for line in lines))
        )

    def rest(self) -> fx.GraphModule:
        """Return the graph without the loop's part. Its last result are the columns."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        results = graph.graph_copy(self._module.graph, copies)
        assert isinstance(results, list | tuple)
        graph.output([*results, [copies[column] for column in self.columns]])
        for node in reversed(self._core):
            graph.erase_node(copies[node])
        return fx.GraphModule(self._module, graph)

    def _is_wide(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, Tensor) and value.shape == self._shape

    def _is_column(self, node: fx.Node) -> bool:
        value = _value(node)
        return value.shape == (self._shape[0], 1) and value.dtype in (self._dtype, torch.bool)

    def _line(self, node: fx.Node) -> str:
        """Return a line of C for an operation."""
        self._core.append(node)
        if node.target is aten.copy_.default:
            old, new = node.args[:2]
            assert isinstance(old, fx.Node)
            name, place = self._name(new), self._buffer(old)
            self._names[old] = self._names[node] = name
            self.written.append(self.buffers[place])
            return f"b{place}[i] = {name};"
        formula = _FORMULAS.get(node.target)
        if formula is None or node.kwargs.keys() - {"value"} or _value(node).dtype != self._dtype:
            raise _NoLoopError(f"{node.target} is not in a loop")
        names = [self._name(argument) for argument in node.args]
        if "value" in node.kwargs:
            names[1] = f"({self._name(node.kwargs['value'])} * {names[1]})"
        if len(names) != sum(f"{{{place}}}" in formula for place in range(4)):
            raise _NoLoopError(f"{node.target} has other arguments")
        self._names[node] = f"v{len(self._names)}"
        return f"const T {self._names[node]} = {formula.format(*names)};"

    def _name(self, argument: Any) -> str:
        """Return an argument as C."""
        if isinstance(argument, bool) or not isinstance(argument, int | float | fx.Node):
            raise _NoLoopError(f"{argument} is no number")
        if not isinstance(argument, fx.Node):
            return f"(T){float(argument).hex()}"
        if argument not in self._names:
            if self._is_wide(argument):
                self._names[argument] = f"b{self._buffer(argument)}[i]"
            elif self._is_column(argument):
                self._names[argument] = f"c{len(self.columns)}"
                self.columns.append(argument)
            else:
                raise _NoLoopError(f"{argument} is neither wide nor a number per member")
        return self._names[argument]

    def _buffer(self, node: fx.Node) -> int:
        """Return the place of an input among the buffers."""
        if node.op != "placeholder" or _value(node).dtype != self._dtype:
            raise _NoLoopError(f"{node} is no input of this dtype")
        index = self._inputs.index(node)
        if index not in self.buffers:
            self.buffers.append(index)
        return self.buffers.index(index)

    def _column_type(self, node: fx.Node) -> str:
        return "uint8_t" if _value(node).dtype == torch.bool else "T"

    def _read(self, node: fx.Node, at: int) -> str:
        return f"((const {self._column_type(node)} *)columns[{at}])[row]"


class _SharedLoop:
    """Loop of an optimizer and a dtype, for all lanes of this process."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._updated = 0
        self._begun = False
        self.loop: Run | None = None
        if os.environ.get("MODELFLEET_COMPILE") == "now" or c_library.is_kept("updates", source, FLAGS):
            self._begun = True
            self._prepare()

    def wanted(self, numbers: int) -> Run | None:
        """Return the loop for an update of so many numbers; None if there is none yet."""
        if self.loop is None and not self._begun:
            with self._lock:
                self._updated += numbers
                begin = not self._begun and self._updated >= WORTH
                self._begun = self._begun or begin
            if begin:
                threading.Thread(target=self._prepare, name="modelfleet-updates", daemon=True).start()
        return self.loop

    def _prepare(self) -> None:
        try:
            found = c_library.library("updates", self._source, FLAGS).update
        except Exception as error:  # no compiler, no space, another system: updates stay operations
            logger.debug("updates are not compiled: %s: %s", type(error).__name__, error)
            return
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        found.argtypes, found.restype = (pointer, pointer, *[integer] * 5), None
        self.loop = found


_LOOPS: dict[str, _SharedLoop] = {}  # by source
_LOOPS_LOCK = threading.Lock()


def _shared(source: str) -> _SharedLoop:
    with _LOOPS_LOCK:
        if source not in _LOOPS:
            _LOOPS[source] = _SharedLoop(source)
        return _LOOPS[source]


def _run(loop: Run, buffers: Sequence[Tensor], columns: Sequence[Tensor]) -> None:
    rows, size = buffers[0].shape
    given = (ctypes.c_void_p * len(buffers))(*(buffer.data_ptr() for buffer in buffers))
    numbers = (ctypes.c_void_p * max(1, len(columns)))(*(column.data_ptr() for column in columns))
    parts = rows * size // GRAIN
    if rows < parts:
        c_library.in_threads(lambda begin, end: loop(given, numbers, 0, rows, size, begin, end), size, parts)
    else:
        c_library.in_threads(lambda begin, end: loop(given, numbers, begin, end, size, 0, size), rows, parts)


def _value(node: fx.Node) -> Tensor:
    found = node.meta.get("val")
    if not isinstance(found, Tensor):
        raise _NoLoopError(f"{node} is no tensor")
    return found
