"""From a model and functions to all places that their Python could read, by following values and code."""

import argparse
import dataclasses
import functools
import inspect
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.frameworks.torch.python_state.watched import (
    MISSING,
    Cache,
    Cell,
    Elements,
    Hidden,
    Items,
    Members,
    Names,
    Numbers,
    Place,
    Slots,
)

_SCALARS = frozenset(
    {int, float, complex, str, bytes, bool, range, slice, types.NoneType, types.EllipsisType, types.CodeType}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
_MOST = 200_000  # places
_LIBRARIES = (
    *(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).resolve().parents[3]),  # this one
)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TABLES = ("_parameters", "_buffers", "_modules", *_HOOKS)
# What nn.Module keeps for itself besides, and no forward reads.
_UNREAD = (frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}) - {"training"}
_CLASS_BOOKKEEPING = frozenset(
    {"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__abstractmethods__", "_abc_impl"}
    | {"__annotations__", "__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__"}
    | {"__slots__", "__match_args__", "__dataclass_params__", "__dataclass_fields__", "__hash__", "__init__"}
)
_ITERATORS = (types.GeneratorType, *(type(iter(kind())) for kind in (list, tuple, dict, set, str, bytes)))


class Walk:
    """Lists the places that the code of some roots could read, and the tensors that are no part of the models.

    Of objects that have methods of their own, only those attributes are followed that some code reached here
    names: an experiment's object may hold its data, its history and much else.
    """

    def __init__(self, roots: Sequence[tuple[str, Any]]) -> None:
        self._words: set[str] = set()
        while True:  # until all code is known that could name an attribute
            words = len(self._words)
            self._walk(roots)
            if len(self._words) == words:
                break

    def _walk(self, roots: Sequence[tuple[str, Any]]) -> None:
        self.refusal: str | None = None  # what there is that can't be watched
        self.places: list[Place] = []
        self.tensors: dict[int, Tensor] = {}
        self.parameters: list[nn.Parameter] = []
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []  # so that no id is used twice
        self._queue: deque[tuple[Any, str]] = deque()
        self._own = _own_tensors(value for _, value in roots if isinstance(value, nn.Module))
        for name, value in roots:
            self._add(Place(name), self._token(value, name))
        while self._queue:
            self._follow(*self._queue.popleft())

    def _add(self, place: Place, token: Hashable = None) -> None:
        if len(self.places) >= _MOST:
            self.refusal = "its Python reaches more values than can be watched"
            self._queue.clear()
            return
        place.token = (place.name, place.token if token is None else token)
        self.places.append(place)

    def _token(self, value: Any, name: str) -> Hashable:
        """A value to compare by. What has parts is followed later, and told by the order in which it was found."""
        kind = type(value)
        if kind in _SCALARS:
            return kind, value if kind in (int, str, bool) else repr(value)
        if value is MISSING:
            return "missing"
        if id(value) in self._own:
            return "own", self._own[id(value)], tuple(value.shape), value.dtype
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        if isinstance(value, Tensor):
            self.tensors[id(value)] = value
            strides = value.stride() if value.layout == torch.strided else None
            return "tensor", id(value), tuple(value.shape), value.dtype, value.device, strides, value.requires_grad
        if isinstance(value, types.ModuleType | types.BuiltinFunctionType | np.dtype | np.ufunc):
            return "one of a kind", id(value)
        self._queue.append((value, name))
        if isinstance(value, types.FunctionType):
            return "function", value.__code__
        return ("class", value) if isinstance(value, type) else ("object", kind)

    def _tokens(self, values: Iterable[Any], names: Iterable[str]) -> tuple[Hashable, ...]:
        return tuple(self._token(value, name) for value, name in zip(values, names, strict=True))

    def _parts(self, name: str, *values: Any) -> None:
        self._add(Place(name), self._tokens(values, [name] * len(values)))

    def _follow(self, value: Any, name: str) -> None:
        match value:
            case nn.Module():
                self._module(value, name)
            case dict():
                self._items(name, value, lambda key: f"[{key!r}]")
            case list() | deque():
                self._add(Elements(name, value), self._tokens(value, _numbered(name, len(value))))
            case tuple():
                self._add(Place(name), self._tokens(value, _numbered(name, len(value))))
            case set() | frozenset():
                place = Members(name, value) if isinstance(value, set) else Place(name)
                self._add(place, self._tokens(sorted(value, key=repr), [name] * len(value)))
            case bytearray():
                self._add(Numbers(name, value))
            case np.ndarray() if not value.dtype.hasobject:
                self._add(Numbers(name, value))
            case np.generic():
                self._add(Place(name), value.tobytes())
            case types.FunctionType():
                self._function(value, name)
            case types.MethodType():
                self._parts(name, value.__func__, value.__self__)
            case functools.partial():
                self._parts(name, value.func, value.args, value.keywords)
            case property():
                self._parts(name, value.fget, value.fset)
            case staticmethod() | classmethod():
                self._parts(name, value.__func__)
            case functools.cached_property():
                self._parts(name, value.func)
            case type():
                self._class(value)
            case _:
                self._hidden(value, name)

    def _items(
        self, name: str, mapping: dict[Any, Any], label: Callable[[Any], str], *, cheap: bool = True
    ) -> None:
        place = Items(name, mapping, label)
        place.cheap = cheap  # whether it is worth a look at every step
        keys = self._tokens(place.keys, [name] * len(place.keys))
        self._add(place, (keys, self._tokens(place.values, [name + label(key) for key in place.keys])))

    def _module(self, module: nn.Module, name: str) -> None:
        attributes = {key: value for key, value in vars(module).items() if key not in _UNREAD}
        tokens = self._tokens(attributes.values(), [f"{name}.{key}" for key in attributes])
        self._add(Items(name, vars(module), lambda key: f".{key}"), (tuple(attributes), tokens))
        for key in _TABLES:
            table = vars(module).get(key)
            if not isinstance(table, dict):
                continue
            if key not in _HOOKS:
                self._items(name, table, lambda key: f".{key}", cheap=False)
                continue
            hooks = Items(f"{name}'s hooks", table, lambda key: "")
            hooks.cheap = bool(table)
            self._add(hooks, self._tokens(table.values(), [f"{name}'s hook"] * len(table)))
        self.parameters += [parameter for parameter in module._parameters.values() if parameter is not None]
        self._token(type(module), type(module).__name__)

    def _function(self, function: types.FunctionType, name: str) -> None:
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            place = Cell(f"{name}'s {variable}", cell)
            self._add(place, self._token(place.value, place.name))
        self._parts(f"{name}'s default values", function.__defaults__, function.__kwdefaults__)
        if vars(function):
            self._items(name, vars(function), lambda key: f".{key}")
        if _is_own(function.__code__.co_filename):
            words = set(_words(function.__code__))
            self._words |= words | set(_texts(function.__code__))
            self._names("the global ", function.__globals__, words)
            for word in words - function.__globals__.keys():
                self._library(sys.modules.get(word), words)  # imported within the function

    def _names(self, name: str, owner: Any, words: set[str], absent: Iterable[str] = ()) -> None:
        """Watch the words that an owner has, and those that it may be given."""
        space = owner if isinstance(owner, dict) else vars(owner)
        found = sorted({word for word in words if word in space} | set(absent))
        place = Names(name, owner, found)
        self._add(place, (tuple(found), self._tokens(place.values, [f"{name}{word}" for word in found])))
        for value in place.values:
            if isinstance(value, types.ModuleType):
                self._library(value, words)

    def _library(self, module: types.ModuleType | None, words: set[str]) -> None:
        if module is not None and _is_own(getattr(module, "__file__", None) or ""):
            self._names(f"{module.__name__}.", vars(module), words)

    def _class(self, cls: type) -> None:
        if _is_own_class(cls):
            self._names(f"{cls.__name__}.", cls, {name for name in vars(cls) if name not in _CLASS_BOOKKEEPING})
        for base in cls.__mro__[1:]:
            if _is_own_class(base):
                self._token(base, base.__name__)

    def _hidden(self, value: Any, name: str) -> None:
        """What keeps its state out of sight; and all other objects."""
        match value:
            case random.Random():
                self._add(Hidden(name, value.getstate, value.setstate))
            case np.random.Generator():
                bits = value.bit_generator
                self._add(Hidden(name, lambda: bits.state, lambda state: setattr(bits, "state", state)))
            case np.random.RandomState():
                self._add(Hidden(name, lambda: value.get_state(legacy=False), value.set_state))
            case torch.Generator():
                self._add(
                    Hidden(
                        name,
                        lambda: value.get_state().tolist(),
                        lambda state: value.set_state(torch.tensor(state, dtype=torch.uint8)),
                    )
                )
            case functools._lru_cache_wrapper():
                self._add(Cache(name, lambda: value.cache_info().misses, lambda _: value.cache_clear()))
                self._parts(name, value.__wrapped__)
            case _ if isinstance(value, _ITERATORS) or type(value).__module__ == "itertools":
                self.refusal = f"it can advance {name}, an iterator, at every step"
            case _:
                self._object(value, name)

    def _object(self, value: Any, name: str) -> None:
        kind = type(value)
        if kind.__module__.partition(".")[0] == "modelfleet":
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            if _is_data(kind):
                self._items(name, attributes, lambda key: f".{key}")
            else:
                # What is read of its class may be given to the object itself.
                given = (word for word in self._words - attributes.keys() if _is_value_of(kind, word))
                self._names(f"{name}.", attributes, self._words, given)
        slots = [slot for base in kind.__mro__ for slot in _slots(base)]
        if slots:
            place = Slots(name, value, slots)
            self._add(place, self._tokens(place.values, [f"{name}.{slot}" for slot in slots]))
        self._token(kind, kind.__name__)


