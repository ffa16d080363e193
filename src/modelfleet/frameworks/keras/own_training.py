"""Saving a Keras model's compile arguments and the state of its optimizer.

The model holds both itself, whether it was compiled and trained by the fleet or by its own `compile` and `fit`.
"""

from collections.abc import Mapping
from typing import Any

import keras
from keras import ops
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES

from modelfleet.formatting import without_period
from modelfleet.frameworks.keras.custom_objects import find_custom
from modelfleet.frameworks.keras.optimizers import built
from modelfleet.frameworks.keras.own_variables import variables_by_part
from modelfleet.types import Json, Tensor


def unsaved(model: keras.Model) -> dict[str, Any]:
    """Return the user's own functions and classes in the arguments of `compile` that Keras can't find again.

    These are the ones that are not registered. By name alone, one might be mistaken for one of Keras's own.
    """
    kind = type(model)
    if kind.compile is not keras.Model.compile and kind.compile_from_config is keras.Model.compile_from_config:
        return {"compile": kind.compile}
    found = {}
    for argument, value in model._compile_config.config.items():
        own = [custom for custom in find_custom([value]) if custom not in GLOBAL_CUSTOM_NAMES]
        if own:
            found[argument] = own[0]
    return found


def config_of(model: keras.Model) -> dict[str, Json]:
    """Return the arguments of `compile` as JSON."""
    return model.get_compile_config()


def compile_again(model: keras.Model, config: Mapping[str, Json]) -> str | None:
    """Compile a model by what `config_of` returned. If that is not possible, return the reason.

    Keras makes only objects of its own and registered ones, and runs no code of the config.
    """
    try:
        if type(model).compile_from_config is keras.Model.compile_from_config:  # it would build the optimizer, too
            model.compile(**keras.saving.deserialize_keras_object(dict(config)))
        else:
            model.compile_from_config(dict(config))
    except Exception as error:  # a class of the user's may raise anything
        return without_period(error)
    return None if model.compiled else "the model's own compile_from_config did not compile it"


def optimizer_state(model: keras.Model) -> dict[str, Tensor]:
    """Return the variables of a model's optimizer, `(1, …)`; nothing before its first step."""
    tensors = {key: variable.value for key, variable in variables_by_part(model)["optimizer"].items()}
    if keras.backend.backend() == "torch":
        return {key: tensor.detach()[None] for key, tensor in tensors.items()}
    return {key: ops.convert_to_numpy(tensor)[None] for key, tensor in tensors.items()}


def fill_optimizer(model: keras.Model, tensors: Mapping[str, Tensor]) -> str | None:
    """Copy what `optimizer_state` returned into a model's optimizer. If it does not fit, return the difference."""
    built(model)
    own = variables_by_part(model)["optimizer"]
    for key in {**own, **tensors}:
        if key not in own or key not in tensors or tuple(own[key].shape) != tuple(tensors[key].shape[1:]):
            return f"its optimizer's {key!r} differs"
    for key, variable in own.items():
        variable.assign(tensors[key][0])
    return None
