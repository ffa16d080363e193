"""Settings of layers, losses and optimizers as hashable values that compare by content."""

import functools
import hashlib
import re
import types
from collections.abc import Hashable, Mapping

import keras
import numpy as np
from keras.src.utils.naming import to_snake_case

from modelfleet.frameworks.structure import Opaque, cell_contents, is_importable, shorten

NOTHING = "·"
"""Stands for a value that is compared elsewhere, or does not count, such as an initializer."""

_NOT_COMPARED = (keras.initializers.Initializer, keras.KerasTensor, keras.Optimizer)
_STATEFUL = (keras.layers.Layer, keras.Variable, keras.random.SeedGenerator)

_NAMES = frozenset({"name", "_name"})
_METRIC = frozenset(vars(keras.metrics.Metric())) | _NAMES | {"_built", "built"}

Owned = Mapping[int, Hashable]
"""Position in a model of each of its layers, variables and seeds, by id."""


def freeze(value: object, owned: Owned | None = None) -> Hashable:
    """Return `value` as a hashable one, which is equal if the contents are.

    A layer, variable or seed of the model itself is identified by its position there. Any other one equals only
    itself: its numbers are not part of a lane's state, so members with different ones can't share a program.
    """
    return _Freezer(owned or {})(value)


class _Freezer:
    def __init__(self, owned: Owned) -> None:
        self._owned = owned
        self._open: set[int] = set()  # values that are being read: a closure may contain itself

    def __call__(self, value: object) -> Hashable:
        if id(value) in self._owned:
            return "own", self._owned[id(value)]
        match value:
            case None | bool() | int() | str() | bytes() | type():
                return type(value), value
            case float() | complex():
                return type(value), repr(value)  # nan equal to itself, and -0.0 apart from 0.0
            case np.ndarray() | np.generic() if value.dtype.kind != "O":
                digest = hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=16).digest()
                return "array", value.dtype.name, value.shape, digest
        if id(value) in self._open:
            return NOTHING
        self._open.add(id(value))
        try:
            return self._of_container(value)
        finally:
            self._open.discard(id(value))

    def _of_container(self, value: object) -> Hashable:
        match value:
            case tuple() if hasattr(value, "_fields"):
                return type(value), *map(self, value)
            case Mapping():
                return "dict", *((self(key), self(value[key])) for key in sorted(value, key=str))
            case list() | tuple():
                return "list", *map(self, value)  # JSON, and so a saved model, makes no difference
            case set() | frozenset():
                return "set", frozenset(map(self, value))
            case types.FunctionType():
                return value if is_importable(value) else self._of_function(value)
            case types.MethodType():
                return "method", self(value.__func__), self(value.__self__)
            case functools.partial():
                return "partial", self(value.func), self(value.args), self(value.keywords)
        return self._of_object(value)

    def _of_function(self, function: types.FunctionType) -> Hashable:
        cells = tuple(self(cell_contents(cell)) for cell in function.__closure__ or ())
        defaults = self(function.__defaults__), self(function.__kwdefaults__)
        # Functions with the same code, defined in two modules, may read different globals.
        return "function", function.__code__, id(function.__globals__), *defaults, self(vars(function)), cells

    def _of_object(self, value: object) -> Hashable:
        if isinstance(value, keras.metrics.Metric):  # the name counts: logs have it
            own = {name: item for name, item in vars(value).items() if name not in _METRIC}
            variables = {id(variable) for variable in value.variables}
            plain = {name: item for name, item in own.items() if id(item) not in variables}
            return type(value), self({**plain, "name": unnumbered(value.name, value)})
        if isinstance(value, _NOT_COMPARED):
            return NOTHING
        if isinstance(value, _STATEFUL) or hasattr(value, "assign"):
            return Opaque(value)
        if keras.ops.is_tensor(value):
            return self(keras.ops.convert_to_numpy(value))
        if hasattr(value, "get_config"):  # a loss, a regularizer, a constraint, a schedule, a policy
            return type(value), self({name: item for name, item in vars(value).items() if name not in _NAMES})
        if type(value).__name__ == "TensorShape":  # TensorFlow's, which layers keep on that backend
            return self(value.as_list())
        plain = types.BuiltinFunctionType | types.CodeType | np.dtype | np.ufunc
        return value if isinstance(value, plain) else Opaque(value)


def unnumbered(name: str, of: object) -> str:
    """Return a name without its number, if Keras has chosen the name, as in `dense_1`."""
    own = to_snake_case(type(of).__name__)
    return own if re.fullmatch(rf"{re.escape(own)}_[0-9]+", name) else name


def show(frozen: Hashable) -> str:
    """Return a frozen value as text for a message."""
    return shorten(_text(frozen))


def _text(frozen: Hashable) -> str:
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
