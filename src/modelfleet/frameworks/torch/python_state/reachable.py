"""Find everything that the Python of a model and some functions could read, by following values and code."""

import argparse
import dataclasses
import functools
import inspect
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.frameworks.structure import nested_code
from modelfleet.frameworks.torch.structure import HOOKS
from modelfleet.frameworks.torch.values import slots_of
from modelfleet.frameworks.user_code import is_user_file
from modelfleet.frameworks.watched import (
    MISSING,
    Watched,
    WatchedArray,
    WatchedCache,
    WatchedCell,
    WatchedDict,
    WatchedGenerator,
    WatchedList,
    WatchedNames,
    WatchedSet,
    WatchedSlots,
)

_SCALARS = frozenset(
    {int, float, complex, str, bytes, bool, range, slice, types.NoneType, types.EllipsisType, types.CodeType}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
_MAX_WATCHED = 200_000
_TABLES = ("_parameters", "_buffers", "_modules", *HOOKS)
# Attributes that nn.Module keeps for itself, and no forward reads.
_UNREAD = (frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}) - {"training"}
_CLASS_BOOKKEEPING = frozenset(
    {"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__abstractmethods__", "_abc_impl"}
    | {"__annotations__", "__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__"}
    | {"__slots__", "__match_args__", "__dataclass_params__", "__dataclass_fields__", "__hash__", "__init__"}
)
_ITERATORS = (types.GeneratorType, *(type(iter(kind())) for kind in (list, tuple, dict, set, str, bytes)))


