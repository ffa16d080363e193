"""Models as the layers above handle them: seeded, checked, copied, and their weights for files."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.backend.common import global_state

from modelfleet.errors import InputError
from modelfleet.frameworks.keras.optimizers import twin
from modelfleet.frameworks.keras.own_code import put_together, taken_apart
from modelfleet.frameworks.keras.steps import structural_keys
from modelfleet.words import without_period

_GENERATOR = "global_seed_generator"  # what keras.random draws from if it is given no seed


def is_model(value: object) -> bool:
    """Whether it is a Keras model."""
    return isinstance(value, keras.Model)


@contextmanager
def seeding(seed: int) -> Iterator[None]:
    """Seed what Keras draws its initial weights and the seeds of its layers from; then it is as it was."""
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
    """Refuse a model whose weights are not there yet."""
    # A vocabulary is no weight: the lookup within a TextVectorization is never built.
    own = [layer for layer in model._flatten_layers() if not hasattr(layer, "get_vocabulary")]
    unbuilt = [layer for layer in own if not layer.built]
    if unbuilt:
        which = "it" if unbuilt[0] is model else f"its layer {unbuilt[0].name!r}"
        raise InputError(
            f"member {name!r} has no weights yet: {which} is not built. "
            f"Give the model an Input, call model.build(input_shape), or call it once on a batch."
        )


def copy_model(model: keras.Model) -> keras.Model:
    """A model of its own with the same weights, compiled alike, and with its optimizer where that is."""
    try:
        copied: Any = put_together(*taken_apart(model))
    except Exception as error:  # whatever a class of one's own may not be able to tell about itself
        raise InputError(
            f"a {type(model).__name__} can't be copied: {without_period(error)}. "
            f"Give its class a get_config, or build another model and copy the weights."
        ) from error
    for variable, own in zip(copied.variables, model.variables, strict=True):
        variable.assign(own.numpy())  # not its value: on JAX, a fit of one would take it from the other
    if model.compiled and model.optimizer is not None:
        if not model.optimizer.built and type(model).compile is keras.Model.compile:  # loading has built it
            copied.compile(**{**copied._compile_config.config, "optimizer": twin(copied.optimizer)})
        for variable, own in zip(copied.optimizer.variables, model.optimizer.variables, strict=False):
            variable.assign(own.numpy())
    return copied


def weights_key(model: keras.Model) -> tuple[Any, ...]:
    """What models must have in common for their weights to be stacked in one file."""
    return tuple((name, tuple(v.shape), str(v.dtype)) for name, v in _weights(model).items())


def stacked_weights(models: Sequence[keras.Model]) -> dict[str, Any]:
    """The weights of models of one key, `(member, …)` each; seeds are among them."""
    for model in models:
        _refuse_vocabularies(model)
    own = [_weights(model) for model in models]
    stacked = {name: np.stack([ops.convert_to_numpy(weights[name].value) for weights in own]) for name in own[0]}
    if keras.backend.backend() != "torch":
        return stacked
    return {name: ops.convert_to_tensor(array) for name, array in stacked.items()}


def fill(model: keras.Model, tensors: Mapping[str, Any]) -> str | None:
    """Copy weights into a model; gives the first thing that does not fit instead, if there is one."""
    own = _weights(model)
    for name in (*own, *tensors):
        if name not in tensors:
            return f"it has a {name!r} that the folder does not"
        if name not in own:
            return f"it has no {name!r}"
        theirs = tuple(tensors[name].shape), keras.backend.standardize_dtype(tensors[name].dtype)
        mine = tuple(own[name].shape), keras.backend.standardize_dtype(own[name].dtype)
        if mine != theirs:
            return f"its {name!r} is {mine[0]} {mine[1]}, the folder's is {theirs[0]} {theirs[1]}"
    for name, variable in own.items():
        variable.assign(tensors[name])
    for layer in model._flatten_layers():
        if hasattr(layer, "finalize_state"):  # Normalization computes with what it makes of its weights here
            layer.finalize_state()
    return None


def _refuse_vocabularies(model: keras.Model) -> None:
    """Refuse to keep a model that has learnt a vocabulary: no weight holds it, so that it would be lost."""
    for layer in model._flatten_layers():
        lookup = getattr(layer, "_lookup_layer", layer)
        if hasattr(lookup, "get_vocabulary") and getattr(lookup, "input_vocabulary", None) is None:
            raise InputError(
                f"the layer {layer.name!r} has a vocabulary from adapt, which is no weight. Give the layer its "
                f"vocabulary when it is made (vocabulary=...), or keep the model with model.save."
            )


def randomness() -> Any:
    """The state of the generator that torch's loaders shuffle with, where torch is the backend."""
    if keras.backend.backend() != "torch":
        return None
    from modelfleet.frameworks.torch import building

    return building.randomness()


def restore_randomness(state: Any) -> None:
    """Put that generator back into a state."""
    if keras.backend.backend() == "torch":
        from modelfleet.frameworks.torch import building

        building.restore_randomness(state)


def _weights(model: keras.Model) -> dict[str, Any]:
    return dict(zip(structural_keys(model.variables), model.variables, strict=True))