def _own_tensors(models: Iterable[nn.Module]) -> dict[int, str]:
    """The names of the models' parameters and buffers, by id: a program has them as its state."""
    found: dict[int, str] = {}
    for model in models:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            found.setdefault(id(tensor), name)
    return found


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}[{index}]" for index in range(count)]


def _words(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in some code, and in the functions within."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _words(constant)


def _texts(code: types.CodeType) -> Iterator[str]:
    """The texts in some code: `getattr(self, "beta")` reads what one of them names."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _texts(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


@functools.lru_cache(maxsize=4096)
def _is_own(path: str) -> bool:
    """Whether a file is the user's, and none of Python's or of an installed library."""
    if not path or path.startswith("<frozen"):
        return False
    return path.startswith("<") or not str(Path(path).resolve()).startswith(_LIBRARIES)


def _is_own_class(cls: type) -> bool:
    if cls.__module__ == "__main__":
        return True
    return _is_own(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")


def _is_value_of(kind: type, name: str) -> bool:
    """Whether a class has a value of this name that is no method and no property."""
    value = inspect.getattr_static(kind, name, MISSING)
    return value is not MISSING and not callable(value) and not hasattr(type(value), "__get__")


def _is_data(kind: type) -> bool:
    """Whether instances are there to be read as a whole: settings, say, or anything without methods of its own."""
    if issubclass(kind, types.SimpleNamespace | argparse.Namespace) or dataclasses.is_dataclass(kind):
        return True
    return kind.__name__.endswith("Config") or not any(
        isinstance(value, types.FunctionType) and not (name.startswith("__") and name != "__call__")
        for base in kind.__mro__[:-1]
        for name, value in vars(base).items()
    )


def _slots(cls: type) -> list[str]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return [
        f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]
