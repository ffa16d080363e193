"""Keras models as the layers above handle them: seeded, checked, copied, and their weights for files."""

import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import keras
import numpy as np
from keras import ops
from keras.src.backend.common import global_state

from modelfleet.errors import InputError
from modelfleet.formatting import without_period
from modelfleet.frameworks.keras.custom_objects import put_together, take_apart
from modelfleet.frameworks.keras.optimizers import twin
from modelfleet.frameworks.keras.steps import by_key
from modelfleet.frameworks.weight_mismatch import Spec, mismatch
from modelfleet.types import Tensor

_GENERATOR = "global_seed_generator"  # keras.random draws from it if it gets no seed


def is_model(value: object) -> bool:
    """Return True for a Keras model."""
    return isinstance(value, keras.Model)


@contextmanager
def seeding(seed: int) -> Iterator[None]:
    """Seed the generators of weights and layers' seeds within this context, and restore them afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    generator = global_state.get_global_attribute(_GENERATOR)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    global_state.set_global_attribute(_GENERATOR, None)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        global_state.set_global_attribute(_GENERATOR, generator)


def check_model(model: keras.Model, name: str) -> None:
    """Raise InputError for a model that is not built."""
    # The lookup within a TextVectorization is never built: a vocabulary is not a weight.
    own = [layer for layer in model._flatten_layers() if not hasattr(layer, "get_vocabulary")]
    unbuilt = [layer for layer in own if not layer.built]
    if unbuilt:
        which = "it" if unbuilt[0] is model else f"its layer {unbuilt[0].name!r}"
        raise InputError(
            f"member {name!r} has no weights yet: {which} is not built. "
            f"Give the model an Input, call model.build(input_shape), or call it once on a batch."
        )


def copy_model(model: keras.Model) -> keras.Model:
    """Return a copy of a model, with its weights, its compile arguments and the state of its optimizer."""
    try:
        copied = put_together(*take_apart(model))
    except Exception as error:  # a user's own class may raise anything
        raise InputError(
            f"a {type(model).__name__} can't be copied: {without_period(error)}. "
            f"Give its class a get_config, or build another model and copy the weights."
        ) from error
    for variable, own in zip(copied.variables, model.variables, strict=True):
        variable.assign(own.numpy())  # copied: on JAX, a fit of one model would delete the other's array
    if model.compiled and model.optimizer is not None:
        if not model.optimizer.built and type(model).compile is keras.Model.compile:  # loading built it
            copied.compile(**{**copied._compile_config.config, "optimizer": twin(copied.optimizer)})
        for variable, own in zip(copied.optimizer.variables, model.optimizer.variables, strict=False):
            variable.assign(own.numpy())
    return copied


def weights_key(model: keras.Model) -> Hashable:
    """Return what models must have in common for their weights to be stacked in one file."""
    return tuple((name, tuple(v.shape), str(v.dtype)) for name, v in by_key(model.variables).items())


def stacked_weights(models: Sequence[keras.Model]) -> dict[str, Tensor]:
    """Return the weights of models with one key, `(member, …)` each, including seeds."""
    for model in models:
        _check_vocabularies(model)
    own = [by_key(model.variables) for model in models]
    stacked = {name: np.stack([ops.convert_to_numpy(weights[name].value) for weights in own]) for name in own[0]}
    if keras.backend.backend() != "torch":
        return stacked
    return {name: ops.convert_to_tensor(array) for name, array in stacked.items()}


def fill(model: keras.Model, tensors: Mapping[str, Tensor]) -> str | None:
    """Copy weights into a model. If they do not fit, change nothing and return the first difference."""
    own = by_key(model.variables)
    wrong = mismatch(_specs(own), _specs(tensors))
    if wrong is not None:
        return wrong
    for name, variable in own.items():
        variable.assign(tensors[name])
    for layer in model._flatten_layers():
        if hasattr(layer, "finalize_state"):  # Normalization derives from its weights what it computes with
            layer.finalize_state()
    return None


def _check_vocabularies(model: keras.Model) -> None:
    """Raise InputError for a layer with a learnt vocabulary, which is not a weight and would be lost."""
    for layer in model._flatten_layers():
        lookup = getattr(layer, "_lookup_layer", layer)
        if hasattr(lookup, "get_vocabulary") and getattr(lookup, "input_vocabulary", None) is None:
            raise InputError(
                f"the layer {layer.name!r} has a vocabulary from adapt, which is not a weight. Give the layer its "
                f"vocabulary when it is made (vocabulary=...), or keep the model with model.save."
            )


def randomness() -> Tensor | None:
    """Return the state of the generator with which torch's loaders shuffle, if torch is the backend."""
    if keras.backend.backend() != "torch":
        return None
    from modelfleet.frameworks.torch import building

    return building.randomness()


def restore_randomness(state: Tensor) -> None:
    """Restore that generator."""
    if keras.backend.backend() == "torch":
        from modelfleet.frameworks.torch import building

        building.restore_randomness(state)


def _specs(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    return {
        name: Spec(tuple(tensor.shape), keras.backend.standardize_dtype(tensor.dtype))
        for name, tensor in tensors.items()
    }
