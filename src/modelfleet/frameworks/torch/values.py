"""Hashable forms of a module's attributes, which compare by content."""

import functools
import hashlib
import inspect
import logging
import re
import struct
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from modelfleet.frameworks.structure import MAX_SHOWN, Opaque, cell_contents, is_importable, shorten

_SCALARS = frozenset(
    {int, bool, str, bytes, range}
    | {types.NoneType, types.EllipsisType, types.NotImplementedType, types.CodeType}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
# Values whose own == is right: it compares content, or there is only one such object.
_COMPARABLE = (
    *(re.Pattern, PurePath, np.dtype, np.ufunc, types.ModuleType, logging.Logger),
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
)

# Where a Hugging Face config came from.
_ORIGIN = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})

# Entries of a class that do not affect what its instances do.
_CLASS_BOOKKEEPING = frozenset(
    {"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__abstractmethods__", "_abc_impl"}
    | {"__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"}
    | {"__conditional_annotations__", "__type_params__", "__orig_bases__", "__parameters__"}
    | {"__firstlineno__", "__static_attributes__"}
)


class Leaf(NamedTuple):
    """Value without parts."""

    kind: Hashable
    content: Hashable


class Tree(NamedTuple):
    """Value with parts. A part's label follows the name of the whole, as in `[0]` and `.stride`."""

    kind: Hashable
    parts: tuple[tuple[str, Hashable], ...]


_NUMBER = Leaf("number", None)


class Freezer:
    """Turns the values of one model's attributes into hashable ones, which are equal if the contents are.

    `names` returns the names of the model's own modules and tensors by id. An attribute that holds one of them
    refers to it by name; any other tensor is compared by its numbers, or only by its shape without `contents`.
    """

    def __init__(self, names: Callable[[], dict[int, str]] = dict, *, contents: bool = True) -> None:
        self._find_names = names
        self._contents = contents
        self._known: dict[int, tuple[object, Hashable]] = {}  # keeps the objects alive, so that ids stay unique

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        return self._find_names()

    def freeze(self, value: Any) -> Hashable:
        """Return `value` as a hashable one. An object is read once; a cycle ends where it closes."""
        kind = type(value)
        if kind in _SCALARS:
            return Leaf(kind, value)
        if kind is float or kind is complex:
            return Leaf(kind, repr(value))  # exact, nan equal to itself, and -0.0 apart from 0.0
        if id(value) in self._known:
            return self._known[id(value)][1]
        self._known[id(value)] = (value, Leaf("cycle", len(self._known)))
        try:
            frozen = self._freeze_new(value)
        except RecursionError:
            frozen = Opaque(value)
        self._known[id(value)] = (value, frozen)
        return frozen

    def freeze_class(self, cls: type) -> Hashable:
        """Return the class itself, or its contents if each model has its own, from a function or parametrize."""
        return cls if is_importable(cls) else self.freeze(cls)

    def _freeze_new(self, value: Any) -> Hashable:
        kind = type(value)
        match value:
            case Opaque():
                return value
            case nn.Module() | Tensor() if id(value) in self._names:
                return Leaf("reference", self._names[id(value)])
            case Tensor():
                return _freeze_tensor(value) if self._contents else _tensor_leaf(value)
            case np.ndarray() if not self._contents:
                return Opaque(value)
            case np.ndarray() if not value.dtype.hasobject:
                return _digest("array", value.dtype.name, value.shape, value.tobytes())
            case np.generic():
                return Leaf(kind, repr(value))
            case RemovableHandle():
                return Leaf(kind, "hook handle")  # the hooks count; their numbers don't
            case Enum():
                return Leaf(self.freeze_class(kind), value.name)
            case set() | frozenset():
                return Leaf(self.freeze_class(kind), frozenset(self.freeze(element) for element in value))
            case type():
                return value if is_importable(value) else self._tree(*_parts_of_class(value))
            case types.FunctionType():
                return Leaf(kind, value) if is_importable(value) else self._tree(kind, _parts_of_function(value))
        if isinstance(value, _COMPARABLE):
            return Leaf(kind, value)
        parts = _parts_of_builtin(value)
        if parts is None and _keeps_hidden_state(kind):
            return Opaque(value)
        return self._tree(self.freeze_class(kind), [*(parts or ()), *_attributes(value)])

    def _tree(self, kind: Hashable, parts: list[tuple[str, Any]]) -> Tree:
        return Tree(kind, tuple((label, self.freeze(part)) for label, part in parts))


