"""Keras models on their way to replicas: what they compute and their weights, without an optimizer."""

import json
import math
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import keras
import numpy as np
from keras.src.saving.serialization_lib import ObjectSharingScope
from keras.src.utils.dtype_utils import dtype_size

from modelfleet.errors import InputError
from modelfleet.frameworks.keras.building import check_model
from modelfleet.frameworks.keras.own_code import (
    check_told,
    known,
    mentioned,
    named_apart,
    put_together,
    taken_apart,
)
from modelfleet.frameworks.keras.steps import structural_keys

# Whose layers keep in files what is in their variables, and nothing else.
_PLAIN = ("keras.src.layers.layer", "keras.src.layers.core.", "keras.src.layers.convolutional.")


class Frozen:
    """A model that is only asked. Pickled, its weights go beside its config, and on the other side it is a model.

    Keras itself would pickle a file in its format: every process had to read it, and had weights of its own.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model

    def __reduce__(self) -> Any:
        if any(map(_keeps_more, self.model._flatten_layers())):
            return _as_it_came, (self.model,)
        with named_apart(self.model) as own, ObjectSharingScope():
            told: Any = keras.saving.serialize_keras_object(self.model)
        config = json.dumps({**told, "compile_config": None})
        variables = self.model.variables
        weights = {
            key: _backend().numbers(variable)
            for key, variable in zip(structural_keys(variables), variables, strict=True)
        }
        own = mentioned(own, config)
        check_told(self.model, own, config, trained=False)
        return restored, (config, own, weights)


def frozen(model: keras.Model) -> Frozen:
    """A model to be sent to replicas, and to be given to `Replica`."""
    check_model(model, "model")
    return Frozen(model)


def reduced(value: Any) -> Any:
    """How to pickle a model as Keras does, with the classes and functions that its config only names."""
    if not isinstance(value, keras.Model):
        return NotImplemented
    registered = {
        name: found
        for name, found in keras.saving.get_custom_objects().items()
        if getattr(found, "__module__", None) == "__main__"  # which no other process can import
    }
    own, make, arguments = taken_apart(value)
    return put_together, ({**registered, **own}, make, arguments)


def restored(config: str, own_code: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> keras.Model:
    """The model that was taken apart. Where the backend can have it so, its weights are these very arrays."""
    told = json.loads(config)
    try:
        with ObjectSharingScope(), known(own_code):
            model: Any = keras.saving.deserialize_keras_object(told, safe_mode=False)
    except Exception as error:  # whatever a class of one's own may not be able to tell about itself
        raise InputError(
            f"a {told['class_name']} can't be made from its config, as which Keras models are sent: {error}\n"
            f"Give a function without arguments that makes the model, weights and all: it is called in every "
            f"worker. Or give the class a get_config that tells all that its __init__ takes."
        ) from error
    own = dict(zip(structural_keys(model.variables), model.variables, strict=True))
    shapes = {key: tuple(variable.shape) for key, variable in own.items()}
    sent = {key: array.shape for key, array in weights.items()}
    if shapes != sent:
        key = next(key for key in (*sent, *shapes) if sent.get(key) != shapes.get(key))
        raise InputError(
            f"a {type(model).__name__} made from its config has {shapes.get(key)} as {key!r}; expected "
            f"{sent.get(key)}, as the model that was sent. Have its get_config tell all that decides its weights, "
            f"and its build make them. Or give a function without arguments that makes the model."
        )
    for key, array in weights.items():
        _backend().lend(own[key], array)
    return model


def weight_bytes(model: keras.Model) -> int:
    """What a model's weights take."""
    bits = (math.prod(variable.shape) * dtype_size(variable.dtype) for variable in model.variables)
    return sum(bits) // 8


def is_double(variables: Iterable[Any]) -> bool:
    """Whether a model computes in float64 anywhere: then rows are not to be rounded on their way to it."""
    return any(keras.backend.standardize_dtype(variable.dtype) == "float64" for variable in variables)


def _keeps_more(layer: Any) -> bool:
    """Whether a layer keeps more in files than its variables: a vocabulary, or what a class of one's own wants."""
    hooks = ("load_own_variables", "load_assets")
    owners = [cls.__module__ for hook in hooks for cls in type(layer).__mro__ if hook in vars(cls)]
    return not all(f"{owner}.".startswith(_PLAIN) for owner in owners)


def _as_it_came(model: keras.Model) -> keras.Model:
    return model


def _backend() -> Any:
    return import_module(f"modelfleet.frameworks.keras.{keras.backend.backend()}")
