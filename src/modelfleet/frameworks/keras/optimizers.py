"""A Keras optimizer's update as a pure function: the values of variables in, their new values out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras import ops
from keras.src.optimizers.base_optimizer import BaseOptimizer

_BACKENDS = "keras.src.backend."


class Update:
    """The update of one optimizer, which must be built, and is left alone.

    Keras's own `stateless_apply` is refused on TensorFlow (its optimizers write to `tf.Variable`s) and updates
    in place on torch (they use fused operations). Both keep to it once those overrides are set aside.
    """

    def __init__(self, optimizer: Any) -> None:
        self.variables = optimizer.variables
        self.scaling = optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else None
        self._inner = _plain(optimizer.inner_optimizer if self.scaling else optimizer)

    def __call__(
        self, slots: Sequence[Any], gradients: Sequence[Any], variables: Sequence[Any], values: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The new values of the model's variables, and of the optimizer's. None is no gradient."""
        mapping = [*zip(variables, values, strict=True), *zip(self.variables, slots, strict=True)]
        if self.scaling is None:
            return self._applied(mapping, gradients, variables)
        with keras.StatelessScope(mapping):
            scale, counter = ops.copy(self.scaling.dynamic_scale), ops.copy(self.scaling.step_counter)
        own = [None if gradient is None else ops.divide(gradient, scale) for gradient in gradients]
        found = [ops.all(ops.isfinite(gradient)) for gradient in own if gradient is not None]
        finite = ops.all(ops.stack(found))
        new, new_slots = self._applied(mapping, own, variables)
        grown = ops.equal(counter, self.scaling.dynamic_growth_steps - 1)
        next_scale = ops.where(finite, ops.where(grown, scale * 2.0, scale), scale * 0.5)
        next_counter = ops.where(ops.logical_and(finite, ops.logical_not(grown)), counter + 1, 0)
        special = {id(self.scaling.dynamic_scale): next_scale, id(self.scaling.step_counter): next_counter}
        kept = [ops.where(finite, a, b) for a, b in zip(new, values, strict=True)]
        kept_slots = [
            ops.cast(special[id(variable)], variable.dtype) if id(variable) in special else ops.where(finite, a, b)
            for variable, a, b in zip(self.variables, new_slots, slots, strict=True)
        ]
        return kept, kept_slots

    def _applied(
        self, mapping: list[tuple[Any, Any]], gradients: Sequence[Any], variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        with keras.StatelessScope(mapping) as scope:
            self._inner.apply(list(gradients), list(variables))
        return (
            [scope.get_current_value(variable) for variable in variables],
            [scope.get_current_value(variable) for variable in self.variables],
        )


def built(model: keras.Model) -> None:
    """Make the variables of a model's optimizer, as its first `fit` would."""
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


@contextmanager
def left_unbuilt(model: Any) -> Iterator[None]:
    """Keep Keras from making the variables of a model's optimizer while it makes those of the metrics."""
    optimizer = model.optimizer if model.compiled else None
    if optimizer is None or optimizer.built:
        yield
        return
    optimizer.built = True
    try:
        yield
    finally:
        optimizer.built = False


def twin(optimizer: Any) -> Any:
    """Return an optimizer that is told the same as one that is not built yet, with variables of its own."""
    config = optimizer.get_config()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return type(optimizer)(**{**config, "inner_optimizer": twin(optimizer.inner_optimizer)})
    if not isinstance(optimizer._learning_rate, keras.Variable):
        config["learning_rate"] = optimizer._learning_rate  # a schedule, as it is
    found = type(optimizer)(**config)
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(optimizer, name):
            setattr(found, name, getattr(optimizer, name))
    return found


def _plain(optimizer: Any) -> Any:
    """The same optimizer, its variables and all, in the form that is written for every backend."""
    if keras.backend.backend() == "jax":
        return optimizer
    plain = object.__new__(_plain_class(type(optimizer)))
    trained = optimizer._trainable_variables
    excluded = getattr(optimizer, "_exclude_from_weight_decay", set())
    vars(plain).update(vars(optimizer))
    # TensorFlow's optimizers know variables by names of its own.
    vars(plain)["_trainable_variables_indices"] = {id(variable): index for index, variable in enumerate(trained)}
    keys = (
        {id(variable) for variable in trained if optimizer._var_key(variable) in excluded} if excluded else set()
    )
    vars(plain)["_exclude_from_weight_decay"] = keys
    vars(plain)["_exclude_from_weight_decay_cache"] = {}
    return plain


def _plain_class(kind: type) -> type:
    """An optimizer's class with every method that a backend has overridden as it was before."""
    below = type("Plain", (keras.Optimizer,), _restored(keras.Optimizer))  # where the class's own super() leads
    return type(kind.__name__, (kind, below), _restored(kind))


def _restored(kind: type) -> dict[str, Any]:
    found = {}
    for name in dir(BaseOptimizer):
        owners = [base for base in kind.__mro__ if name in vars(base)]
        if not name.startswith("__") and owners[0].__module__.startswith(_BACKENDS):
            owner = next(base for base in owners if not base.__module__.startswith(_BACKENDS))
            found[name] = vars(owner)[name]
    return found
