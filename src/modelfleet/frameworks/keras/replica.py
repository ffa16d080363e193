"""Keras models that only predict: how they are sent to workers, and how they answer there."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import ModuleType

import keras
import numpy as np
from keras.src.saving.serialization_lib import ObjectSharingScope
from keras.src.utils.dtype_utils import dtype_size

from modelfleet.errors import InputError
from modelfleet.frameworks.adapter_protocol import Replica
from modelfleet.frameworks.keras.building import check_model
from modelfleet.frameworks.keras.custom_objects import (
    CustomObjects,
    check_config,
    custom_objects,
    mentioned,
    put_together,
    take_apart,
    unique_names,
)
from modelfleet.frameworks.keras.steps import by_key
from modelfleet.types import NativeDevice, Precision

# Modules whose layers save their variables, and nothing else.
_PLAIN_LAYERS = ("keras.src.layers.layer", "keras.src.layers.core.", "keras.src.layers.convolutional.")


class Frozen:
    """A model that only predicts. It is pickled as its config and its weights, and unpickled as a model.

    Keras itself would pickle a file in its own format, which every process would have to read into memory of its
    own.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model

    def __reduce__(self) -> tuple[Callable[..., keras.Model], tuple[object, ...]]:
        if any(map(_saves_more, self.model._flatten_layers())):
            return _unchanged, (self.model,)
        with unique_names(self.model) as custom, ObjectSharingScope():
            saved = keras.saving.serialize_keras_object(self.model)
        config = json.dumps({**saved, "compile_config": None})
        weights = {key: _backend().numbers(variable) for key, variable in by_key(self.model.variables).items()}
        custom = mentioned(custom, config)
        check_config(self.model, custom, config, trained=False)
        return restore, (config, custom, weights)


def frozen(model: keras.Model) -> Frozen:
    """Return a model in the form that is sent to workers and given to `Replica`."""
    check_model(model, "model")
    return Frozen(model)


def replica(model: keras.Model | Frozen, device: NativeDevice, precision: Precision) -> Replica:
    """Return a replica that answers batches with a model, which may come from `frozen`."""
    return _backend().replica(model.model if isinstance(model, Frozen) else model, device)


def pickle_reduction(value: object) -> object:
    """Return how to pickle a Keras model with its custom objects; NotImplemented for any other value."""
    if not isinstance(value, keras.Model):
        return NotImplemented
    registered = {
        name: found
        for name, found in keras.saving.get_custom_objects().items()
        if getattr(found, "__module__", None) == "__main__"  # no other process can import it
    }
    custom, make, arguments = take_apart(value)
    return put_together, ({**registered, **custom}, make, arguments)


def restore(config: str, custom: CustomObjects, weights: Mapping[str, np.ndarray]) -> keras.Model:
    """Return the model of a pickled `Frozen`. Its weights share memory with `weights` where the backend can."""
    saved = json.loads(config)
    try:
        with ObjectSharingScope(), custom_objects(custom):
            model = keras.saving.deserialize_keras_object(saved, safe_mode=False)
    except Exception as error:  # a user's own class may raise anything
        raise InputError(
            f"a {saved['class_name']} can't be made from its config, which is what Keras models are sent as: "
            f"{error}\nGive a function without arguments that makes the model with its weights: it is called in "
            f"every worker. Or give the class a get_config that returns all arguments of its __init__."
        ) from error
    own = by_key(model.variables)
    shapes = {key: tuple(variable.shape) for key, variable in own.items()}
    sent = {key: array.shape for key, array in weights.items()}
    if shapes != sent:
        key = next(key for key in (*sent, *shapes) if sent.get(key) != shapes.get(key))
        raise InputError(
            f"a {type(model).__name__} made from its config has {shapes.get(key)} as {key!r}; expected "
            f"{sent.get(key)}, as in the model that was sent. Let its get_config return everything that decides "
            f"its weights, and its build make them. Or give a function without arguments that makes the model."
        )
    for key, array in weights.items():
        _backend().lend(own[key], array)
    return model


def weight_bytes(model: keras.Model) -> int:
    """Return the size of a model's weights in bytes."""
    bits = (math.prod(variable.shape) * dtype_size(variable.dtype) for variable in model.variables)
    return sum(bits) // 8


def is_double(variables: Iterable[keras.Variable]) -> bool:
    """Return True if a model computes in float64 anywhere, so that its inputs must not be rounded to float32."""
    return any(keras.backend.standardize_dtype(variable.dtype) == "float64" for variable in variables)


def _saves_more(layer: keras.Layer) -> bool:
    """Return True if a layer may save more than its variables, such as a vocabulary."""
    hooks = ("load_own_variables", "load_assets")
    owners = [cls.__module__ for hook in hooks for cls in type(layer).__mro__ if hook in vars(cls)]
    return not all(f"{owner}.".startswith(_PLAIN_LAYERS) for owner in owners)


def _unchanged(model: keras.Model) -> keras.Model:
    return model


def _backend() -> ModuleType:
    return import_module(f"modelfleet.frameworks.keras.{keras.backend.backend()}")
