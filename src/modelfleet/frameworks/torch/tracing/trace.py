"""Trace a step in Python into a program: a flat graph of tensor operations.

A traced graph contains no Python of the model, no `vmap` and no autograd, so running it costs only its operations.
It can be compiled as it is. If a step can't be traced, the reason is known before the first step runs.
"""

import linecache
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from modelfleet.errors import FleetError
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch.tracing.joint_draws import join_draws
from modelfleet.frameworks.torch.tracing.outside_tensors import forbid_outside_writes, lift_outside_tensors
from modelfleet.frameworks.torch.tracing.reasons import add_line, explain
from modelfleet.frameworks.torch.tracing.recording import Recording
from modelfleet.frameworks.torch.tracing.scans import count_operations
from modelfleet.frameworks.torch.tracing.simplify import simplify
from modelfleet.frameworks.torch.tracing.steady import SteadyGraph, uncompiled
from modelfleet.frameworks.torch.tracing.writes import UNDECLARED_WRITERS, memory_owners, schema_of, written
from modelfleet.trees import leaves, map_tree, rebuild
from modelfleet.types import Tree

Step = Callable[..., Tree]

TRACE_LOCK = threading.RLock()  # torch traces and compiles in one thread at a time


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides, dtype and device of a program's input: what a compiler needs to know of it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stacked: bool
    """True if the first axis is the member."""

    @classmethod
    def of(cls, tensor: Tensor, stacked: bool) -> "TensorSpec":
        """Return the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, stacked)

    def empty(self, width: int | SymInt | None = None) -> Tensor:
        """Return an uninitialized tensor of this spec, with another width if one is given."""
        shape = (width, *self.shape[1:]) if self.stacked and width is not None else self.shape
        return torch.empty_strided(shape, self.stride, dtype=self.dtype, device=self.device)


class Program:
    """Step of a lane that runs on a flat list of tensors.

    Attributes:
        run: The function to call: the traced graph at first, the compiled form as soon as there is one.
        graph: The traced graph; None if the step runs as Python.
        outside: Tensors that no argument brings. They are the last inputs, and the same in every step.
        unused: Parameters that take no part in a fused train step.
        recording: What the step's Python calls, once it was recorded for another size.
    """

    def __init__(
        self,
        step: "_FlatStep",
        graph: fx.GraphModule | None,
        outside: Sequence[Tensor] = (),
        steady: Sequence[int] = (),
    ) -> None:
        self.graph = graph
        self.outside = tuple(outside)
        self.inputs = [TensorSpec.of(*pair) for pair in zip(step.inputs, step.stacked, strict=True)]
        self.inputs += [TensorSpec.of(tensor, False) for tensor in outside]
        self.run: Callable[..., Any] = step if graph is None else uncompiled(graph, steady)
        self.compiled = False
        self.any_width = False
        self.unused: frozenset[str] = frozenset()
        self.recording: Recording | None = None
        self._step = step

    @property
    def width(self) -> int:
        """Return the number of members that the step was traced with."""
        return self.inputs[0].shape[0]

    @cached_property
    def operations(self) -> int:
        """Return the number of operations that a compiler would see; 0 for an untraced step."""
        return 0 if self.graph is None else count_operations(self.graph)

    @cached_property
    def working_bytes(self) -> int | None:
        """Return the peak memory of the intermediate results, without the inputs; None for an untraced step."""
        return None if self.graph is None else _peak_bytes(self.graph.graph)

    @cached_property
    def _undeclared_writes(self) -> bool:
        graph = None if self.graph is None else self.graph.graph
        return graph is None or any(node.target in UNDECLARED_WRITERS for node in graph.nodes)

    @property
    def counts_writes(self) -> bool:
        """Return True if the versions of tensors tell what a run has written to. Compiled code does not count."""
        return not self.compiled and not self._undeclared_writes

    @cached_property
    def written(self) -> tuple[int, ...]:
        """Return the indices of the inputs that a run writes to; nothing for an untraced step."""
        nodes = [] if self.graph is None else list(self.graph.graph.nodes)
        owners = {owner for node in nodes for one in written(node) for owner in memory_owners(one)}
        inputs = [node for node in nodes if node.op == "placeholder"]
        return tuple(index for index, node in enumerate(inputs) if node in owners)

    @property
    def steady(self) -> tuple[int, ...]:
        """Return the indices of the inputs that a run looks at only if they have changed."""
        owner = getattr(self.run, "__self__", None)
        return owner.steady if isinstance(owner, SteadyGraph) else ()

    def bound(self, inputs: Sequence[Tensor]) -> Callable[[], Any]:
        """Return a function that runs one step on these tensors, and takes the steady ones as they are now."""
        owner = getattr(self.run, "__self__", None)
        return owner.bound(inputs) if isinstance(owner, SteadyGraph) else partial(self.run, *inputs)

    def __call__(self, inputs: Sequence[Tensor]) -> Tree:
        """Run one step on the tensors of its arguments, in their order, and return its result."""
        with torch.no_grad():  # outside tensors may require gradients
            values = self.run(*inputs, *self.outside)
        return self.result(values)

    def result(self, values: Sequence[Tensor]) -> Tree:
        """Return the step's result from the flat list that `run` returned."""
        return rebuild(self._step.outputs, values)  # read after the run: Python fills it in as it runs


