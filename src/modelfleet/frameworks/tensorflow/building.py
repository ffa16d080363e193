"""TensorFlow's own models as the layers above handle them: checked, copied, and their weights for files."""

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from modelfleet.errors import InputError
from modelfleet.frameworks.tensorflow.models import SERVING, is_function
from modelfleet.frameworks.weight_mismatch import Spec, mismatch
from modelfleet.types import Arrays, Model


def is_model(value: object) -> bool:
    """Return True for a model of TensorFlow's own; False for Keras models, whatever their backend."""
    if any(kind.__module__.partition(".")[0] == "keras" for kind in type(value).__mro__):
        return False
    return isinstance(value, tf.Module) or is_function(value) or hasattr(value, "signatures")


@contextmanager
def seeding(seed: int) -> Iterator[None]:
    """Seed TensorFlow's global generator within this context, and restore it afterwards."""
    # There is no public way to read the global seed, or the generator of operations' seeds that goes with it.
    current = context.context()
    assert current is not None
    seeded, draws = current._seed, getattr(current, "_rng", None)  # None before the first seeding
    tf.random.set_seed(seed % 2**31)
    try:
        yield
    finally:
        current._set_global_seed(seeded)
        if draws is not None:
            current._rng = draws


def check_model(model: Model, name: str) -> None:
    """Raise InputError for a model that can't be called."""
    if not is_function(model) and not callable(model) and SERVING not in getattr(model, "signatures", {}):
        raise InputError(
            f"member {name!r} is a {type(model).__name__} that can't be called: it has neither a __call__ nor a "
            f"signature {SERVING!r}. Give a tf.Module with a __call__, or a function of it."
        )


def copy_model(model: Model) -> tf.Module:
    """Return a copy of a module, with the same weights in variables of its own."""
    return copy.deepcopy(_module(model, "copied"))


def weights_key(model: Model) -> Hashable:
    """Return what modules must have in common for their weights to be stacked in one file."""
    return tuple((name, tuple(v.shape), v.dtype.name) for name, v in _weights(_module(model, "saved")).items())


def stacked_weights(models: Sequence[tf.Module]) -> Arrays:
    """Return the weights of modules with one key, `(member, …)` each."""
    weights = [_weights(model) for model in models]
    return {name: np.stack([variables[name].numpy() for variables in weights]) for name in weights[0]}


def fill(model: Model, tensors: Mapping[str, np.ndarray]) -> str | None:
    """Copy weights into a module. If they do not fit, change nothing and return the first difference."""
    variables = _weights(_module(model, "filled"))
    own = {name: Spec(tuple(v.shape.as_list()), v.dtype.name) for name, v in variables.items()}
    wrong = mismatch(own, {name: Spec(array.shape, array.dtype.name) for name, array in tensors.items()})
    if wrong is None:
        for name, variable in variables.items():
            variable.assign(tensors[name])
    return wrong


def randomness() -> None:
    """Return None: TensorFlow has no generator that its data sets share."""


def restore_randomness(state: None) -> None:
    """Do nothing."""


def _module(model: Model, verb: str) -> tf.Module:
    if not isinstance(model, tf.Module):
        raise InputError(
            f"a {type(model).__name__} can't be {verb} in a fleet: only a tf.Module says which weights are its "
            f"own. Keep it with tf.saved_model.save."
        )
    return model


def _weights(module: tf.Module) -> dict[str, tf.Variable]:
    # By their order: names may repeat, and may differ between two modules of one class.
    return {f"{i:03}.{v.name.partition(':')[0].rpartition('/')[2]}": v for i, v in enumerate(module.variables)}
