"""What traced Python can read besides its arguments, and whether it has changed since.

A fused program is the trace of a model's Python at one moment. `PythonSnapshot` remembers what that Python could
see then: attributes of modules, closure cells, default values, globals and class attributes. It tells whether any
of it has changed, gives the whole as a key to keep programs by, and can put everything back as it was.
"""

import inspect
import random
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from modelfleet.frameworks.protocol import CannotFuseError
from modelfleet.frameworks.torch.python_state.reachable import Walk
from modelfleet.frameworks.torch.python_state.watched import Place
from modelfleet.frameworks.torch.structure import difference, hooked, overlapping, signature, without_modes
from modelfleet.frameworks.torch.tracing.outside_tensors import WRITE_UNSAID

# What changes whenever a model runs with other weights than its own: its mode, and notes of recurrent layers. And
# Hugging Face's heads note at their first loss what the dtype of the labels says, which is the same at every step.
_OURS = (".training", "._flat_weights", "._flat_weight_refs", ".config.problem_type")


class StatefulError(CannotFuseError):
    """Python state keeps a model from being fused; then no other member may run its Python either."""


class PythonSnapshot:
    """The state that the Python of some models and functions can read.

    `roots` are named as a reader knows them: `("self", model)`, `("the objective", objective)`.
    """

    def __init__(self, roots: Sequence[tuple[str, Any]]) -> None:
        walk = Walk(roots)
        self.places: list[Place] = walk.places
        self.tensors: dict[int, Tensor] = walk.tensors
        self._refusal = walk.refusal
        self._often = [place for place in self.places if place.cheap]
        self.parameters = walk.parameters
        self._flags = _flags(walk.parameters)

    def refuse(self) -> None:
        """Raise `StatefulError` if there is state that can't be watched."""
        if self._refusal is not None:
            raise StatefulError(self._refusal)

    def same(self, *, thoroughly: bool) -> bool:
        """Whether nothing has changed; if not thoroughly, without what takes long to compare (large arrays)."""
        places = self.places if thoroughly else self._often
        return all(place.same() for place in places) and self._flags == _flags(self.parameters)

    def changed(self) -> list[str]:
        """The names of what has changed."""
        names = (name for place in self.places for name in place.changed())
        return [name for name in names if not name.endswith(_OURS)]

    def restore(self) -> None:
        """Put back everything that has changed since."""
        for place in self.places:
            if place.moved():
                place.restore()

    @property
    def key(self) -> Hashable:
        """Everything as a value, equal for two moments at which the same was there to read."""
        return tuple(place.token for place in self.places), self._flags


def _flags(parameters: Sequence[nn.Parameter]) -> tuple[Hashable, ...]:
    """What can change in parameters that stay the same objects: whether they are trained, and have hooks."""
    return tuple(
        (p.requires_grad, bool(p._backward_hooks), bool(getattr(p, "_post_accumulate_grad_hooks", None)))
        for p in parameters
    )


@contextmanager
def restoring_python(
    watch: PythonSnapshot, *, strictly: bool = True, harmless: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Run a model's Python, and leave everything as it was before.

    Strictly, raise `StatefulError` for what it changed, unless `harmless` says that no later step would notice.
    """
    try:
        yield
        names = watch.changed()
        if strictly and names and not harmless():
            raise StatefulError(f"running it changes {names[0]}", shared=not names[0].startswith("self"))
    finally:
        watch.restore()


def _forking(frame: Any) -> bool:
    """Whether the generator's state is read to be put back: draws after it repeat, and no trace sees that."""
    while frame is not None and frame.f_code.co_filename.endswith(("torch/random.py", "torch/random/eager.py")):
        if frame.f_code is FORKING:
            return True
        frame = frame.f_back
    return False


FORKING = inspect.unwrap(torch.random.fork_rng).__code__


@contextmanager
def restoring_tensors(watch: PythonSnapshot, *, strictly: bool = True) -> Iterator[None]:
    """Run a model's Python on real tensors, and undo what it writes to tensors and draws from generators.

    Strictly, raise `StatefulError` if it draws: a program would have the same numbers at every step.
    """
    saved: dict[int, tuple[Any, Any, str]] = {}

    def look(frame: Any, event: str, called: Any) -> None:
        owner = getattr(called, "__self__", None) if event == "c_call" else None
        if owner is torch.default_generator and id(owner) not in saved and _forking(frame):
            saved[id(owner)] = owner.set_state, owner.get_state(), "puts back the state of torch's generator"
        if owner is None or id(owner) in saved or called.__name__ in _HARMLESS:
            return
        if owner is _PYTHONS:
            saved[id(owner)] = random.setstate, random.getstate(), "draws from Python's random"
        elif owner is torch.default_generator and "seed" in called.__name__:
            saved[id(owner)] = owner.set_state, owner.get_state(), "seeds torch's generator"

    numpys = np.random.get_state()
    profile = sys.getprofile()
    with _Rollback([*watch.tensors.values(), *watch.parameters]) as written:
        sys.setprofile(look)  # of this thread alone: others may draw meanwhile
        try:
            yield
        finally:
            _profile_on(profile)
            written.undo()
            for put, state, _ in saved.values():
                put(state)
            if _digits(np.random.get_state()) != _digits(numpys):
                saved[0] = np.random.set_state, numpys, "draws from numpy.random"
                np.random.set_state(numpys)
    for _, _, what in saved.values() if strictly else ():
        raise StatefulError(f"it {what}, which has no stream per member")
    if strictly and any(written.undone(parameter) for parameter in watch.parameters):
        raise StatefulError("its train() changes its parameters")


def _profile_on(profile: Any) -> None:
    """Have a profiler that was at work go on; cProfile's can't be set, and is enabled again."""
    if profile is None or callable(profile):
        sys.setprofile(profile)
    else:
        profile.enable()


@contextmanager
def undoing_side_effects(*roots: tuple[str, Any]) -> Iterator[None]:
    """Try out a model's Python on real tensors, and leave everything as it was before."""
    watch = PythonSnapshot(roots)
    with restoring_python(watch, strictly=False), restoring_tensors(watch, strictly=False):
        yield


_PYTHONS: Any = getattr(random.random, "__self__", None)  # the generator behind `random.random`
_HARMLESS = frozenset({"getstate", "setstate", "get_state", "set_state", "initial_seed", "clone_state"})


def _digits(state: Any) -> Hashable:
    return tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in state)


