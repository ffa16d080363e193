"""Recordings of what a model's Python calls, compared between members of unequal widths.

Each width runs its own forward once, alone, and every torch function that its Python calls is recorded with the
shapes of its tensors. The widest member's recording beside those of the others says which axis of which tensor is
padded, and how much of it is each member's own.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from modelfleet.frameworks.errors import CannotFuseError

Size = tuple[Any, ...]
"""One number for each variant of the members: the size of an axis, or another plain number of a call."""
Axes = tuple[Size | None, ...]
"""For each axis of a tensor, the own sizes of the variants; None if all are equal."""


@dataclass(frozen=True)
class _Leaf:
    """A tensor in a call: its shape, and where it comes from."""

    shape: tuple[int, ...]
    source: Hashable


@dataclass(frozen=True)
class _Entry:
    func: Callable[..., Any]
    plain: tuple[Hashable, ...]
    """Everything in the arguments that is no tensor, with the structure around it."""
    tensors: tuple[_Leaf, ...]
    results: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Call:
    """One call of a torch function, by all variants."""

    func: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors in the arguments, for the widest variant."""
    inputs: tuple[Axes, ...]
    outputs: tuple[Axes, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    plain: tuple[tuple[Hashable, ...], ...] | None
    """By variant, everything in the arguments that is no tensor. None if it is the same in all."""

    @property
    def padded(self) -> bool:
        """Return True if an axis or a plain argument is not the same in all variants."""
        return self.plain is not None or any(any(axes) for axes in (*self.inputs, *self.outputs))


class Recorder(TorchFunctionMode):
    """Context that records the torch functions that a model's Python calls.

    Args:
        known: The tensors that are there before: weights and inputs, by name.
    """

    def __init__(self, known: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.entries: list[_Entry] = []
        self.outside: list[Tensor] = []
        self._sources: dict[int, Hashable] = {id(tensor): name for name, tensor in known.items()}
        self._alive: list[Tensor] = list(known.values())  # so that no id is used twice

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors, plain = parts_of((args, kwargs))
        shapes = [tuple(tensor.shape) for tensor in tensors]
        sources = [self._source(tensor) for tensor in tensors]
        result = func(*args, **kwargs)
        found, _ = parts_of(result)
        for number, tensor in enumerate(found):
            self._alive.append(tensor)
            self._sources.setdefault(id(tensor), (len(self.entries), number))
        given = tuple(map(_Leaf, shapes, sources))
        self.entries.append(_Entry(func, tuple(plain), given, tuple(tuple(t.shape) for t in found)))
        return result

    def _source(self, tensor: Tensor) -> Hashable:
        known = self._sources.get(id(tensor))
        if known is None:
            known = self._sources[id(tensor)] = ("outside", len(self.outside))
            self.outside.append(tensor)
            self._alive.append(tensor)
        return known


def compare(recorders: Sequence[Recorder], names: Sequence[str], widest: int) -> list[Call]:
    """Return the calls of all variants, side by side.

    Args:
        recorders: The recordings, one for each variant.
        names: The name of a member of each variant, for messages.
        widest: The variant whose Python runs for all.

    Raises:
        CannotFuseError: The variants call different functions, or otherwise than in sizes.
    """
    first = recorders[widest]
    for recorder, name in zip(recorders, names, strict=True):
        _refuse_other_outside(first, recorder, names[widest], name)
    found = []
    for number, entry in enumerate(first.entries):
        theirs = []
        for recorder, name in zip(recorders, names, strict=True):
            other = recorder.entries[number] if number < len(recorder.entries) else None
            if other is None or not _alike(entry, other):
                said = "nothing" if other is None else function_name(other.func)
                raise CannotFuseError(
                    f"{name!r} and {names[widest]!r} have unequal widths, and their Python differs: where one "
                    f"calls {function_name(entry.func)}, the other calls {said}"
                    + (" otherwise" if said == function_name(entry.func) else "")
                )
            theirs.append(other)
        found.append(_together(theirs, widest))
    for recorder, name in zip(recorders, names, strict=True):
        if len(recorder.entries) > len(first.entries):
            more = function_name(recorder.entries[len(first.entries)].func)
            raise CannotFuseError(
                f"{name!r} and {names[widest]!r} have unequal widths, and only the first calls {more} at the end"
            )
    return found


def _refuse_other_outside(first: Recorder, other: Recorder, name: str, other_name: str) -> None:
    """Raise CannotFuseError if the members use tensors that are not part of them, and not the same."""
    for ours, theirs in zip(first.outside, other.outside, strict=False):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype or not torch.equal(ours, theirs):
            raise CannotFuseError(
                f"{other_name!r} and {name!r} have unequal widths, and use unequal tensors that are neither "
                f"parameters nor buffers"
            )


def _alike(entry: _Entry, other: _Entry) -> bool:
    """Return True if two calls differ at most in sizes and plain numbers."""
    return (
        entry.func == other.func
        and len(entry.plain) == len(other.plain)
        and all(_alike_value(a, b) for a, b in zip(entry.plain, other.plain, strict=True))
        and len(entry.tensors) == len(other.tensors)
        and all(
            a.source == b.source and len(a.shape) == len(b.shape)
            for a, b in zip(entry.tensors, other.tensors, strict=True)
        )
        and [len(shape) for shape in entry.results] == [len(shape) for shape in other.results]
    )


def _alike_value(value: Hashable, other: Hashable) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value == other or (number and isinstance(other, int | float) and not isinstance(other, bool))


def _together(entries: Sequence[_Entry], widest: int) -> Call:
    first = entries[widest]
    inputs = [_axes([entry.tensors[number].shape for entry in entries]) for number in range(len(first.tensors))]
    outputs = [_axes([entry.results[number] for entry in entries]) for number in range(len(first.results))]
    plain = None if all(entry.plain == first.plain for entry in entries) else tuple(e.plain for e in entries)
    shapes = tuple(leaf.shape for leaf in first.tensors)
    return Call(first.func, shapes, tuple(inputs), tuple(outputs), first.results, plain)


def _axes(shapes: Sequence[tuple[int, ...]]) -> Axes:
    return tuple(None if len(set(sizes)) == 1 else tuple(sizes) for sizes in zip(*shapes, strict=True))


def parts_of(value: Any) -> tuple[list[Tensor], list[Hashable]]:
    """Return the tensors in arguments, in order, and everything else with the structure around it."""
    tensors: list[Tensor] = []
    plain = list(_plain(value, tensors))
    return tensors, plain


def _plain(value: Any, tensors: list[Tensor]) -> Iterator[Hashable]:
    if isinstance(value, Tensor):
        tensors.append(value)
        yield Tensor
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _plain(item, tensors)
    elif isinstance(value, tuple | list):
        yield list, len(value)
        for item in value:
            yield from _plain(item, tensors)
    elif isinstance(value, slice):
        yield slice
        yield from (value.start, value.stop, value.step)
    else:
        try:
            hash(value)
        except TypeError:
            yield id(value)
        else:
            yield value


def function_name(func: Callable[..., Any]) -> str:
    """Return what messages call a torch function."""
    owner = getattr(func, "__self__", None)
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"Tensor.{getattr(owner, '__name__', '?')}"
    library = getattr(func, "__module__", None)
    if library in ("torch.nn.functional", "torch._C._nn"):
        return f"F.{name}"
    return f"torch.{name}" if library == "torch" else f"Tensor.{name}"
