"""Places where Python keeps values: each remembers what it holds, sees a change, and can put it back."""

import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from hashlib import blake2b
from operator import is_
from typing import Any

import numpy as np

_LARGE = 4096  # bytes: what is larger is compared once an epoch, not at every step


class Missing:
    """What stands for no value at all."""


MISSING: Any = Missing()


class Place:
    """Something that may hold another value later. This one never does; it only has a token to be compared by."""

    cheap = False
    """Whether comparing takes so little that it can be done at every step."""

    def __init__(self, name: str, token: Hashable = None) -> None:
        self.name = name
        self.token = token

    def same(self) -> bool:
        """Whether it holds the very same objects."""
        return True

    def moved(self) -> bool:
        """Whether there is anything to put back."""
        return not self.same()

    def changed(self) -> Iterator[str]:
        """The names of what has changed."""
        if self.moved():
            yield self.name

    def restore(self) -> None:
        """Put back what it held."""


class Items(Place):
    """A dict, or the attributes of an object. `label` is what names an item after the name of the whole."""

    cheap = True

    def __init__(self, name: str, mapping: dict[Any, Any], label: Callable[[Any], str]) -> None:
        super().__init__(name)
        self.mapping, self.label = mapping, label
        self.keys, self.values = tuple(mapping), tuple(mapping.values())

    def same(self) -> bool:
        """Whether it has the very same keys and values, in their order."""
        mapping = self.mapping
        return (
            len(mapping) == len(self.keys)
            and all(map(is_, mapping.values(), self.values))
            and all(map(is_, mapping, self.keys))
        )

    def changed(self) -> Iterator[str]:
        """The names of the items that are new, gone or others."""
        before = dict(zip(self.keys, self.values, strict=True))
        for key in dict.fromkeys((*before, *self.mapping)):
            if before.get(key, MISSING) is not self.mapping.get(key, MISSING):
                yield self.name + self.label(key)

    def restore(self) -> None:
        """Give it its items back, in their order."""
        self.mapping.clear()
        self.mapping.update(zip(self.keys, self.values, strict=True))


class Names(Place):
    """Some names of a namespace: globals that a function reads, attributes of a class or of an object."""

    cheap = True

    def __init__(self, name: str, owner: Any, names: Sequence[str]) -> None:
        super().__init__(name)
        self.owner, self.names = owner, tuple(names)
        self.space: Mapping[str, Any] = owner if isinstance(owner, dict) else vars(owner)
        self.values = tuple(self.space.get(name, MISSING) for name in names)

    def same(self) -> bool:
        """Whether the names stand for the very same values."""
        get = self.space.get
        return all(get(name, MISSING) is value for name, value in zip(self.names, self.values, strict=True))

    def changed(self) -> Iterator[str]:
        """The names that stand for something else."""
        for name, value in zip(self.names, self.values, strict=True):
            if self.space.get(name, MISSING) is not value:
                yield f"{self.name}{name}"

    def restore(self) -> None:
        """Give the names their values back."""
        for name, value in zip(self.names, self.values, strict=True):
            if self.space.get(name, MISSING) is value:
                continue
            if isinstance(self.owner, dict):
                if value is MISSING:
                    del self.owner[name]
                else:
                    self.owner[name] = value
            elif value is MISSING:
                delattr(self.owner, name)
            else:
                setattr(self.owner, name, value)


class Slots(Place):
    """Attributes that an object keeps in slots."""

    cheap = True

    def __init__(self, name: str, owner: object, names: Sequence[str]) -> None:
        super().__init__(name)
        self.owner, self.names = owner, tuple(names)
        self.values = tuple(getattr(owner, name, MISSING) for name in names)

    def same(self) -> bool:
        """Whether they hold the very same values."""
        pairs = zip(self.names, self.values, strict=True)
        return all(getattr(self.owner, name, MISSING) is value for name, value in pairs)

    def restore(self) -> None:
        """Give them their values back."""
        for name, value in zip(self.names, self.values, strict=True):
            if value is not MISSING:
                object.__setattr__(self.owner, name, value)


class Elements(Place):
    """A list or a deque."""

    cheap = True

    def __init__(self, name: str, elements: list[Any] | deque[Any]) -> None:
        super().__init__(name)
        self.elements, self.before = elements, tuple(elements)

    def same(self) -> bool:
        """Whether it has the very same elements."""
        return len(self.elements) == len(self.before) and all(map(is_, self.elements, self.before))

    def restore(self) -> None:
        """Give it its elements back."""
        self.elements.clear()
        self.elements.extend(self.before)


class Members(Place):
    """A set."""

    cheap = True

    def __init__(self, name: str, members: set[Any]) -> None:
        super().__init__(name)
        self.members, self.before = members, frozenset(members)

    def same(self) -> bool:
        """Whether it has equal members."""
        return self.members == self.before

    def restore(self) -> None:
        """Give it its members back."""
        self.members.clear()
        self.members.update(self.before)


class Cell(Place):
    """A variable that a function closes over."""

    cheap = True

    def __init__(self, name: str, cell: types.CellType) -> None:
        super().__init__(name)
        self.cell, self.value = cell, _contents(cell)

    def same(self) -> bool:
        """Whether it holds the very same value."""
        return _contents(self.cell) is self.value

    def restore(self) -> None:
        """Give it its value back."""
        if self.value is MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = self.value


class Numbers(Place):
    """A numpy array or a bytearray."""

    def __init__(self, name: str, array: np.ndarray | bytearray) -> None:
        super().__init__(name)
        self.array = array
        self.before = self._content()
        self.cheap = len(self.before) <= _LARGE
        form = (array.shape, array.dtype.str) if isinstance(array, np.ndarray) else None
        self.token = form, self.before if self.cheap else blake2b(self.before, digest_size=16).digest()

    def same(self) -> bool:
        """Whether it has the same numbers."""
        return self._content() == self.before

    def restore(self) -> None:
        """Give it its numbers back."""
        if isinstance(self.array, np.ndarray):
            self.array[...] = np.frombuffer(self.before, self.array.dtype).reshape(self.array.shape)
        else:
            self.array[:] = self.before

    def _content(self) -> bytes:
        return self.array.tobytes() if isinstance(self.array, np.ndarray) else bytes(self.array)


class Hidden(Place):
    """State that only a method tells, such as a generator's or an iterator's position.

    It is no part of the token: what was traced without using it does not depend on it.
    """

    def __init__(self, name: str, get: Callable[[], Any], put: Callable[[Any], Any] | None = None) -> None:
        super().__init__(name)
        self._get, self._put, self._before = get, put, get()

    def moved(self) -> bool:
        """Whether it has advanced."""
        return repr(self._get()) != repr(self._before)

    def restore(self) -> None:
        """Set it back, if it can be."""
        if self._put is not None:
            self._put(self._before)


class Cache(Hidden):
    """A function's cache. What a trace puts there is taken out again; it is no change that anybody notices."""

    def changed(self) -> Iterator[str]:
        """Nothing: a cache changes no result."""
        yield from ()


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return MISSING