class Reachable:
    """Everything that the code of some roots could read, and the tensors that are not part of the models.

    An object with methods of its own may hold much that no code here reads: an experiment holds its data and its
    history. Of such an object, only attributes are followed whose names occur in some code that was reached.

    Attributes:
        watched: What keeps the values, in the order in which it was found.
        tensors: Tensors that are not part of the models, by id.
        parameters: The parameters of all modules that were reached.
        refusal: Why something can't be watched; None if everything can.
    """

    def __init__(self, roots: Sequence[tuple[str, Any]]) -> None:
        self._words: set[str] = set()
        while True:  # until no more code is found that could name an attribute
            words = len(self._words)
            self._walk(roots)
            if len(self._words) == words:
                break

    def _walk(self, roots: Sequence[tuple[str, Any]]) -> None:
        self.refusal: str | None = None
        self.watched: list[Watched] = []
        self.tensors: dict[int, Tensor] = {}
        self.parameters: list[nn.Parameter] = []
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []  # kept alive, so that no id is used twice
        self._queue: deque[tuple[Any, str]] = deque()
        self._own = _own_tensors(value for _, value in roots if isinstance(value, nn.Module))
        for name, value in roots:
            self._add(Watched(name), self._token(value, name))
        while self._queue:
            self._follow(*self._queue.popleft())

    def _add(self, watched: Watched, token: Hashable = None) -> None:
        if len(self.watched) >= _MAX_WATCHED:
            self.refusal = "its Python reaches more values than can be watched"
            self._queue.clear()
            return
        watched.token = (watched.name, watched.token if token is None else token)
        self.watched.append(watched)

    def _token(self, value: Any, name: str) -> Hashable:
        """Return a key for a value. A value with parts is followed later; its key is the order of discovery."""
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
        self._add(Watched(name), self._tokens(values, [name] * len(values)))

    def _follow(self, value: Any, name: str) -> None:
        match value:
            case nn.Module():
                self._follow_module(value, name)
            case dict():
                self._follow_dict(name, value, lambda key: f"[{key!r}]")
            case list() | deque():
                self._add(WatchedList(name, value), self._tokens(value, _numbered(name, len(value))))
            case tuple():
                self._add(Watched(name), self._tokens(value, _numbered(name, len(value))))
            case set() | frozenset():
                watched = WatchedSet(name, value) if isinstance(value, set) else Watched(name)
                self._add(watched, self._tokens(sorted(value, key=repr), [name] * len(value)))
            case bytearray():
                self._add(WatchedArray(name, value))
            case np.ndarray() if not value.dtype.hasobject:
                self._add(WatchedArray(name, value))
            case np.generic():
                self._add(Watched(name), value.tobytes())
            case types.FunctionType():
                self._follow_function(value, name)
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
                self._follow_class(value)
            case _:
                self._follow_generator(value, name)

    def _follow_dict(
        self, name: str, mapping: dict[Any, Any], label: Callable[[Any], str], *, cheap: bool = True
    ) -> None:
        watched = WatchedDict(name, mapping, label)
        watched.cheap = cheap
        keys = self._tokens(watched.keys, [name] * len(watched.keys))
        self._add(watched, (keys, self._tokens(watched.values, [name + label(key) for key in watched.keys])))

    def _follow_module(self, module: nn.Module, name: str) -> None:
        attributes = {key: value for key, value in vars(module).items() if key not in _UNREAD}
        tokens = self._tokens(attributes.values(), [f"{name}.{key}" for key in attributes])
        self._add(WatchedDict(name, vars(module), lambda key: f".{key}"), (tuple(attributes), tokens))
        for key in _TABLES:
            table = vars(module).get(key)
            if not isinstance(table, dict):
                continue
            if key not in HOOKS:
                self._follow_dict(name, table, lambda key: f".{key}", cheap=False)
                continue
            hooks = WatchedDict(f"{name}'s hooks", table, lambda key: "")
            hooks.cheap = bool(table)
            self._add(hooks, self._tokens(table.values(), [f"{name}'s hook"] * len(table)))
        self.parameters += [parameter for parameter in module._parameters.values() if parameter is not None]
        self._token(type(module), type(module).__name__)

    def _follow_function(self, function: types.FunctionType, name: str) -> None:
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            watched = WatchedCell(f"{name}'s {variable}", cell)
            self._add(watched, self._token(watched.value, watched.name))
        self._parts(f"{name}'s default values", function.__defaults__, function.__kwdefaults__)
        if vars(function):
            self._follow_dict(name, vars(function), lambda key: f".{key}")
        if is_user_file(function.__code__.co_filename):
            codes = list(nested_code(function.__code__))
            words = {name for code in codes for name in code.co_names}
            # Strings that could be names, such as the one in `getattr(self, "beta")`.
            strings = {constant for code in codes for constant in code.co_consts if isinstance(constant, str)}
            self._words |= words | {string for string in strings if string.isidentifier()}
            self._follow_names("the global ", function.__globals__, words)
            for word in words - function.__globals__.keys():
                self._follow_user_module(sys.modules.get(word), words)  # imported within the function

    def _follow_names(self, name: str, owner: Any, words: set[str], absent: Iterable[str] = ()) -> None:
        """Watch those of `words` that an owner has, and the `absent` ones, which it may get later."""
        space = owner if isinstance(owner, dict) else vars(owner)
        found = sorted({word for word in words if word in space} | set(absent))
        watched = WatchedNames(name, owner, found)
        self._add(watched, (tuple(found), self._tokens(watched.values, [f"{name}{word}" for word in found])))
        for value in watched.values:
            if isinstance(value, types.ModuleType):
                self._follow_user_module(value, words)

    def _follow_user_module(self, module: types.ModuleType | None, words: set[str]) -> None:
        if module is not None and is_user_file(getattr(module, "__file__", None) or ""):
            self._follow_names(f"{module.__name__}.", vars(module), words)

    def _follow_class(self, cls: type) -> None:
        if _is_user_class(cls):
            self._follow_names(f"{cls.__name__}.", cls, vars(cls).keys() - _CLASS_BOOKKEEPING)
        for base in cls.__mro__[1:]:
            if _is_user_class(base):
                self._token(base, base.__name__)

    def _follow_generator(self, value: Any, name: str) -> None:
        """Follow an object whose state only a method returns, or any other object."""
        match value:
            case random.Random():
                self._add(WatchedGenerator(name, value.getstate, value.setstate))
            case np.random.Generator():
                bits = value.bit_generator
                self._add(WatchedGenerator(name, lambda: bits.state, lambda state: setattr(bits, "state", state)))
            case np.random.RandomState():
                self._add(WatchedGenerator(name, lambda: value.get_state(legacy=False), value.set_state))
            case torch.Generator():
                self._add(
                    WatchedGenerator(
                        name,
                        lambda: value.get_state().tolist(),
                        lambda state: value.set_state(torch.tensor(state, dtype=torch.uint8)),
                    )
                )
            case functools._lru_cache_wrapper():
                self._add(WatchedCache(name, lambda: value.cache_info().misses, lambda _: value.cache_clear()))
                self._parts(name, value.__wrapped__)
            case _ if isinstance(value, _ITERATORS) or type(value).__module__ == "itertools":
                self.refusal = f"it can advance {name}, an iterator, at every step"
            case _:
                self._follow_object(value, name)

    def _follow_object(self, value: Any, name: str) -> None:
        kind = type(value)
        if kind.__module__.partition(".")[0] == "modelfleet":
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            if _is_data(kind):
                self._follow_dict(name, attributes, lambda key: f".{key}")
            else:
                # An attribute that is now found on its class may be set on the object later.
                given = (word for word in self._words - attributes.keys() if _is_value_of(kind, word))
                self._follow_names(f"{name}.", attributes, self._words, given)
        slots = slots_of(kind)
        if slots:
            watched = WatchedSlots(name, value, slots)
            self._add(watched, self._tokens(watched.values, [f"{name}.{slot}" for slot in slots]))
        self._token(kind, kind.__name__)


def _own_tensors(models: Iterable[nn.Module]) -> dict[int, str]:
    """Return the names of the models' parameters and buffers, by id. A program has them as its state."""
    found: dict[int, str] = {}
    for model in models:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            found.setdefault(id(tensor), name)
    return found


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}[{index}]" for index in range(count)]


def _is_user_class(cls: type) -> bool:
    if cls.__module__ == "__main__":
        return True
    return is_user_file(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")


def _is_value_of(kind: type, name: str) -> bool:
    """Return True if a class has a value of this name that is no method and no property."""
    value = inspect.getattr_static(kind, name, MISSING)
    return value is not MISSING and not callable(value) and not hasattr(type(value), "__get__")


def _is_data(kind: type) -> bool:
    """Return True if instances are read as a whole, such as settings, or anything without methods of its own."""
    if issubclass(kind, types.SimpleNamespace | argparse.Namespace) or dataclasses.is_dataclass(kind):
        return True
    return kind.__name__.endswith("Config") or not any(
        isinstance(value, types.FunctionType) and not (name.startswith("__") and name != "__call__")
        for base in kind.__mro__[:-1]
        for name, value in vars(base).items()
    )
