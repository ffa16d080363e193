"""From a step in Python to a program: a flat graph of tensor operations, traced once.

A traced graph has no Python of the model left in it, no `vmap` and no autograd, so running it costs only its
operations; it can be compiled as it is; and what can't be traced is known, with the reason, before the first step.
"""

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from modelfleet.errors import FleetError
from modelfleet.frameworks.protocol import CannotFuseError
from modelfleet.frameworks.torch.tracing.outside_tensors import forbid_outside_writes, lift_outside_tensors
from modelfleet.frameworks.torch.tracing.simplify import simplify
from modelfleet.trees import leaves, map_tree, rebuild

Run = Callable[..., Any]

TRACE_LOCK = threading.RLock()  # torch traces and compiles in one thread at a time


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its memory: what compiling needs to know of an input."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stacked: bool
    """Whether the first axis is the member."""

    @classmethod
    def of(cls, tensor: Tensor, stacked: bool) -> "TensorSpec":
        """The spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, stacked)

    def empty(self, width: Any = None) -> Tensor:
        """A tensor of this spec, of unset values; with another width if one is given."""
        shape = (width, *self.shape[1:]) if self.stacked and width is not None else self.shape
        return torch.empty_strided(shape, self.stride, dtype=self.dtype, device=self.device)


class Program:
    """A step of a lane, ready to run on flat lists of tensors.

    `run` is what is called now: the traced graph at first, the compiled form once there is one.
    """

    def __init__(self, step: "_Flat", graph: torch.fx.GraphModule | None, outside: Sequence[Tensor] = ()) -> None:
        self.graph = graph
        self.outside = tuple(outside)  # tensors that no argument brings: the last inputs, the same in every step
        self.inputs = [TensorSpec.of(*pair) for pair in zip(step.inputs, step.stacked, strict=True)]
        self.inputs += [TensorSpec.of(tensor, False) for tensor in outside]
        self.run: Run = step if graph is None else graph.forward
        self.compiled = False
        self.any_width = False
        self.unused: frozenset[str] = frozenset()  # the parameters that take no part in a fused train step
        self._step = step

    @property
    def width(self) -> int:
        """How many members it was traced with."""
        return self.inputs[0].shape[0]

    @cached_property
    def working_bytes(self) -> int | None:
        """The most that its results between live at once, without its inputs; None if it was not traced."""
        return None if self.graph is None else _most_alive(self.graph.graph)

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """Run one step on the tensors of its arguments, in their order; gives what the step gives."""
        with torch.no_grad():  # what is outside may take gradients
            values = self.run(*inputs, *self.outside)
        return rebuild(self._step.outputs, values)  # plain Python tells their form only as it runs


class _Flat:
    """A step as a function of a flat list of tensors, with a flat list as its result."""

    def __init__(self, step: Callable[..., Any], args: tuple[Any, ...], stacked: Sequence[bool]) -> None:
        self._step = step
        self._args = args
        self.inputs: list[Tensor] = leaves(args)
        self.stacked = [axis for arg, axis in zip(args, stacked, strict=True) for _ in leaves(arg)]
        self.owners = [place for place, arg in enumerate(args) for _ in leaves(arg)]
        self.outputs: Any = None

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        outputs = self._step(*rebuild(self._args, inputs))
        self.outputs = map_tree(lambda _: 0, outputs)
        return leaves(outputs)

    def forget(self) -> None:
        """Let go of the tensors it was made with."""
        self._args = map_tree(lambda _: 0, self._args)
        self.inputs = []


def trace(step: Callable[..., Any], args: tuple[Any, ...], stacked: Sequence[bool]) -> Program:
    """Make `step(*args)` a program of the tensors in `args`, in the order in which they are found there.

    `stacked` says of each argument whether its tensors have a member axis. Raises `CannotFuseError` if the step
    can't be traced.
    """
    flat = _Flat(step, args, stacked)
    try:
        with _strictly(), torch.no_grad():
            graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*flat.inputs)
    except FleetError:
        raise
    except Exception as error:  # whatever a model's forward may raise while it is traced
        reason = _reason(error)
        raise CannotFuseError(reason, shared=reason.startswith(_WRITES_OUTSIDE)) from error
    outside = lift_outside_tensors(graph)
    forbid_outside_writes(graph, flat.owners)
    simplify(graph)
    program = Program(flat, graph, outside)
    flat.forget()
    return program


def untraced(step: Callable[..., Any], args: tuple[Any, ...], stacked: Sequence[bool]) -> Program:
    """The same without tracing: every call runs the Python of the model."""
    flat = _Flat(step, args, stacked)
    program = Program(flat, None)
    flat.forget()
    return program


def _compiling_here() -> Callable[[], bool]:
    """Return a function that is True in this thread alone.

    Others may step meanwhile, and torch's optimizers ask `torch.compiler.is_compiling()` as well.
    """
    thread, otherwise = threading.get_ident(), torch.compiler.is_compiling
    return lambda: threading.get_ident() == thread or otherwise()


@contextmanager
def _strictly() -> Iterator[None]:
    # vmap's fallback for operations without a batching rule loops over the members, slowly, with only a warning.
    # Here that is a reason not to fuse, so it is made an error.
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled(), torch.compiler.is_compiling
    functorch._set_vmap_fallback_enabled(False)
    # What torch.export does for `torch.compiler.is_compiling()`: models that ask take the way that can be traced.
    # Hugging Face's, without it, look into the attention mask for a shortcut.
    torch.compiler.is_compiling = _compiling_here()
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # prints what a model raises; here it is a reason
    disabled, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = disabled
        torch.compiler.is_compiling = before[1]
        functorch._set_vmap_fallback_enabled(before[0])


def _most_alive(graph: torch.fx.Graph) -> int:
    """The largest sum of bytes of the tensors that are alive after any one node, views not counted twice."""
    last: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    ends: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for used, node in last.items():
        ends.setdefault(node, []).append(used)
    sizes: dict[torch.fx.Node, int] = {}
    alive = most = 0
    for node in graph.nodes:
        if node.op == "call_function" and not _is_view(node):
            sizes[node] = sum(_bytes(value) for value in leaves(node.meta.get("val")))
            alive += sizes[node]
            most = max(most, alive)
        alive -= sum(sizes.get(used, 0) for used in ends.get(node, ()))
    return most


def _bytes(value: Any) -> int:
    """The size of a tensor; nothing for what is none, or whose size hangs on values."""
    if not isinstance(value, Tensor) or not all(isinstance(length, int) for length in value.shape):
        return 0
    return value.numel() * value.element_size()


def _is_view(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(argument.alias_info is not None for argument in schema.arguments)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    for start, meaning in _KNOWN.items():
        if start in text:
            return f"{meaning} ({_first_sentence(text)})"
    return f"{type(error).__name__}: {_first_sentence(text)}"


def _first_sentence(text: str, most: int = 160) -> str:
    sentence = text.split(". ")[0]
    return sentence if len(sentence) <= most else sentence[: most - 1] + "…"


_WRITES_OUTSIDE = "it writes to a tensor that is no part of the model"
_KNOWN = {
    "would mutate a captured Tensor": _WRITES_OUTSIDE,
    "hit the vmap fallback": "an operation has no batching rule",
    "Batching rule not implemented": "an operation has no batching rule",
    "data-dependent control flow": "its forward branches on the value of a tensor",
    "It looks like you're calling .item()": "its forward reads the value of a tensor with .item()",
    "_local_scalar_dense": "its forward reads the value of a tensor",
    "data-dependent": "its forward has a shape or a branch that depends on the values of a tensor",
    "dynamic shape": "its forward makes a tensor whose shape depends on the values of another",
    "draws random numbers": "it draws random numbers that have no stream per member",
}
