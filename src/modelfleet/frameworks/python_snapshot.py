"""Snapshot of the Python values that a model's code reads, to detect changes and to undo them.

A traced program has the values of globals, closure cells, defaults and attributes built in. `PythonSnapshot` walks
from a few functions and objects to everything that keeps such a value. Each is compared shallowly: by identity,
and numbers and strings by value. Whatever is reachable is watched on its own, so no change goes unnoticed.

Torch models have a snapshot of their own, in `frameworks.torch.python_state`: it knows modules and tensors.
"""

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from modelfleet.frameworks.structure import nested_code
from modelfleet.frameworks.watched import (
    MISSING,
    Watched,
    WatchedArray,
    WatchedCell,
    WatchedDict,
    WatchedGenerator,
    WatchedList,
    WatchedNames,
    WatchedSet,
)

_PLAIN = (int, float, complex, str, bytes, bool, type(None), types.CodeType)
# Packages whose own globals and classes do not change. What their closures hold is followed all the same.
_STOCK = frozenset(sys.stdlib_module_names) | {
    *("jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes", "chex", "absl", "etils", "orbax", "modelfleet"),
    *("torch", "keras", "tensorflow", "scipy", "pandas", "polars", "pytest", "_pytest", "typing_extensions"),
}
_MAX_WATCHED = 20_000  # code that reaches more than this reaches a whole library

Named = tuple[str, Any]
"""Name of a value for readers, and the value."""


class PythonSnapshot:
    """Values that the Python behind some objects reads, as they are now.

    Args:
        roots: The objects to start from, by name.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._watched: list[Watched] = [
            WatchedGenerator("Python's random", random.getstate, random.setstate),
            WatchedGenerator("numpy.random", lambda: np.random.get_state(legacy=False), np.random.set_state),
        ]
        self._seen: dict[int, Any] = {}  # by id; keeps them alive, so that no id is used twice
        waiting = deque(roots.items())
        while waiting and len(self._watched) < _MAX_WATCHED:
            name, value = waiting.popleft()
            waiting.extend(self._follow(name, value))

    def changed(self, *, draws: bool = False, thoroughly: bool = True) -> str | None:
        """Return the name of something that holds another value now; None if there is none.

        Args:
            draws: Count a random generator that has been drawn from, too. Other code may have drawn from it.
            thoroughly: Compare large arrays, too.
        """
        for watched in self._watched:
            if not draws and isinstance(watched, WatchedGenerator):
                continue
            if not thoroughly and isinstance(watched, WatchedArray) and not watched.cheap:
                continue
            if watched.moved():
                return next(watched.changed(), watched.name)
        return None

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Restore everything at the end of the context."""
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Undo every change since the snapshot."""
        for watched in self._watched:
            if watched.moved():
                watched.restore()

    def _follow(self, name: str, value: Any) -> Iterable[Named]:
        """Watch a value, and return the values to look at next."""
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return []
        self._seen[id(value)] = value
        match value:
            case types.FunctionType():
                return self._follow_function(name, value)
            case types.MethodType():
                return [(name, value.__func__), (f"{name}'s self", value.__self__)]
            case functools.partial():
                return [(name, value.func), (name, value.args), (name, value.keywords)]
            case property():
                return [(name, function) for function in (value.fget, value.fset) if function is not None]
            case staticmethod() | classmethod():
                return [(name, value.__func__)]
            case functools.cached_property():
                return [(name, value.func)]
            case type():
                return self._follow_class(value)
            case types.ModuleType():
                return []  # the functions that read it say which of its globals they read
            case np.random.Generator():
                bits = value.bit_generator
                self._watched.append(
                    WatchedGenerator(name, lambda: bits.state, functools.partial(setattr, bits, "state"))
                )
                return []
            case random.Random():
                self._watched.append(WatchedGenerator(name, value.getstate, value.setstate))
                return []
            case np.ndarray():
                if not value.dtype.hasobject:
                    self._watched.append(WatchedArray(name, value))
                return []
            case dict():
                return self._follow_dict(name, value, "[{!r}]")
            case list() | deque():
                self._watched.append(WatchedList(name, value, _same))
                return _numbered(name, value)
            case set():
                self._watched.append(WatchedSet(name, value))
                return []
            case tuple() | frozenset():
                return _numbered(name, value)
        return self._follow_object(name, value)

    def _follow_dict(self, name: str, mapping: dict[Any, Any], label: str) -> list[Named]:
        self._watched.append(WatchedDict(name, mapping, label.format, _same))
        return [(name + label.format(key), item) for key, item in mapping.items()]

    def _follow_function(self, name: str, function: types.FunctionType) -> list[Named]:
        found: list[Named] = []
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            watched = WatchedCell(variable, cell, _same)
            if not is_stock(function):  # Optax's schedules set variables of their own to the same values again
                self._watched.append(watched)
            if watched.value is not MISSING:
                found.append((variable, watched.value))
        found += [(name, function.__defaults__), (name, function.__kwdefaults__)]
        if not is_stock(function):
            found += self._follow_globals(function)
            if vars(function):
                found.append((name, vars(function)))
        elif hasattr(function, "__wrapped__"):
            found.append((name, function.__wrapped__))
        return found

    def _follow_globals(self, function: types.FunctionType) -> Iterator[Named]:
        names = list(dict.fromkeys(name for code in nested_code(function.__code__) for name in code.co_names))
        for name, value in self._follow_names("", function.__globals__, names):
            yield name, value
            if isinstance(value, types.ModuleType) and not is_stock(value):
                yield from self._follow_names(f"{name}.", vars(value), names)

    def _follow_names(self, prefix: str, owner: Any, names: Iterable[str]) -> Iterator[Named]:
        space = owner if isinstance(owner, dict) else vars(owner)
        for name in names:
            if name in space:
                self._watched.append(WatchedNames(prefix, owner, [name], _same))
                yield f"{prefix}{name}", space[name]

    def _follow_class(self, cls: type) -> Iterator[Named]:
        for base in cls.__mro__:
            if not is_stock(base):
                own = list(vars(base).items())
                names = [
                    key for key, value in own if not key.startswith("__") or isinstance(value, types.FunctionType)
                ]
                yield from self._follow_names(f"{base.__qualname__}.", base, names)

    def _follow_object(self, name: str, value: Any) -> list[Named]:
        found: list[Named] = []
        if not is_stock(type(value)):
            found.append((type(value).__qualname__, type(value)))
        wrapped = getattr(value, "__wrapped__", None)  # of a function under jax.jit
        if isinstance(wrapped, types.FunctionType | functools.partial | types.MethodType):
            found.append((name, wrapped))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and not hasattr(value, "__jax_array__"):
            found += self._follow_dict(name, attributes, ".{}")
        return found


def is_stock(value: Any) -> bool:
    """Return True if a function, class or module belongs to Python itself or to a framework."""
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return not isinstance(module, str) or module.partition(".")[0] in _STOCK


def _same(now: Any, before: Any) -> bool:
    if isinstance(before, tuple) and isinstance(now, tuple):
        return len(now) == len(before) and all(map(_same, now, before))
    if now is before:
        return True
    # Here NaN equals itself, and 1, 1.0 and True differ.
    if type(now) is not type(before) or not isinstance(before, _PLAIN):
        return False
    return now == before or repr(now) == repr(before)


def _numbered(name: str, values: Iterable[Any]) -> list[Named]:
    return [(f"{name}[{number}]", value) for number, value in enumerate(values)]
