"""Try out a model's Python, and undo what it changed: Python values, tensors and random generators."""

import cProfile
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from modelfleet.frameworks.torch.python_state.checks import StatefulError
from modelfleet.frameworks.torch.python_state.snapshot import PythonSnapshot
from modelfleet.frameworks.torch.tracing.writes import UNDECLARED_WRITERS
from modelfleet.frameworks.user_code import line_of_frame
from modelfleet.frameworks.watched import comparable

_WRAPPER = "torch/random/eager.py"  # puts functions of its own around those of `torch.random`
_FORK_RNG = inspect.unwrap(torch.random.fork_rng).__code__
_PYTHON_GENERATOR: Any = getattr(random.random, "__self__", None)  # the generator behind `random.random`
_NO_DRAWS = frozenset({"getstate", "setstate", "get_state", "set_state", "initial_seed", "clone_state"})


@contextmanager
def undoing_side_effects(*roots: tuple[str, Any]) -> Iterator[None]:
    """Try out the Python of `roots` on real tensors, and leave everything as it was before."""
    snapshot = PythonSnapshot(roots)
    with restoring_python(snapshot, strictly=False), restoring_tensors(snapshot, strictly=False):
        yield


@contextmanager
def undoing_own_changes(model: nn.Module) -> Iterator[None]:
    """Run a model, and put its weights, its buffers and its Python attributes back afterwards.

    What it changes outside of itself stays: a hook may have collected activations for the caller.
    """
    watched = [one for one in PythonSnapshot([("self", model)]).watched if one.name.startswith("self")]
    copies = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
    try:
        yield
    finally:
        for one in watched:
            if one.moved():
                one.restore()
        with torch.no_grad():
            for tensor, before in copies:
                tensor.copy_(before)


@contextmanager
def restoring_python(
    snapshot: PythonSnapshot, *, strictly: bool = True, harmless: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Run a model's Python, and undo what it changed of the values in `snapshot`.

    Args:
        snapshot: The values before.
        strictly: Raise for a change.
        harmless: Called after a change. If it returns True, no later step would notice, and nothing is raised.

    Raises:
        StatefulError: With `strictly`, something changed.
    """
    try:
        yield
        names = snapshot.changed()
        if strictly and names and not harmless():
            raise StatefulError(f"running it changes {names[0]}", shared=not names[0].startswith("self"))
    finally:
        snapshot.restore()


@contextmanager
def restoring_tensors(snapshot: PythonSnapshot, *, strictly: bool = True) -> Iterator[None]:
    """Run a model's Python on real tensors, and undo what it writes to tensors and draws from generators.

    Raises:
        StatefulError: With `strictly`, the Python draws random numbers: a program would have the same numbers at
            every step. Or it changes a parameter.
    """
    # By the id of a generator: the function that sets its state, the state, and what the Python does to it.
    saved: dict[int, tuple[Callable[[Any], Any], Any, str]] = {}

    def save(owner: Any, put: Callable[[Any], Any], state: Any, does: str, frame: FrameType) -> None:
        line = line_of_frame(frame, _WRAPPER)
        saved[id(owner)] = put, state, does if line is None else f"{does} at {line}"

    def watch_calls(frame: FrameType, event: str, called: Any) -> None:
        owner = getattr(called, "__self__", None) if event == "c_call" else None
        if owner is None or id(owner) in saved:
            return
        if owner is torch.default_generator and _forks_generator(frame):
            save(owner, owner.set_state, owner.get_state(), "puts back the state of torch's generator", frame)
        elif called.__name__ in _NO_DRAWS:
            return
        elif owner is _PYTHON_GENERATOR:
            save(owner, random.setstate, random.getstate(), "draws from Python's random", frame)
        elif owner is torch.default_generator and "seed" in called.__name__:
            save(owner, owner.set_state, owner.get_state(), "seeds torch's generator", frame)

    numpy_state = np.random.get_state()
    profiler: Any = sys.getprofile()
    with _Rollback([*snapshot.tensors.values(), *snapshot.parameters]) as written:
        sys.setprofile(watch_calls)  # in this thread only: others may draw at the same time
        try:
            yield
        finally:
            _set_profiler(profiler)
            written.undo()
            for put, state, _ in saved.values():
                put(state)
            if comparable(np.random.get_state()) != comparable(numpy_state):
                saved[0] = np.random.set_state, numpy_state, "draws from numpy.random"
                np.random.set_state(numpy_state)
    for _, _, does in saved.values() if strictly else ():
        raise StatefulError(f"it {does}, which has no stream per member")
    if strictly and any(id(parameter) in written.undone for parameter in snapshot.parameters):
        raise StatefulError("its train() changes its parameters")


def _set_profiler(profiler: Any) -> None:
    """Set the profiler that a thread had, as far as Python can."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
        return
    sys.setprofile(None)
    if isinstance(profiler, cProfile.Profile):
        profiler.enable()  # it can't be set
        return
    warnings.warn(
        f"the profiler {type(profiler).__name__!r} is off from now on in this thread: modelfleet watched the "
        f"calls of a model, and Python can't set this profiler again. Use cProfile, or one that samples from "
        f"outside.",
        stacklevel=2,
    )


def _forks_generator(frame: FrameType | None) -> bool:
    """Return True if the generator's state is read to be put back.

    Draws after that repeat, and no trace sees it.
    """
    while frame is not None and frame.f_code.co_filename.endswith(("torch/random.py", _WRAPPER)):
        if frame.f_code is _FORK_RNG:
            return True
        frame = frame.f_back
    return False


class _Rollback(TorchDispatchMode):
    """Context that copies a tensor before the first write to it, so that the write can be undone."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._known: dict[int, list[Tensor]] = {}  # by the address of their memory
        for tensor in tensors:
            if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel():
                self._known.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.undone: set[int] = set()  # ids of the tensors in which `undo` has found a change

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._known and type(func) is OpOverload and (func._schema.is_mutable or func in UNDECLARED_WRITERS):
            for value in (*args, *kwargs.values()):
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(tensor, Tensor):
                        self._copy(tensor)
        return func(*args, **kwargs)

    def _copy(self, tensor: Tensor) -> None:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
            return
        for known in self._known.get(tensor.untyped_storage().data_ptr(), ()):
            if id(known) not in self._copies:
                self._copies[id(known)] = known, known.detach().clone()

    def undo(self) -> None:
        """Write the copies back to the tensors that have changed."""
        with torch.no_grad():
            for key, (tensor, copy) in self._copies.items():
                if not torch.equal(tensor, copy):
                    self.undone.add(key)
                    tensor.detach().copy_(copy)