def without_numbers(frozen: Hashable, owner: Hashable = None, name: str = "") -> Hashable:
    """Return a frozen value without its floats, and without what is in its tensors.

    Args:
        frozen: The frozen value.
        owner: The class of the object that has it.
        name: The attribute's name there. An integer counts as a float if the class takes a float by that name.
    """
    match frozen:
        case Tree(kind, parts):
            own = ((label, without_numbers(part, kind, label.removeprefix("."))) for label, part in parts)
            return Tree(without_numbers(kind), tuple(own))
        case Leaf(type() as kind, _) if issubclass(kind, float | np.floating):
            return _NUMBER
        case Leaf(kind, _) if kind is int and name in _float_parameters(owner):
            return _NUMBER
        case Leaf(_, _Digest("tensor", dtype, shape)) if "float" in dtype:
            return Leaf("tensor", (dtype, shape))
    return frozen


def _float_parameters(owner: Hashable) -> frozenset[str]:
    """Return the parameters of a class's `__init__` that are floats by their annotation or default value."""
    return _floats_of(owner) if isinstance(owner, type) else frozenset()


@functools.lru_cache(maxsize=512)
def _floats_of(cls: type) -> frozenset[str]:
    try:
        parameters = inspect.signature(cls.__init__).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(p.name for p in parameters if p.annotation in (float, "float") or type(p.default) is float)


def differ(name: str, value: Hashable, other: Hashable) -> str:
    """Return where two frozen values called `name` first differ, as in "features.3.stride is 2, not 1"."""
    for side in (value, other):
        if isinstance(side, Opaque):
            return f"attribute {name} of type {type(side.value).__name__} can't be compared"
    text, other_text = show(value), show(other)
    unclear = text == other_text or max(len(text), len(other_text)) > MAX_SHOWN
    if unclear and isinstance(value, Tree) and isinstance(other, Tree) and value.kind == other.kind:
        return _differ_in_part(name, value, other)
    if text == other_text:
        return f"{name} is another {shorten(text)}"
    return f"{name} is {shorten(text)}, not {shorten(other_text)}"


def _differ_in_part(name: str, value: Tree, other: Tree) -> str:
    ours, theirs = dict(value.parts), dict(other.parts)
    for label, part in ours.items():
        if label not in theirs:
            return f"{name}{label} is {shorten(show(part))}, the other has none"
        if part != theirs[label]:
            return differ(name + label, part, theirs[label])
    missing = [label for label in theirs if label not in ours]
    return f"has no {name}{missing[0]}" if missing else f"{name} has another order"


def show(frozen: Hashable) -> str:
    """Return a frozen value as text; an object as the name of its class."""
    match frozen:
        case Tree(kind, parts) if isinstance(kind, type) and issubclass(kind, list | tuple):
            inner = ", ".join(show(part) for _, part in parts)
            if issubclass(kind, list):
                return f"[{inner}]"
            return f"({inner},)" if len(parts) == 1 else f"({inner})"
        case Tree(kind, parts) if isinstance(kind, type) and issubclass(kind, dict):
            return "{" + ", ".join(f"{label[1:-1]}: {show(part)}" for label, part in parts) + "}"
        case Tree(_, (("", part), *_)):
            return show(part)
        case Tree(kind):
            return show(kind)
        case type():
            return frozen.__qualname__
        case Opaque(value=value):
            return f"a {type(value).__name__} that can't be compared"
        case Leaf(_, _Digest() as digest):
            return f"{digest.dtype} {digest.what} {digest.shape}"
        case Leaf(_, frozenset() as elements):
            return "{" + ", ".join(sorted(show(element) for element in elements)) + "}"
        case Leaf(_, types.CodeType() as code):
            return f"{code.co_name} at {PurePath(code.co_filename).name}:{code.co_firstlineno}"
        case Leaf(kind, str() as text) if kind is not str:
            return text
        case Leaf(_, content):
            return getattr(content, "__qualname__", None) or repr(content)
    return repr(frozen)


