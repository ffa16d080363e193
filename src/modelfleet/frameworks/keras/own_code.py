"""The classes and functions of the user's own in a Keras model: its config only names them, so they go along.

Keras finds what is registered with it by name, and its own; a function that happens to be named `mse` too would be
taken for Keras's.
"""

import json
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import keras
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES

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
    return mentioned(own, config), make, arguments


def put_together(own: Mapping[str, Any], make: Any, arguments: tuple[Any, ...]) -> keras.Model:
    """Return the model that was taken apart."""
    with keras.saving.custom_object_scope(dict(own)):
        return make(*arguments)


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


def _own(model: keras.Model) -> list[Any]:
    """Return the classes and functions that are not Keras's, wherever the model holds them or objects of them."""
    found: dict[Any, None] = {}
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
            waiting += vars(value).values()
        elif type(value).__name__ == "SerializableDict":  # what compile was told
            waiting += value.config.values()
    return [value for value in found if value.__module__.partition(".")[0] not in ("keras", "builtins")]
