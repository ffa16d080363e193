"""Parts that the structures of models are made of, in every framework."""

import sys
import types
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAX_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True, eq=False, slots=True)
class Signature:
    """Structure of a model, as a value. Two models may be fused if and only if their signatures are equal."""

    entries: tuple[tuple[str, Hashable], ...]
    """Each part of the model by its path, such as `layers.0.kernel`."""
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.entries))

    def __reduce__(self) -> tuple[type["Signature"], tuple[tuple[tuple[str, Hashable], ...]]]:
        return Signature, (self.entries,)  # without the hash, which differs between processes

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Signature):
            return NotImplemented
        return self is other or (self._hash == other._hash and self.entries == other.entries)


def without_numbers(value: Any) -> Any:
    """Return a part of a signature without its floats and the contents of its arrays.

    People also write 0 and 1 for floats, as in `Dropout(0)`, so these count as floats. Members whose structures
    are equal then may compute the same with other numbers. Whether they do is known when their steps are traced.
    """
    if isinstance(value, Signature):
        return tuple((path, without_numbers(own)) for path, own in value.entries)
    if isinstance(value, np.floating):
        return "number"
    if isinstance(value, frozenset):
        return frozenset(map(without_numbers, value))
    if not isinstance(value, tuple):
        return value
    if len(value) == 2 and isinstance(value[0], type):
        if issubclass(value[0], float) or (value[0] is int and value[1] in (0, 1, "0", "1")):
            return "number"
    elif len(value) == 4 and value[0] == "array":
        return value[:3]
    return (type(value), *map(without_numbers, value))


class Opaque:
    """Value whose content can't be compared, so that it equals only itself."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __str__(self) -> str:
        return f"a {type(self.value).__name__} of its own"


def is_importable(value: Any) -> bool:
    """Return True if a class or function is the one that its module has under its name."""
    found: object = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def cell_contents(cell: types.CellType, default: object = None) -> Any:
    """Return what a closure's cell holds, or the default for a variable that is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return default


def nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield some code, and that of the functions within."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_code(constant)


def shorten(text: str) -> str:
    """Cut a text that is too long for a message."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"
