"""The classes and functions of the user's own in a Keras model: its config only names them, so they go along.

Keras finds what is registered with it by name, and its own; a function that happens to be named `mse` too would be
taken for Keras's.
"""

import inspect
import json
import threading
import zipfile
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import keras
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES
from keras.src.saving.serialization_lib import ObjectSharingScope
from keras.src.utils.python_utils import is_default

from modelfleet.errors import InputError
from modelfleet.frameworks import randomness
from modelfleet.frameworks.keras.structure import difference, signature
from modelfleet.frameworks.structure import Signature

_LAMBDA = "<lambda>"
_naming = threading.RLock()  # names are changed for a while, for all threads


def taken_apart(model: keras.Model) -> tuple[dict[str, Any], Any, tuple[Any, ...]]:
    """Return a model's own classes and functions by name, and what makes it: a callable and its arguments."""
    reduce: Any = model.__reduce__
    if reduce.__func__ is not keras.Model.__reduce__:  # a way of one's own
        return {}, *reduce()[:2]
    with named_apart(model) as own:
        make, arguments = reduce()
    with zipfile.ZipFile(arguments[0]) as file:
        config = file.read("config.json").decode()
    arguments[0].seek(0)
    own = mentioned(own, config)
    check_told(model, own, config, trained=True)
    return own, make, arguments


def put_together(own: Mapping[str, Any], make: Any, arguments: tuple[Any, ...]) -> keras.Model:
    """Return the model that was taken apart."""
    with known(own):
        return make(*arguments)


@contextmanager
def known(own: Mapping[str, Any]) -> Iterator[None]:
    """Have Keras find classes and functions by these names, and make objects of them from their configs."""
    with keras.saving.custom_object_scope({name: _made_by(value) for name, value in own.items()}):
        yield


@contextmanager
def named_apart(model: keras.Model) -> Iterator[dict[str, Any]]:
    """Have configs name each of a model's own classes and functions by a name that nothing else in it has.

    Gives them by these names. Keras would write a lambda's code, without the globals that it reads.
    """
    with _naming:
        by_name: dict[str, Any] = {}
        renamed: list[Any] = []
        lambdas: list[FunctionType] = []
        try:
            for value in _own(model):
                name = given = keras.saving.get_registered_name(value).replace(_LAMBDA, "lambda")
                while name in by_name:
                    name = f"{given}_{len(by_name)}"
                by_name[name] = value
                if value not in GLOBAL_CUSTOM_NAMES and name != value.__name__:
                    GLOBAL_CUSTOM_NAMES[value] = name
                    renamed.append(value)
                if value.__name__ == _LAMBDA:
                    value.__name__ = name
                    lambdas.append(value)
            yield by_name
        finally:
            for value in renamed:
                del GLOBAL_CUSTOM_NAMES[value]
            for value in lambdas:
                value.__name__ = _LAMBDA


def mentioned(own: Mapping[str, Any], config: str) -> dict[str, Any]:
    """Return those whose names are in a config: others need not go along, and may not be able to."""
    return {name: value for name, value in own.items() if json.dumps(name) in config}


def check_told(model: keras.Model, own: Mapping[str, Any], config: str, *, trained: bool) -> None:
    """Refuse a model whose config does not tell all of it; of what is to be `trained`, what is frozen, too.

    Where a class has no `get_config` of its own, Keras tells the defaults of a model's `__init__`, whatever was
    given: `keras.Model.__new__` passes nothing on to what notes the arguments. And it tells nothing of what was
    set in a model's parts later on.
    """
    untold = [
        one for one in model._flatten_layers() if isinstance(one, keras.Model) and is_default(one.get_config)
    ]
    if not any(trained or getattr(one._auto_config, "config", None) for one in untold):
        return
    with randomness.kept(), known(own), ObjectSharingScope():
        told = {**json.loads(config), "compile_config": None}
        twin: Any = keras.saving.deserialize_keras_object(told, safe_mode=False)
    unlike = difference(*(_compared(signature(one), trained) for one in (twin, model)))
    if unlike is not None:
        raise InputError(
            f"the config of a {type(model).__name__} does not tell all of it: a model made from it differs "
            f"({unlike}). Give the class a get_config that tells what its __init__ takes, and set all else there."
        )


def _compared(own: Signature, trained: bool) -> Signature:
    """Return what a config has to tell of a structure; the weights go beside it."""
    return Signature(
        tuple(
            (path, value)
            for path, value in own.entries
            if not path.startswith("weight ") and (trained or path.rpartition(".")[2] != "trainable")
        )
    )


class _Class:
    """A class of layers or models as Keras is to see it: its objects are made of what its `__init__` takes.

    Keras tells the settings that all layers have in every config, and gives them all to an `__init__` that may
    know nothing of them: `def __init__(self)`. Those that it does not take are set afterwards.
    """

    def __init__(self, cls: Any, takes: Container[str]) -> None:
        self._class, self._takes = cls, takes

    def __repr__(self) -> str:
        return repr(self._class)

    def from_config(self, config: Mapping[str, Any]) -> Any:
        """Make one of these."""
        set_later = {name: config[name] for name in _OF_ALL if name in config and name not in self._takes}
        made = self._class.from_config({name: value for name, value in config.items() if name not in set_later})
        if "name" in set_later:
            made.name = set_later["name"]
        if not set_later.get("trainable", True):
            made.trainable = False
        if "dtype" in set_later:
            policy = keras.dtype_policies.get(set_later["dtype"])
            if policy != made.dtype_policy:
                made.dtype_policy = policy
        if "activity_regularizer" in set_later:
            made.activity_regularizer = keras.regularizers.get(set_later["activity_regularizer"])
        return made


# What the config of every layer tells.
_OF_ALL = ("name", "trainable", "dtype", "activity_regularizer")
_FROM_CONFIG = tuple(cls.from_config.__func__ for cls in (keras.Operation, keras.Layer, keras.Model))


def _made_by(value: Any) -> Any:
    """Return what Keras is to take for a class or function."""
    if not (isinstance(value, type) and issubclass(value, keras.Layer)):
        return value
    if value.from_config.__func__ not in _FROM_CONFIG:  # a way of one's own
        return value
    takes = inspect.signature(value.__init__).parameters
    anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
    return value if anything else _Class(value, takes)


def own_python(model: keras.Model) -> list[tuple[str, Any]]:
    """Return by name what is the user's own in a model: classes, functions, and objects of such classes.

    Not the layers themselves, in which Keras notes every call.
    """
    objects: list[Any] = []
    own = _own(model, objects)
    told = [value for value in objects if type(value) in own and not isinstance(value, keras.Layer)]
    return [(value.__qualname__, value) for value in own] + [(type(value).__qualname__, value) for value in told]


def _own(model: keras.Model, objects: list[Any] | None = None) -> list[Any]:
    """Return the classes and functions that are not Keras's, wherever the model holds them or objects of them.

    `objects` is filled with all that the model holds.
    """
    found: dict[Any, None] = {}
    objects = [] if objects is None else objects
    seen: set[int] = set()
    waiting: list[Any] = [model]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            found.setdefault(value)
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple | set):
            waiting += value
        elif hasattr(type(value), "get_config"):
            found.setdefault(type(value))
            objects.append(value)
            waiting += vars(value).values()
        elif type(value).__name__ == "SerializableDict":  # what compile was told
            waiting += value.config.values()
    return [value for value in found if value.__module__.partition(".")[0] not in ("keras", "builtins")]
