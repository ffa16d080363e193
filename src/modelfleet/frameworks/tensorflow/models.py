"""Calling TensorFlow's own models.

These are a callable `tf.Module`, a `tf.function`, one of its concrete functions, and what `tf.saved_model.load`
returned. They run as they are: only Keras models say how they are trained.
"""

from collections.abc import Callable, Mapping

import tensorflow as tf

from modelfleet.errors import InputError
from modelfleet.types import Model, Tree

SERVING = "serving_default"  # the signature that TensorFlow Serving calls

Call = Callable[[Tree], Tree]


def is_function(value: object) -> bool:
    """Return True for a `tf.function` and for one of its concrete functions."""
    kinds = tf.types.experimental
    return isinstance(value, kinds.GenericFunction | kinds.PolymorphicFunction | kinds.ConcreteFunction)


def call_of(model: Model) -> Call:
    """Return the function of the inputs that calls a model."""
    if isinstance(model, tf.types.experimental.ConcreteFunction):
        return _call_of_signature(model)
    if callable(model):
        return tf.function(lambda x: model(x))  # with AutoGraph, which code for tf.function relies on
    return _call_of_signature(model.signatures[SERVING])


def _call_of_signature(function: tf.types.experimental.ConcreteFunction) -> Call:
    """Return a function that calls a concrete function, which may take its inputs by keyword and return a dict."""
    positional, keywords = function.structured_input_signature
    names = sorted(keywords)

    def call(x: Tree) -> Tree:
        if positional or not names:
            found = function(x)
        elif isinstance(x, Mapping):
            found = function(**x)
        elif len(names) == 1:
            found = function(**{names[0]: x})
        else:
            raise InputError(f"the signature takes {', '.join(names)}. Give the inputs as a dict with these keys.")
        # A signature returns a dict, even for a single output.
        return next(iter(found.values())) if isinstance(found, Mapping) and len(found) == 1 else found

    return call
