"""Plain Python values as hashable ones: what layers, losses and optimizers were told, compared by content."""

import functools
import hashlib
import sys
import types
from collections.abc import Hashable, Mapping
from typing import Any

import keras
import numpy as np

NOTHING = "·"
"""In the place of what is compared elsewhere: a layer, a variable, a seed."""

_LONG = 60  # characters of a value that a message shows

_ELSEWHERE = (
    *(keras.layers.Layer, keras.Variable, keras.random.SeedGenerator, keras.initializers.Initializer),
    *(keras.KerasTensor, keras.Optimizer),
)


_NAMES = frozenset({"name", "_name"})
_METRIC = frozenset(vars(keras.metrics.Metric())) | _NAMES


class Opaque:
    """A value that can't be looked into, and so equals itself only."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def freeze(value: Any) -> Hashable:
    """`value` as a hashable one, equal where the contents are."""
    match value:
        case None | bool() | int() | str() | bytes() | type():
            return type(value), value
        case float() | complex():
            return type(value), repr(value)  # nan equal to itself, and -0.0 apart from 0.0
        case np.ndarray() | np.generic():
            digest = hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=16).digest()
            return "array", value.dtype.name, value.shape, digest
        case tuple() if hasattr(value, "_fields"):
            return type(value), *map(freeze, value)
        case Mapping():
            return "dict", *((freeze(key), freeze(value[key])) for key in sorted(value, key=str))
        case list() | tuple():
            return "list", *map(freeze, value)  # JSON, and so a saved model, does not tell them apart
        case set() | frozenset():
            return "set", frozenset(map(freeze, value))
        case types.FunctionType():
            return value if _importable(value) else _of_function(value)
        case types.MethodType():
            return "method", freeze(value.__func__), freeze(value.__self__)
        case functools.partial():
            return "partial", freeze(value.func), freeze(value.args), freeze(value.keywords)
    return _of_object(value)


def show(frozen: Hashable) -> str:
    """A frozen value as a reader knows it."""
    text = _text(frozen)
    return text if len(text) <= _LONG else f"{text[: _LONG - 1]}…"


def _text(frozen: Any) -> str:
    match frozen:
        case (float() | type(), str() as text) if frozen[0] in (float, complex):
            return text
        case (type(), value) if frozen[0] in (type(None), bool, int, str, bytes, type):
            return value.__qualname__ if isinstance(value, type) else repr(value)
        case ("array", dtype, shape, _):
            return f"a {dtype} array {shape}"
        case ("list" | "set", *parts):
            return f"[{', '.join(map(_text, parts))}]"
        case ("dict", *items):
            return "{" + ", ".join(f"{_text(key)}: {_text(item)}" for key, item in items) + "}"
        case ("function", code, *_):
            return f"the function {code.co_name}"
        case types.FunctionType():
            return f"the function {frozen.__qualname__}"
        case (type() as kind, *rest):
            return f"{kind.__qualname__}({', '.join(map(_text, rest))})"
    return f"a {type(frozen.value).__name__}" if isinstance(frozen, Opaque) else str(frozen)


def _of_function(function: types.FunctionType) -> Hashable:
    cells = tuple(freeze(_contents(cell)) for cell in function.__closure__ or ())
    return "function", function.__code__, freeze(function.__defaults__), freeze(function.__kwdefaults__), cells


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not yet assigned
        return None


def _of_object(value: Any) -> Hashable:
    if isinstance(value, keras.metrics.Metric):  # its name is what the logs call it
        own = {name: item for name, item in vars(value).items() if name not in _METRIC}
        return type(value), freeze({**own, "name": value.name})
    if isinstance(value, _ELSEWHERE):
        return NOTHING
    if keras.ops.is_tensor(value):
        return freeze(keras.ops.convert_to_numpy(value))
    if hasattr(value, "get_config"):  # a loss, a regularizer, a constraint, a schedule, a policy
        return type(value), freeze({name: item for name, item in vars(value).items() if name not in _NAMES})
    return value if isinstance(value, types.BuiltinFunctionType | types.CodeType | np.dtype) else Opaque(value)


def _importable(value: Any) -> bool:
    """Whether a function is the one that its module has under its name."""
    found: object = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value
