"""Objects in which Python keeps values. Each remembers its values, detects a change, and can undo it."""

import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from hashlib import blake2b
from operator import is_
from typing import Any

import numpy as np

from modelfleet.frameworks.structure import cell_contents

Same = Callable[[Any, Any], bool]
"""Returns True if a value counts as unchanged. By default it must be the same object."""

_LARGE_ARRAY = 4096  # bytes; larger arrays are compared once an epoch, not at every step


class Missing:
    """Type of `MISSING`, which stands for no value at all."""


MISSING: Any = Missing()


class Watched:
    """Something that may hold another value later.

    The base class never changes. It only has a token.

    Attributes:
        name: Its name for readers, such as `self.cache`.
        token: A value to compare two walks by: equal tokens mean that the same was there to read.
        cheap: True if comparing is quick enough to do at every step.
    """

    cheap = False

    def __init__(self, name: str, token: Hashable = None) -> None:
        self.name = name
        self.token = token

    def same(self) -> bool:
        """Return True if nothing was replaced."""
        return True

    def moved(self) -> bool:
        """Return True if there is anything to restore."""
        return not self.same()

    def changed(self) -> Iterator[str]:
        """Yield the names of what has changed."""
        if self.moved():
            yield self.name

    def restore(self) -> None:
        """Put the remembered values back."""


class WatchedDict(Watched):
    """Dict, or the attributes of an object. `label` names an item after the name of the whole."""

    cheap = True

    def __init__(
        self, name: str, mapping: dict[Any, Any], label: Callable[[Any], str], same_value: Same = is_
    ) -> None:
        super().__init__(name)
        self.mapping, self.label, self._same_value = mapping, label, same_value
        self.keys, self.values = tuple(mapping), tuple(mapping.values())

    def same(self) -> bool:
        """Return True if it has the same keys and values, in the same order."""
        return (
            len(self.mapping) == len(self.keys)
            and all(map(self._same_value, self.mapping.values(), self.values))
            and all(map(self._same_value, self.mapping, self.keys))
        )

    def changed(self) -> Iterator[str]:
        """Yield the names of the items that are new, gone or replaced."""
        before = dict(zip(self.keys, self.values, strict=True))
        for key in dict.fromkeys((*before, *self.mapping)):
            if not self._same_value(self.mapping.get(key, MISSING), before.get(key, MISSING)):
                yield self.name + self.label(key)

    def restore(self) -> None:
        """Put the items back, in their order."""
        self.mapping.clear()
        self.mapping.update(zip(self.keys, self.values, strict=True))


class WatchedNames(Watched):
    """Some names of a namespace: globals that a function reads, or attributes of a class or an object.

    `name` is the prefix of all of them, such as `Net.`.
    """

    cheap = True

    def __init__(self, name: str, owner: Any, names: Sequence[str], same_value: Same = is_) -> None:
        super().__init__(name)
        self.owner, self.names, self._same_value = owner, tuple(names), same_value
        self.space: Mapping[str, Any] = owner if isinstance(owner, dict) else vars(owner)
        self.values = self._current()

    def _current(self) -> tuple[Any, ...]:
        return tuple([self.space.get(name, MISSING) for name in self.names])

    def same(self) -> bool:
        """Return True if the names stand for the same values."""
        return all(map(self._same_value, self._current(), self.values))

    def _replaced(self) -> Iterator[tuple[str, Any]]:
        """Yield the names that stand for something else, and what they stood for."""
        for name, value, before in zip(self.names, self._current(), self.values, strict=True):
            if not self._same_value(value, before):
                yield name, before

    def changed(self) -> Iterator[str]:
        """Yield the names that stand for something else."""
        return (f"{self.name}{name}" for name, _ in self._replaced())

    def restore(self) -> None:
        """Give the names their values back."""
        for name, before in self._replaced():
            if isinstance(self.owner, dict):
                if before is MISSING:
                    del self.owner[name]
                else:
                    self.owner[name] = before
            elif before is MISSING:
                delattr(self.owner, name)
            else:
                setattr(self.owner, name, before)


