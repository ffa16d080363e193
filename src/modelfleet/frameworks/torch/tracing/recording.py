"""Record the torch functions that a model's Python calls, and compare the recordings of several models.

    with recording(inputs) as own:      # by origin: the parameters, the buffers, the batch
        loss = model(x)
    found = compare([own, other])
    found.floats, found.outside, found.shapes, found.integers   # what differs, call by call
    found.other                                                 # any other difference, as a sentence

Two models that differ in a number call the same functions with different numbers. Two that differ in a width call
the same functions on other shapes. What a number decides in Python (a branch, a count of repetitions, a string)
shows as another difference, and so does everything else.
"""

import struct
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from modelfleet.frameworks.structure import shorten
from modelfleet.frameworks.torch.devices import accelerators
from modelfleet.frameworks.torch.tracing.calls import (
    Arguments,
    CallMode,
    Function,
    Path,
    custom_functions_seen,
    flatten,
    key_of,
    name_of,
)
from modelfleet.frameworks.torch.values import Freezer, Leaf, Tree, show

OUTSIDE = "outside"
RESULT = "result"


class Origin(NamedTuple):
    """Where a tensor comes from: a parameter, a buffer, an input, the result of a call, or from outside.

    `kind` is one of the first three as the caller names them, "result" or "outside". `key` is the name, the index
    of the call with the path in its result, or the index among the recording's outside tensors.
    """

    kind: str
    key: Hashable


class Described(NamedTuple):
    """A tensor in a recording."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: Origin


@dataclass(frozen=True)
class Call:
    """One call of a torch function."""

    function: Function | str
    key: Hashable
    """Equal for equal functions."""
    arguments: tuple[tuple[Path, Any], ...]
    """Every leaf by path: tensors as `Described`, numbers and strings as they are, anything else as frozen."""
    results: tuple[tuple[Path, Any], ...]
    """Every leaf of the result by path."""
    context: tuple[Hashable, ...]
    """Whether gradients are recorded, and the dtypes of autocast."""

    @property
    def name(self) -> str:
        """Return the name of the function."""
        return self.function if isinstance(self.function, str) else name_of(self.function)


@dataclass
class Recording:
    """Calls of one run, in order. The last one, named "return", has what the run returned as its arguments."""

    calls: list[Call] = field(default_factory=list)
    outside: list[Tensor] = field(default_factory=list)
    """Tensors that no call returned, and that were not given: constants, class weights, other models' weights."""
    versions: list[int] = field(default_factory=list)
    """Version of each outside tensor when it was recorded."""

    def same_outside(self) -> bool:
        """Return True if no outside tensor has been written to since."""
        return self.versions == [tensor._version for tensor in self.outside]


class Recorder(CallMode):
    """Context that records every torch function that is called in it. It must be the innermost mode.

    Args:
        given: The tensors that are known, by origin.
    """

    def __init__(self, given: Mapping[Origin, Tensor]) -> None:
        super().__init__()
        self.recording = Recording()
        self._origins = {id(tensor): origin for origin, tensor in given.items()}
        self._kept: list[object] = list(given.values())  # kept alive, so that no id is used twice

    def seen(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record a call."""
        arguments = self._described(Arguments(function, args, kwargs).leaves())
        number, before = len(self.recording.calls), context_of()
        result = function(*args, **kwargs)
        for path, leaf in flatten(result):
            if isinstance(leaf, Tensor):
                self._origins[id(leaf)] = Origin(RESULT, (number, path))
                self._kept.append(leaf)
        results = self._described(flatten(result))
        self.recording.calls.append(Call(function, key_of(function), arguments, results, before))
        return result

    def returned(self, result: Any) -> Any:
        """Record what the run returns."""
        with torch._C.DisableTorchFunction():
            described = self._described(flatten(result))
        self.recording.calls.append(Call("return", "return", described, (), ()))
        return result

    def _described(self, leaves: Iterator[tuple[Path, Any]]) -> tuple[tuple[Path, Any], ...]:
        return tuple((path, self._describe(leaf)) for path, leaf in leaves)

    def _describe(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            origin = self._origins.get(id(leaf))
            if origin is None:
                origin = Origin(OUTSIDE, len(self.recording.outside))
                self._origins[id(leaf)] = origin
                self._kept.append(leaf)
                self.recording.outside.append(leaf)
                self.recording.versions.append(leaf._version)
            return Described(tuple(leaf.shape), leaf.dtype, origin)
        if isinstance(leaf, np.floating):
            return float(leaf)
        if type(leaf) in (int, float, bool, str) or leaf is None:
            return leaf
        return Freezer(dict).freeze(leaf)


@contextmanager
def recording(given: Mapping[Origin, Tensor]) -> Iterator[Recorder]:
    """Record the calls in a context, by a new `Recorder`. Only one thread may record or replay at a time."""
    recorder = Recorder(given)
    with custom_functions_seen(), recorder:
        yield recorder
    recorder._kept, recorder._origins = [], {}


def context_of() -> tuple[Hashable, ...]:
    """Return the settings of torch that change what a call does, and that Python sets without a torch function."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds()),
    )


@cache
def _kinds() -> tuple[str, ...]:
    """Return the kinds of devices that there are."""
    return ("cpu", *{device.kind for device in accelerators()})


class Difference(NamedTuple):
    """Where recordings differ."""

    call: int
    path: Path
    """In the arguments of the call, or behind "result" in its results."""
    values: tuple[Any, ...]
    """Of each recording, in order: numbers, tensors, or shapes."""


