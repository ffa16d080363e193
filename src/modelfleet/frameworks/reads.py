"""The Python values that a model's code reads, to see whether they have changed, and to put them back.

A traced program has the values of globals, closure cells, defaults and attributes built in. `Reads` walks from
a few functions and objects to every place where such a value is kept. A place is compared shallowly: by identity,
and numbers and texts by value. Whatever is reachable has its own place, so nothing can change unseen.
"""

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

_PLAIN = (int, float, complex, str, bytes, bool, type(None), types.CodeType)
# Packages whose own globals and classes do not change; what their closures hold is looked at all the same.
_STOCK = frozenset(sys.stdlib_module_names) | {
    *("jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes", "chex", "absl", "etils", "orbax", "modelfleet"),
    *("torch", "keras", "tensorflow", "scipy", "pandas", "polars", "pytest", "_pytest", "typing_extensions"),
}
_MOST = 20_000  # places: who reads more than this has a whole library in reach
_LARGE = 4096  # bytes of an array


class Place(NamedTuple):
    """Somewhere that values are kept."""

    name: str
    now: Callable[[], Any]
    """What is there: a tuple of values, or a state of a generator or the numbers of an array as bytes."""
    put: Callable[[Any], None]
    """Put what `now` gave there again."""
    draws: bool = False
    """Whether it is a generator, which somebody else may draw from as well."""
    large: bool = False
    """Whether comparing it takes long."""