class WatchedSlots(Watched):
    """Attributes that an object keeps in `__slots__`."""

    cheap = True

    def __init__(self, name: str, owner: object, names: Sequence[str]) -> None:
        super().__init__(name)
        self.owner, self.names = owner, tuple(names)
        self.values = tuple(getattr(owner, name, MISSING) for name in names)

    def same(self) -> bool:
        """Return True if they hold the same values."""
        pairs = zip(self.names, self.values, strict=True)
        return all(getattr(self.owner, name, MISSING) is value for name, value in pairs)

    def restore(self) -> None:
        """Give them their values back."""
        for name, value in zip(self.names, self.values, strict=True):
            if value is not MISSING:
                object.__setattr__(self.owner, name, value)


class WatchedList(Watched):
    """List or deque."""

    cheap = True

    def __init__(self, name: str, elements: list[Any] | deque[Any], same_value: Same = is_) -> None:
        super().__init__(name)
        self.elements, self.before, self._same_value = elements, tuple(elements), same_value

    def same(self) -> bool:
        """Return True if it has the same elements."""
        return len(self.elements) == len(self.before) and all(map(self._same_value, self.elements, self.before))

    def restore(self) -> None:
        """Put the elements back."""
        self.elements.clear()
        self.elements.extend(self.before)


class WatchedSet(Watched):
    """Set."""

    cheap = True

    def __init__(self, name: str, elements: set[Any]) -> None:
        super().__init__(name)
        self.elements, self.before = elements, frozenset(elements)

    def same(self) -> bool:
        """Return True if it has equal elements."""
        return self.elements == self.before

    def restore(self) -> None:
        """Put the elements back."""
        self.elements.clear()
        self.elements.update(self.before)


class WatchedCell(Watched):
    """Variable that a function closes over."""

    cheap = True

    def __init__(self, name: str, cell: types.CellType, same_value: Same = is_) -> None:
        super().__init__(name)
        self.cell, self.value, self._same_value = cell, cell_contents(cell, MISSING), same_value

    def same(self) -> bool:
        """Return True if it holds the same value."""
        return self._same_value(cell_contents(self.cell, MISSING), self.value)

    def restore(self) -> None:
        """Give it its value back."""
        if self.value is MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = self.value


class WatchedArray(Watched):
    """NumPy array or bytearray."""

    def __init__(self, name: str, array: np.ndarray | bytearray) -> None:
        super().__init__(name)
        self.array = array
        self.before = self._content()
        self.cheap = len(self.before) <= _LARGE_ARRAY
        form = (array.shape, array.dtype.str) if isinstance(array, np.ndarray) else None
        self.token = form, self.before if self.cheap else blake2b(self.before, digest_size=16).digest()

    def same(self) -> bool:
        """Return True if it holds the same bytes."""
        return self._content() == self.before

    def restore(self) -> None:
        """Put the numbers back."""
        if isinstance(self.array, np.ndarray):
            self.array[...] = np.frombuffer(self.before, self.array.dtype).reshape(self.array.shape)
        else:
            self.array[:] = self.before

    def _content(self) -> bytes:
        return self.array.tobytes() if isinstance(self.array, np.ndarray) else bytes(self.array)


class WatchedGenerator(Watched):
    """State that only a method returns, such as that of a random generator.

    It is not part of the token: a program that was traced without using it does not depend on it.
    """

    def __init__(self, name: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        super().__init__(name)
        self._get, self._put, self._before = get, put, get()

    def moved(self) -> bool:
        """Return True if it has advanced."""
        return comparable(self._get()) != comparable(self._before)

    def restore(self) -> None:
        """Set it back."""
        self._put(self._before)


class WatchedCache(WatchedGenerator):
    """Cache of a function. Restoring removes what a trace put there. It counts as no change."""

    def changed(self) -> Iterator[str]:
        """Yield nothing: a cache changes no result."""
        yield from ()


def comparable(state: Any) -> Hashable:
    """Return a generator's state as a value. The `repr` of an array may leave out most of its numbers."""
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, dict):
        return tuple((key, comparable(value)) for key, value in state.items())
    return tuple(map(comparable, state)) if isinstance(state, tuple) else repr(state)