@dataclass
class Comparison:
    """Differences between recordings, call by call."""

    floats: list[Difference] = field(default_factory=list)
    """Numbers, of which at least one is a float. They differ in value."""
    integers: list[Difference] = field(default_factory=list)
    outside: list[Difference] = field(default_factory=list)
    """Tensors from outside, of one shape and dtype. They differ in their contents."""
    shapes: list[Difference] = field(default_factory=list)
    """Shapes of tensors, by the tensor's path."""
    other: str | None = None
    """Any other difference: the first, as a sentence. What comes after it was not compared."""


def compare(recordings: Sequence[Recording]) -> Comparison:
    """Compare recordings call by call."""
    found = Comparison()
    calls = [recording.calls for recording in recordings]
    for number in range(max(map(len, calls))):
        present = [own[number] if number < len(own) else None for own in calls]
        found.other = _other_call(present) or _compare_call(found, number, present, recordings)
        if found.other is not None:
            break
    return found


def _other_call(calls: Sequence[Call | None]) -> str | None:
    first = calls[0]
    for call in calls[1:]:
        if first is None or call is None or first.key != call.key:
            names = [own.name if own is not None else "nothing" for own in (first, call)]
            if names[0] == names[1]:
                return f"{names[0]} is another function of that name for some members"
            return f"it calls {names[0]} where others call {names[1]}"
        if first.context != call.context:
            return f"{first.name} runs with gradients or autocast on for some members, and off for others"
    return None


def _compare_call(
    found: Comparison, number: int, calls: Sequence[Any], recordings: Sequence[Recording]
) -> str | None:
    name = calls[0].name
    for part, prefix in (("arguments", ()), ("results", (RESULT,))):
        trees = [getattr(call, part) for call in calls]
        for leaves in zip(*trees, strict=False):
            path = leaves[0][0]
            if any(own != path for own, _ in leaves[1:]):
                return f"{name} has other arguments"
            sentence = _compare_leaves(
                found, number, (*prefix, *path), [leaf for _, leaf in leaves], recordings, name
            )
            if sentence is not None:
                return sentence
        if len({len(tree) for tree in trees}) > 1:
            return f"{name} has more arguments for some members"
    return None


def _compare_leaves(
    found: Comparison, number: int, path: Path, leaves: list[Any], recordings: Sequence[Recording], name: str
) -> str | None:
    first = leaves[0]
    if isinstance(first, Described):
        return _compare_tensors(found, number, path, leaves, recordings, name)
    if all(_same(first, leaf) for leaf in leaves[1:]):
        return None
    if all(type(leaf) in (int, float) for leaf in leaves):
        kind = found.floats if float in map(type, leaves) else found.integers
        kind.append(Difference(number, path, tuple(leaves)))
        return None
    other = next(leaf for leaf in leaves if not _same(first, leaf))
    return f"{_argument(name, path)} is {_shown(first)}, and {_shown(other)} for others"


def _compare_tensors(
    found: Comparison, number: int, path: Path, leaves: list[Any], recordings: Sequence[Recording], name: str
) -> str | None:
    first: Described = leaves[0]
    for leaf in leaves[1:]:
        if not isinstance(leaf, Described):
            return f"{_argument(name, path)} is a tensor, and {_shown(leaf)} for others"
        if leaf.dtype != first.dtype:
            return f"{_argument(name, path)} is {first.dtype}, and {leaf.dtype} for others"
        if len(leaf.shape) != len(first.shape):
            return f"{_argument(name, path)} is {first.shape}, and {leaf.shape} for others"
        if leaf.origin.kind != first.origin.kind or (
            first.origin.kind != OUTSIDE and leaf.origin.key != first.origin.key
        ):
            return f"{_argument(name, path)} is another tensor for some members"
    if any(leaf.shape != first.shape for leaf in leaves):
        found.shapes.append(Difference(number, path, tuple(leaf.shape for leaf in leaves)))
    elif first.origin.kind == OUTSIDE and path[:1] != (RESULT,):
        tensors = [own.outside[leaf.origin.key] for own, leaf in zip(recordings, leaves, strict=True)]
        if not all(same_contents(tensors[0], tensor) for tensor in tensors[1:]):
            found.outside.append(Difference(number, path, tuple(tensors)))
    return None


def same_contents(tensor: Tensor, other: Tensor) -> bool:
    """Return True if two tensors of one shape and dtype have the same numbers, NaN included."""
    if tensor is other:
        return True
    if tensor.device != other.device or tensor.layout != other.layout or tensor.layout != torch.strided:
        return False
    if tensor.is_meta:
        return other.is_meta
    return torch.equal(tensor, other) or bool(((tensor == other) | ((tensor != tensor) & (other != other))).all())


def _same(value: Any, other: Any) -> bool:
    if type(value) is float and type(other) is float:  # -0.0 and 0.0 differ; NaN equals itself
        return struct.pack("d", value) == struct.pack("d", other)
    return type(value) is type(other) and value == other


def _argument(name: str, path: Path) -> str:
    if name == "return":
        return "what it returns"
    if path[:1] == (RESULT,):
        return f"the result of {name}"
    return f"{path[0]}= of {name}" if isinstance(path[0], str) else f"argument {path[0] + 1} of {name}"


def _shown(value: Any) -> str:
    if isinstance(value, Described):
        return "a tensor"
    if isinstance(value, Leaf | Tree):
        return shorten(show(value))
    return shorten(repr(value))