class Reads:
    """What the Python that hangs on some objects reads. `skip` are objects that are no part of it."""

    def __init__(self, roots: Mapping[str, Any], skip: Any = ()) -> None:
        self._places: list[tuple[Place, Any]] = []
        self._seen: dict[int, Any] = {id(value): value for value in skip}  # held: no id is used twice
        self._add(Place("Python's random", random.getstate, random.setstate, draws=True))
        self._add(Place("numpy.random", _numpy_state, _set_numpy_state, draws=True))
        waiting = deque(roots.items())
        while waiting and len(self._places) < _MOST:
            name, value = waiting.popleft()
            waiting.extend(self._parts(name, value))

    def changed(self, *, draws: bool = False, thoroughly: bool = True) -> str | None:
        """The name of a place that holds something else now; None if there is none. With `draws`, a generator too
        that has been drawn from. Not `thoroughly`: large arrays are left out."""
        looked_at = (
            (place, before)
            for place, before in self._places
            if (draws or not place.draws) and (thoroughly or not place.large)
        )
        return next((place.name for place, before in looked_at if not _same(place.now(), before)), None)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have all places as they were, after what runs within."""
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Put back what was there."""
        for place, before in self._places:
            if not _same(place.now(), before):
                place.put(before)

    def _add(self, place: Place) -> None:
        self._places.append((place, place.now()))

    def _parts(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """What to look at next after a value, whose places are noted."""
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return []
        self._seen[id(value)] = value
        match value:
            case types.FunctionType():
                return self._of_function(name, value)
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
                return self._of_class(name, value)
            case types.ModuleType():
                return []  # what is read of it is found by who reads it
            case np.random.Generator():
                source = value.bit_generator
                self._places.append(self._stated(name, source))
                return []
            case random.Random():
                self._add(Place(name, value.getstate, value.setstate, draws=True))
                return []
            case np.ndarray():
                if not value.dtype.hasobject:
                    large = value.nbytes > _LARGE
                    self._add(Place(name, value.tobytes, functools.partial(_fill, value), large=large))
                return []
            case dict():
                self._add(Place(name, lambda: tuple(value.items()), functools.partial(_refill, value)))
                return [(f"{name}[{key!r}]", item) for key, item in value.items()]
            case list() | deque():
                self._add(Place(name, lambda: tuple(value), functools.partial(_refill_list, value)))
                return [(f"{name}[{number}]", item) for number, item in enumerate(value)]
            case set():
                self._add(Place(name, lambda: tuple(value), functools.partial(_refill_set, value)))
                return []
            case tuple() | frozenset():
                return [(f"{name}[{number}]", item) for number, item in enumerate(value)]
        return self._of_object(name, value)

    @staticmethod
    def _stated(name: str, source: Any) -> tuple[Place, Any]:
        def put(state: Any) -> None:
            source.state = state[1]

        def now() -> Any:
            return repr(source.state), source.state

        return Place(name, lambda: _State(now()), put, draws=True), _State(now())

    def _of_function(self, name: str, function: types.FunctionType) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if not stock(function):  # Optax's schedules set variables of their own to the same values again
                self._add(Place(variable, functools.partial(_cell, cell), functools.partial(_set_cell, cell)))
            found += [(variable, item) for item in _cell(cell)]
        found += [(name, function.__defaults__), (name, function.__kwdefaults__)]
        if not stock(function):
            found += self._of_globals(function)
            if vars(function):
                found.append((name, vars(function)))
        elif hasattr(function, "__wrapped__"):
            found.append((name, function.__wrapped__))
        return found

    def _of_globals(self, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        space = function.__globals__
        names = _names(function.__code__)
        for name in names:
            if name not in space:
                continue
            now, put = functools.partial(_item, space, name), functools.partial(_set_item, space, name)
            self._add(Place(name, now, put))
            value = space[name]
            yield name, value
            if isinstance(value, types.ModuleType) and not stock(value):
                own = vars(value)
                for inner in names:
                    if inner in own:
                        now, put = functools.partial(_item, own, inner), functools.partial(_set_item, own, inner)
                        self._add(Place(f"{name}.{inner}", now, put))
                        yield f"{name}.{inner}", own[inner]

    def _of_class(self, name: str, cls: type) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for base in cls.__mro__:
            if stock(base):
                continue
            for key, value in list(vars(base).items()):
                if not key.startswith("__") or isinstance(value, types.FunctionType):
                    label = f"{base.__qualname__}.{key}"
                    now = functools.partial(_attribute, base, key)
                    self._add(Place(label, now, functools.partial(_set_attribute, base, key)))
                    found.append((label, value))
        return found

    def _of_object(self, name: str, value: Any) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        if not stock(type(value)):
            found.append((type(value).__qualname__, type(value)))
        wrapped = getattr(value, "__wrapped__", None)  # of what jax.jit gives
        if isinstance(wrapped, types.FunctionType | functools.partial | types.MethodType):
            found.append((name, wrapped))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and not hasattr(value, "__jax_array__"):
            self._add(Place(name, lambda: tuple(attributes.items()), functools.partial(_refill, attributes)))
            found += [(f"{name}.{key}", item) for key, item in attributes.items()]
        return found


class _State(tuple):
    """The state of a generator: told by its text, and put back as it is."""

    __slots__ = ()


def stock(value: Any) -> bool:
    """Whether a function, class or module is of Python itself or of a framework."""
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return not isinstance(module, str) or module.partition(".")[0] in _STOCK


def _same(now: Any, before: Any) -> bool:
    if isinstance(before, _State):
        return now[0] == before[0]
    if isinstance(before, tuple) and isinstance(now, tuple):
        return len(now) == len(before) and all(map(_same, now, before))
    if now is before:
        return True
    # NaN equals itself here, and 1, 1.0 and True are unlike.
    if type(now) is not type(before) or not isinstance(before, _PLAIN):
        return False
    return now == before or repr(now) == repr(before)


def _names(code: types.CodeType) -> list[str]:
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _cell(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not yet assigned
        return ()


def _set_cell(cell: types.CellType, value: tuple[Any, ...]) -> None:
    if value:
        cell.cell_contents = value[0]


def _item(space: dict[str, Any], name: str) -> tuple[Any, ...]:
    return (space[name],) if name in space else ()


def _set_item(space: dict[str, Any], name: str, value: tuple[Any, ...]) -> None:
    if value:
        space[name] = value[0]


def _attribute(owner: Any, name: str) -> tuple[Any, ...]:
    own = vars(owner)
    return (own[name],) if name in own else ()


def _set_attribute(owner: Any, name: str, value: tuple[Any, ...]) -> None:
    if value:
        setattr(owner, name, value[0])


def _refill(own: dict[Any, Any], items: tuple[tuple[Any, Any], ...]) -> None:
    own.clear()
    own.update(items)


def _refill_list(own: Any, items: tuple[Any, ...]) -> None:
    own.clear()
    own.extend(items)


def _refill_set(own: set[Any], items: tuple[Any, ...]) -> None:
    own.clear()
    own.update(items)


def _fill(array: np.ndarray, data: bytes) -> None:
    array[...] = np.frombuffer(data, array.dtype).reshape(array.shape)


def _numpy_state() -> Any:
    state: Any = np.random.get_state(legacy=False)
    return _State(((state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"]), state))


def _set_numpy_state(state: Any) -> None:
    np.random.set_state(state[1])