class _Digest(NamedTuple):
    what: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes


def _digest(what: str, dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> Leaf:
    return Leaf(what, _Digest(what, dtype, tuple(shape), hashlib.blake2b(data, digest_size=16).digest()))


def _freeze_tensor(tensor: Tensor) -> Hashable:
    try:
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().data
    except (RuntimeError, TypeError, NotImplementedError):  # sparse, quantized, on the meta device, …
        return Opaque(tensor)
    what = "trained tensor" if tensor.requires_grad else "tensor"
    return _digest(what, str(tensor.dtype).removeprefix("torch."), tensor.shape, data)


def _tensor_leaf(tensor: Tensor) -> Leaf:
    what = "trained tensor" if tensor.requires_grad else "tensor"
    return Leaf(what, (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))


def _parts_of_class(cls: type) -> tuple[Leaf, list[tuple[str, Any]]]:
    own = [(f".{name}", item) for name, item in sorted(vars(cls).items()) if name not in _CLASS_BOOKKEEPING]
    return Leaf("class", cls.__qualname__), [("'s module", cls.__module__), ("'s bases", cls.__bases__), *own]


def _parts_of_function(function: types.FunctionType) -> list[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [
        ("", function.__code__),
        ("'s default values", (function.__defaults__, function.__kwdefaults__)),
        *((f"'s {name}", cell_contents(cell)) for name, cell in cells),
        *_attributes(function),
        ("'s globals", Opaque(function.__globals__)),
    ]


def _parts_of_builtin(value: Any) -> list[tuple[str, Any]] | None:
    """Return the parts that Python and NumPy keep outside of an object's attributes; None for other objects."""
    match value:
        case int() | float() | complex() | str() | bytes() | bytearray():
            base: Any = next(base for base in type(value).__mro__ if base.__module__ == "builtins")
            return [("", base.__repr__(value))]  # a subclass may override __repr__
        case list() | tuple() | deque():
            return [(f"[{index}]", item) for index, item in enumerate(value)]
        case defaultdict():
            return [*_items(value), ("'s default", value.default_factory)]
        case dict() | types.MappingProxyType():
            return list(_items(value))
        case np.ndarray():
            return [("'s shape", value.shape), ("", value.ravel().tolist())]
        case slice():
            return [("", (value.start, value.stop, value.step))]
        case functools.partial():
            return [("", value.func), ("'s arguments", value.args), ("'s keywords", value.keywords)]
        case types.MethodType():
            return [("", value.__func__), ("'s self", value.__self__)]
        case property():
            return [("'s getter", value.fget), ("'s setter", value.fset), ("'s deleter", value.fdel)]
        case staticmethod() | classmethod():
            return [("", value.__func__)]
        case functools.cached_property():
            return [("", value.func)]
        case weakref.ref():
            return [("()", value())]
        case types.MemberDescriptorType() | types.GetSetDescriptorType():
            return [("", value.__name__)]
    return None


def _items(mapping: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for index, (key, item) in enumerate(mapping.items()):
        if type(key) in _SCALARS:
            yield f"[{key!r}]", item
        else:
            yield f"'s key {index}", key
            yield f"'s value {index}", item


def _attributes(value: Any) -> list[tuple[str, Any]]:
    attributes = dict(getattr(value, "__dict__", ()))
    for name in slots_of(type(value)):
        if hasattr(value, name):
            attributes[name] = getattr(value, name)
    return [(f".{name}", item) for name, item in sorted(attributes.items()) if name not in _ORIGIN]


def slots_of(cls: type) -> list[str]:
    """Return the names of the attributes that instances keep in `__slots__`."""
    found = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                found.append(f"_{base.__name__.lstrip('_')}{name}")  # as Python mangles it
            elif name not in ("__dict__", "__weakref__"):
                found.append(name)
    return found


def _keeps_hidden_state(cls: type) -> bool:
    """Return True if instances hold more than attributes, like files, locks and other objects written in C."""
    words = len(slots_of(cls)) + (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    return cls.__itemsize__ > 0 or cls.__basicsize__ > object.__basicsize__ + words * struct.calcsize("P")
