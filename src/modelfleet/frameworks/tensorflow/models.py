"""TensorFlow's own models: how each kind is called, and what it keeps.

These are a `tf.Module` that can be called, a `tf.function`, one of its concrete functions, and what
`tf.saved_model.load` gave. They are run as they are: only Keras models say how they are trained.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from modelfleet.errors import InputError

SERVING = "serving_default"  # the signature that TensorFlow's own server calls

Call = Callable[[Any], Any]


def is_model(value: Any) -> bool:
    """Whether it is one of these kinds; Keras models are not, whatever their backend."""
    if any(kind.__module__.partition(".")[0] == "keras" for kind in type(value).__mro__):
        return False
    return isinstance(value, tf.Module) or _is_function(value) or hasattr(value, "signatures")


def check_model(model: Any, name: str) -> None:
    """Refuse what can't be called."""
    if not _is_function(model) and not callable(model) and SERVING not in getattr(model, "signatures", {}):
        raise InputError(
            f"member {name!r} is a {type(model).__name__} that can't be called: it has neither a __call__ nor a "
            f"signature {SERVING!r}. Give a tf.Module with a __call__, or a function of it."
        )


def call_of(model: Any) -> Call:
    """A function of the inputs."""
    if isinstance(model, tf.types.experimental.ConcreteFunction):
        return _signature(model)
    if callable(model):
        return tf.function(lambda x: model(x))  # with AutoGraph, as people write for tf.function
    return _signature(model.signatures[SERVING])


def _signature(function: Any) -> Call:
    """A concrete function, which may take its inputs by keyword and give a dict."""
    positional, keywords = function.structured_input_signature
    names = sorted(keywords)

    def call(x: Any) -> Any:
        if positional or not names:
            found = function(x)
        elif isinstance(x, Mapping):
            found = function(**x)
        elif len(names) == 1:
            found = function(**{names[0]: x})
        else:
            raise InputError(f"the signature takes {', '.join(names)}. Give the inputs as a dict with these keys.")
        # A signature gives a dict, even of a single output.
        return next(iter(found.values())) if isinstance(found, Mapping) and len(found) == 1 else found

    return call


def copy_model(model: Any) -> Any:
    """A module of its own with the same weights."""
    return copy.deepcopy(_module(model, "copied"))


def weights_key(model: Any) -> tuple[Any, ...]:
    """What modules must have in common for their weights to be stacked in one file."""
    return tuple((name, tuple(v.shape), v.dtype.name) for name, v in _weights(_module(model, "saved")).items())


def stacked_weights(models: Sequence[Any]) -> dict[str, np.ndarray]:
    """The weights of modules of one key, `(member, …)` each."""
    own = [_weights(model) for model in models]
    return {name: np.stack([variables[name].numpy() for variables in own]) for name in own[0]}


def fill(model: Any, tensors: Mapping[str, Any]) -> str | None:
    """Copy weights into a module; gives the first thing that does not fit instead, if there is one."""
    own = _weights(_module(model, "filled"))
    for name in (*own, *tensors):
        if name not in tensors:
            return f"it has a {name!r} that the folder does not"
        if name not in own:
            return f"it has no {name!r}"
        variable, array = own[name], tensors[name]
        if tuple(variable.shape) != array.shape or variable.dtype.as_numpy_dtype != array.dtype:
            mine = f"{tuple(variable.shape)} {variable.dtype.name}"
            return f"its {name!r} is {mine}, the folder's is {array.shape} {array.dtype.name}"
    for name, variable in own.items():
        variable.assign(tensors[name])
    return None


@contextmanager
def seeding(seed: int) -> Iterator[None]:
    """Seed TensorFlow's global generator for a while; then it is as before."""
    # There is no public way to read the global seed, and the generator of operations' seeds that goes with it.
    current: Any = context.context()
    seeded, draws = current._seed, getattr(current, "_rng", None)  # None before anybody seeded it
    tf.random.set_seed(seed % 2**31)
    try:
        yield
    finally:
        current._set_global_seed(seeded)
        if draws is not None:
            current._rng = draws


def randomness() -> None:
    """TensorFlow has no generator that its data sets share."""


def restore_randomness(state: None) -> None:
    """Nothing to put back."""


def _is_function(value: Any) -> bool:
    kinds = tf.types.experimental
    return isinstance(value, kinds.GenericFunction | kinds.PolymorphicFunction | kinds.ConcreteFunction)


def _module(model: Any, what: str) -> tf.Module:
    if not isinstance(model, tf.Module):
        raise InputError(
            f"a {type(model).__name__} can't be {what} in a fleet: only a tf.Module says which weights are its "
            f"own. Keep it with tf.saved_model.save."
        )
    return model


def _weights(module: tf.Module) -> dict[str, Any]:
    # By their order: names need not be unique, nor the same in two modules of one class.
    return {f"{i:03}.{v.name.partition(':')[0].rpartition('/')[2]}": v for i, v in enumerate(module.variables)}