class _FlatStep:
    """Step as a function from a flat list of tensors to a flat list of tensors."""

    def __init__(self, step: Step, args: tuple[Tree, ...], stacked: Sequence[bool]) -> None:
        self._step = step
        self._args = args
        self.inputs: list[Tensor] = leaves(args)
        self.stacked = [axis for arg, axis in zip(args, stacked, strict=True) for _ in leaves(arg)]
        self.arguments = [index for index, arg in enumerate(args) for _ in leaves(arg)]
        """For each input, the index of the argument that it is part of."""
        self.outputs: Tree = None

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        outputs = self._step(*rebuild(self._args, inputs))
        self.outputs = map_tree(lambda _: 0, outputs)
        return leaves(outputs)

    def release(self) -> None:
        """Drop the references to the example tensors."""
        self._args = map_tree(lambda _: 0, self._args)
        self.inputs = []


def trace(step: Step, args: tuple[Tree, ...], stacked: Sequence[bool], steady: Sequence[int] = ()) -> Program:
    """Trace `step(*args)` into a program of the tensors in `args`.

    Args:
        step: The function to trace.
        args: Example arguments. The inputs of the program are their tensors, from left to right.
        stacked: For each argument, True if its tensors have a member axis.
        steady: The indices of the inputs that are the same tensors at most steps.

    Raises:
        CannotFuseError: The step can't be traced. The message names the user's line if there is one.
    """
    flat = _FlatStep(step, args, stacked)
    with forgetting_sources():
        graph = _graph_of(flat)
        outside = lift_outside_tensors(graph)
        forbid_outside_writes(graph, flat.arguments)
        join_draws(graph.graph)
        simplify(graph)
        program = Program(flat, graph, outside, steady)
    flat.release()
    return program


def program_of(
    step: Step,
    args: tuple[Tree, ...],
    stacked: Sequence[bool],
    graph: fx.GraphModule,
    like: Program,
    steady: Sequence[int],
) -> Program:
    """Return the program of a graph of `step(*args)`, which reads and returns what another program does."""
    flat = _FlatStep(step, args, stacked)
    flat.outputs = like._step.outputs
    program = Program(flat, graph, like.outside, steady)
    program.unused = like.unused
    flat.release()
    return program


def _graph_of(flat: _FlatStep) -> fx.GraphModule:
    try:
        with _strict_tracing(), torch.no_grad():
            return make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*flat.inputs)
    except CannotFuseError as error:
        add_line(error)
        raise
    except FleetError:
        raise
    except Exception as error:  # a model's forward may raise anything while it is traced
        raise explain(error) from error


@contextmanager
def forgetting_sources() -> Iterator[None]:
    """Drop the sources of graphs that are made in this context.

    torch.fx keeps them for tracebacks until the process ends: a hundred kilobytes for every fleet.
    """
    sources: dict[str, str] = torch.fx.graph_module._loader.eval_cache
    known = set(sources)
    try:
        yield
    finally:
        for key in sources.keys() - known:
            del sources[key]
            linecache.cache.pop(key, None)


def untraced(step: Step, args: tuple[Tree, ...], stacked: Sequence[bool]) -> Program:
    """Return a program that runs the Python of `step` at every call. Takes the arguments of `trace`."""
    flat = _FlatStep(step, args, stacked)
    program = Program(flat, None)
    flat.release()
    return program


@contextmanager
def _strict_tracing() -> Iterator[None]:
    # For operations without a batching rule, vmap loops over the members, slowly, with only a warning. Here that
    # is a reason not to fuse, so it is made an error.
    functorch: Any = torch._C._functorch
    fallback = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # logs what a model raises; here it is a reason
    disabled, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings(), as_if_compiling():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = disabled
        functorch._set_vmap_fallback_enabled(fallback)


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Context in which models that ask torch if it is compiling are told so. Needs the `TRACE_LOCK`."""
    is_compiling = torch.compiler.is_compiling
    # torch.export does the same: models that ask `torch.compiler.is_compiling()` take the path that can be traced.
    # Without it, Hugging Face models look into the attention mask for a shortcut. It is True in this thread only:
    # other threads may step at the same time, and torch's optimizers ask, too.
    thread = threading.get_ident()
    torch.compiler.is_compiling = lambda: threading.get_ident() == thread or is_compiling()
    try:
        yield
    finally:
        torch.compiler.is_compiling = is_compiling


def _peak_bytes(graph: fx.Graph) -> int:
    """Return the largest sum of bytes of the tensors that are alive after any one node. Views count once."""
    last_user: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last_user[used] = node
    freed_by: dict[fx.Node, list[fx.Node]] = {}
    for used, node in last_user.items():
        freed_by.setdefault(node, []).append(used)
    sizes: dict[fx.Node, int] = {}
    alive = peak = 0
    for node in graph.nodes:
        if node.op == "call_function" and not _is_view(node):
            sizes[node] = sum(_bytes(value) for value in leaves(node.meta.get("val")))
            alive += sizes[node]
            peak = max(peak, alive)
        alive -= sum(sizes.get(used, 0) for used in freed_by.get(node, ()))
    return peak


def _bytes(value: object) -> int:
    """Return the size of a tensor; 0 for anything else, and for a shape that depends on values."""
    if not isinstance(value, Tensor) or not all(isinstance(length, int) for length in value.shape):
        return 0
    return value.numel() * value.element_size()


def _is_view(node: fx.Node) -> bool:
    schema = schema_of(node)
    return schema is not None and any(argument.alias_info is not None for argument in schema.arguments)