def refuse_unstackable(model: nn.Module) -> None:
    """Raise `StatefulError` for hooks that only autograd's backward runs, and tensors that share memory."""
    for name, parameter in model.named_parameters():
        if hooked(parameter):
            raise StatefulError(f"its parameter {name} has a hook on its gradient")
    for name, other in overlapping(model).items():
        raise StatefulError(f"its {name} shares memory with its {other}")
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise StatefulError(f"{name or 'the model'} has a backward hook")


class _Rollback(TorchDispatchMode):
    """Copies a tensor before it is first written to, so that the writing can be undone."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._known: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel():
                self._known.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._changed: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            self._known
            and type(func) is torch._ops.OpOverload
            and (func._schema.is_mutable or func in WRITE_UNSAID)
        ):
            for value in (*args, *(kwargs or {}).values()):
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(tensor, Tensor):
                        self._keep(tensor)
        return func(*args, **(kwargs or {}))

    def _keep(self, tensor: Tensor) -> None:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
            return
        for known in self._known.get(tensor.untyped_storage().data_ptr(), ()):
            if id(known) not in self._copies:
                self._copies[id(known)] = known, known.detach().clone()

    def undone(self, tensor: Tensor) -> bool:
        """Return True if a tensor had changed when all was undone."""
        return id(tensor) in self._changed

    def undo(self) -> None:
        """Write the copies back where something has changed."""
        with torch.no_grad():
            for key, (tensor, copy) in self._copies.items():
                if not torch.equal(tensor, copy):
                    self._changed.add(key)
                    tensor.detach().copy_(copy)


class DivergenceCheck:
    """Watches that the members of a lane stay as like each other as they were when they were fused.

    A step runs one member's Python for all of them, in the modes that all had when the lane was made: what mode
    somebody puts a model into meanwhile, to look at it, is not asked.
    """

    def __init__(self, models: Sequence[tuple[str, nn.Module]]) -> None:
        self._models = models
        self._look()

    def check(self) -> None:
        """Raise `StatefulError` if one of them has become unlike the first."""
        same = all(map(_holds, self._tables, self._values))
        if same and self._versions == [tensor._version for tensor in self._tensors]:
            return
        (first, model), *others = self._models
        expected = without_modes(signature(model))
        for name, other in others:
            unlike = difference(without_modes(signature(other)), expected)
            if unlike is not None:
                raise StatefulError(f"{name!r} is no longer like {first!r}: {unlike}")
        self._look()

    def _look(self) -> None:
        self._tables: list[dict[str, Any]] = []
        for _, model in self._models:
            for module in model.modules():
                self._tables += (vars(module), module._modules) if module._modules else (vars(module),)
        self._values = [tuple(table.values()) for table in self._tables]
        self._tensors = [value for values in self._values for value in values if isinstance(value, Tensor)]
        self._versions = [tensor._version for tensor in self._tensors]


def _holds(table: dict[str, Any], values: tuple[Any, ...]) -> bool:
    return len(table) == len(values) and all(map(is_, table.values(), values))
