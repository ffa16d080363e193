"""Custom objects of a Keras model: the user's own classes and functions, which its config only names.

They travel beside the config. By name alone, Keras finds only what is registered and its own objects: a user's
function named `mse` would be mistaken for Keras's.
"""

import inspect
import json
import threading
import zipfile
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType

import keras
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES
from keras.src.saving.serialization_lib import ObjectSharingScope, SerializableDict
from keras.src.utils.python_utils import is_default

from modelfleet.errors import InputError
from modelfleet.frameworks import global_generators
from modelfleet.frameworks.keras.structure import difference, signature
from modelfleet.frameworks.structure import Signature
from modelfleet.types import Json

CustomObject = type | FunctionType
CustomObjects = Mapping[str, CustomObject]
"""A user's own classes and functions, by the names that configs have for them."""

_LAMBDA = "<lambda>"
_naming = threading.RLock()  # `unique_names` changes names for all threads


def take_apart(model: keras.Model) -> tuple[CustomObjects, Callable[..., keras.Model], tuple[object, ...]]:
    """Return a model's custom objects by name, and the callable and arguments that make the model again."""
    if type(model).__reduce__ is not keras.Model.__reduce__:  # the class pickles itself
        return {}, *model.__reduce__()[:2]
    with unique_names(model) as custom:
        make, arguments = model.__reduce__()
    with zipfile.ZipFile(arguments[0]) as file:
        config = file.read("config.json").decode()
    arguments[0].seek(0)
    custom = mentioned(custom, config)
    check_config(model, custom, config, trained=True)
    return custom, make, arguments


def put_together(
    custom: CustomObjects, make: Callable[..., keras.Model], arguments: tuple[object, ...]
) -> keras.Model:
    """Return the model that `take_apart` took apart."""
    with custom_objects(custom):
        return make(*arguments)


@contextmanager
def custom_objects(custom: CustomObjects) -> Iterator[None]:
    """Let Keras find custom objects by name within this context."""
    with keras.saving.custom_object_scope({name: _deserializable(value) for name, value in custom.items()}):
        yield


@contextmanager
def unique_names(model: keras.Model) -> Iterator[CustomObjects]:
    """Give each custom object of a model a unique name in configs, within this context. Yields them by name.

    A lambda gets a name, too: Keras would write its code into the config, without the globals that it reads.
    """
    with _naming:
        by_name: dict[str, CustomObject] = {}
        renamed: list[CustomObject] = []
        lambdas: list[FunctionType] = []
        try:
            for value in find_custom(model):
                name = given = keras.saving.get_registered_name(value).replace(_LAMBDA, "lambda")
                while name in by_name:
                    name = f"{given}_{len(by_name)}"
                by_name[name] = value
                if value not in GLOBAL_CUSTOM_NAMES and name != value.__name__:
                    GLOBAL_CUSTOM_NAMES[value] = name
                    renamed.append(value)
                if isinstance(value, FunctionType) and value.__name__ == _LAMBDA:
                    value.__name__ = name
                    lambdas.append(value)
            yield by_name
        finally:
            for value in renamed:
                del GLOBAL_CUSTOM_NAMES[value]
            for value in lambdas:
                value.__name__ = _LAMBDA


def mentioned(custom: CustomObjects, config: str) -> CustomObjects:
    """Return the custom objects that a config names. The others are not needed, and may not be picklable."""
    return {name: value for name, value in custom.items() if json.dumps(name) in config}


def check_config(model: keras.Model, custom: CustomObjects, config: str, *, trained: bool) -> None:
    """Raise InputError if a model made from the config would differ from `model`.

    A class without a `get_config` of its own gets a config with the defaults of its `__init__`, whatever was
    passed: `keras.Model.__new__` does not record the arguments. Nor does the config hold what was set on layers
    later on.

    Args:
        model: The model.
        custom: Its custom objects.
        config: Its config, as JSON.
        trained: True if the model will be trained, so that frozen layers have to stay frozen.

    Raises:
        InputError: The config is incomplete.
    """
    automatic = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.Model) and is_default(layer.get_config)
    ]
    if not any(trained or getattr(part._auto_config, "config", None) for part in automatic):
        return
    with global_generators.kept(), custom_objects(custom), ObjectSharingScope():
        serialized = {**json.loads(config), "compile_config": None}
        twin = keras.saving.deserialize_keras_object(serialized, safe_mode=False)
    unlike = difference(*(_without_weights(signature(one), trained) for one in (twin, model)))
    if unlike is not None:
        raise InputError(
            f"the config of a {type(model).__name__} is incomplete: a model made from it differs "
            f"({unlike}). Give the class a get_config that returns all arguments of its __init__, and set "
            f"everything else in __init__."
        )


def _without_weights(own: Signature, trained: bool) -> Signature:
    """Return the part of a structure that a config has to describe."""
    return Signature(
        tuple(
            (path, value)
            for path, value in own.entries
            if not path.startswith("weight ") and (trained or path.rpartition(".")[2] != "trainable")
        )
    )


class _ConfigReader:
    """A user's class of layers or models, as Keras sees it when it reads a config.

    Keras writes the settings that all layers have into every config, and passes them all to `__init__`, which may
    not take them: `def __init__(self)`. Here, settings that `__init__` does not take are set afterwards.
    """

    def __init__(self, cls: type[keras.Layer], takes: Container[str]) -> None:
        self._class, self._takes = cls, takes

    def __repr__(self) -> str:
        return repr(self._class)

    def from_config(self, config: Mapping[str, Json]) -> keras.Layer:
        """Return an object of the class."""
        set_later = {name: config[name] for name in _COMMON_SETTINGS if name in config and name not in self._takes}
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


# Settings that the config of every layer has.
_COMMON_SETTINGS = ("name", "trainable", "dtype", "activity_regularizer")
_FROM_CONFIG = tuple(cls.from_config.__func__ for cls in (keras.Operation, keras.Layer, keras.Model))


def _deserializable(value: CustomObject) -> CustomObject | _ConfigReader:
    """Return a custom object in a form that Keras can make objects of, from their configs."""
    if not (isinstance(value, type) and issubclass(value, keras.Layer)):
        return value
    if value.from_config.__func__ not in _FROM_CONFIG:  # the class reads configs itself
        return value
    takes = inspect.signature(value.__init__).parameters
    anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
    return value if anything else _ConfigReader(value, takes)


def own_python(model: keras.Model) -> list[tuple[str, object]]:
    """Return the user's own classes and functions in a model, and objects of such classes, by name.

    Layers are left out: Keras records every call in them.
    """
    objects: list[object] = []
    custom = find_custom(model, objects)
    own = [value for value in objects if type(value) in custom and not isinstance(value, keras.Layer)]
    return [*((one.__qualname__, one) for one in custom), *((type(one).__qualname__, one) for one in own)]


def find_custom(value: object, objects: list[object] | None = None) -> list[CustomObject]:
    """Return the classes and functions in a model, or in arguments of its `compile`, that are not Keras's.

    `objects` is extended by all objects with a config that the model holds.
    """
    found: dict[CustomObject, None] = {}
    objects = [] if objects is None else objects
    seen: set[int] = set()
    waiting: list[object] = [value]
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
        elif isinstance(value, SerializableDict):  # the arguments of compile
            waiting += value.config.values()
    return [value for value in found if value.__module__.partition(".")[0] not in ("keras", "builtins")]
