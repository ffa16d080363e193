"""Optimizers of Keras: from what `compile` got to an optimizer, and its update as a pure function."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeAlias

import keras
import numpy as np
from keras import ops
from keras.src.optimizers.base_optimizer import BaseOptimizer

from modelfleet.errors import InputError
from modelfleet.types import OptimizerLike, Tensor
from modelfleet.unknown_names import unknown

OPTIMIZERS: Mapping[str, type[keras.Optimizer]] = {
    cls.__name__.lower(): cls
    for cls in vars(keras.optimizers).values()
    if isinstance(cls, type) and cls not in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
}
RATE = "learning_rate"  # the only hyperparameter that is a variable of the optimizer
ALIASES = {"lr": "learning_rate", "eps": "epsilon"}  # hyperparameters that have another name in Keras
_BACKENDS = "keras.src.backend."

Argument: TypeAlias = Any
"""An argument of `model.compile` or of an optimizer, as the user gave it. Keras checks it."""


def resolve(optimizer: OptimizerLike, given: dict[str, Argument], name: str) -> keras.Optimizer:
    """Return a new optimizer for one member.

    Args:
        optimizer: A name, a class of Keras's optimizers, or an optimizer, whose settings are copied.
        given: Hyperparameters, by Keras's names.
        name: Name of the member, for errors.

    Raises:
        InputError: The optimizer is unknown, or does not take a hyperparameter.
    """
    if "betas" in given:
        given["beta_1"], given["beta_2"] = given.pop("betas")
    rate = given.get("learning_rate")
    if isinstance(rate, str | int | float | np.number) and not isinstance(rate, bool):
        if isinstance(rate, str) or not 0 <= float(rate) < float("inf"):
            raise InputError(f"lr of member {name!r} is {rate!r}; expected a number of at least 0.")
        given["learning_rate"] = float(rate)
    config: dict[str, Argument] = {}
    if isinstance(optimizer, keras.optimizers.Optimizer):
        kind, config = type(optimizer), _config(optimizer)
        config.pop("name", None)
    elif isinstance(optimizer, type) and issubclass(optimizer, keras.optimizers.Optimizer):
        kind = optimizer
    elif isinstance(optimizer, str) and optimizer.lower().replace("_", "") in OPTIMIZERS:
        kind = OPTIMIZERS[optimizer.lower().replace("_", "")]
    elif isinstance(optimizer, str):
        raise unknown("optimizer", optimizer, OPTIMIZERS)
    else:
        raise InputError(
            f"the optimizer of member {name!r} is {optimizer!r}. Give a name, as in 'adam', or an optimizer of "
            f"Keras."
        )
    try:
        return kind(**{**config, **given})
    except (TypeError, ValueError) as error:
        settings = ", ".join(f"{key}={value!r}" for key, value in given.items())
        raise InputError(f"member {name!r}: {kind.__name__}({settings}) gave {error}") from error


def averages_weights(optimizer: OptimizerLike) -> bool:
    """Return True if an optimizer, or one within it, replaces the weights by their averages after the training."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return any(getattr(one, "use_ema", False) for one in (inner, *getattr(inner, "optimizers", ())))


class Update:
    """Update of a built optimizer as a pure function. The optimizer itself is not changed.

    Keras's own `stateless_apply` is refused on TensorFlow, whose optimizers write to `tf.Variable`s, and updates
    in place on torch, whose optimizers use fused operations. Both work once those overrides are removed.
    """

    def __init__(self, optimizer: keras.Optimizer) -> None:
        self.variables = optimizer.variables
        self.scaling = optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else None
        self._inner = _plain(optimizer.inner_optimizer if self.scaling else optimizer)

    def __call__(
        self,
        state: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        variables: Sequence[keras.Variable],
        values: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the new values of the model's variables and of the optimizer's (`state`)."""
        mapping = [*zip(variables, values, strict=True), *zip(self.variables, state, strict=True)]
        if self.scaling is None:
            return self._applied(mapping, gradients, variables)
        with keras.StatelessScope(mapping):
            scale, counter = ops.copy(self.scaling.dynamic_scale), ops.copy(self.scaling.step_counter)
        own = [None if gradient is None else ops.divide(gradient, scale) for gradient in gradients]
        found = [ops.all(ops.isfinite(gradient)) for gradient in own if gradient is not None]
        finite = ops.all(ops.stack(found))
        new, new_state = self._applied(mapping, own, variables)
        grown = ops.equal(counter, self.scaling.dynamic_growth_steps - 1)
        next_scale = ops.where(finite, ops.where(grown, scale * 2.0, scale), scale * 0.5)
        next_counter = ops.where(ops.logical_and(finite, ops.logical_not(grown)), counter + 1, 0)
        special = {id(self.scaling.dynamic_scale): next_scale, id(self.scaling.step_counter): next_counter}
        kept = [ops.where(finite, a, b) for a, b in zip(new, values, strict=True)]
        kept_state = [
            ops.cast(special[id(variable)], variable.dtype) if id(variable) in special else ops.where(finite, a, b)
            for variable, a, b in zip(self.variables, new_state, state, strict=True)
        ]
        return kept, kept_state

    def _applied(
        self,
        mapping: list[tuple[keras.Variable, Tensor]],
        gradients: Sequence[Tensor | None],
        variables: Sequence[keras.Variable],
    ) -> tuple[list[Tensor], list[Tensor]]:
        with keras.StatelessScope(mapping) as scope:
            self._inner.apply(list(gradients), list(variables))
        return (
            [scope.get_current_value(variable) for variable in variables],
            [scope.get_current_value(variable) for variable in self.variables],
        )


def built(model: keras.Model) -> None:
    """Create the variables of a model's optimizer, as its first `fit` would."""
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


@contextmanager
def left_unbuilt(model: keras.Model) -> Iterator[None]:
    """Keep Keras from creating the optimizer's variables while it creates those of the metrics."""
    optimizer = model.optimizer if model.compiled else None
    if optimizer is None or optimizer.built:
        yield
        return
    optimizer.built = True
    try:
        yield
    finally:
        optimizer.built = False


def twin(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Return an optimizer with the settings of one that is not built yet, and variables of its own."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return type(optimizer)(**{**optimizer.get_config(), "inner_optimizer": twin(optimizer.inner_optimizer)})
    found = type(optimizer)(**_config(optimizer))
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(optimizer, name):
            setattr(found, name, getattr(optimizer, name))
    return found


def _config(optimizer: keras.Optimizer) -> dict[str, Argument]:
    """Return an optimizer's config. A schedule of the learning rate is in it as it is."""
    config = optimizer.get_config()
    if not isinstance(optimizer._learning_rate, keras.Variable):
        config["learning_rate"] = optimizer._learning_rate
    return config


def _plain(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Return the same optimizer, with its variables, in the form that works on every backend."""
    if keras.backend.backend() == "jax":
        return optimizer
    plain = object.__new__(_plain_class(type(optimizer)))
    trained = optimizer._trainable_variables
    excluded = getattr(optimizer, "_exclude_from_weight_decay", set())
    vars(plain).update(vars(optimizer))
    # On TensorFlow, optimizers look variables up by other keys than their ids.
    vars(plain)["_trainable_variables_indices"] = {id(variable): index for index, variable in enumerate(trained)}
    keys = (
        {id(variable) for variable in trained if optimizer._var_key(variable) in excluded} if excluded else set()
    )
    vars(plain)["_exclude_from_weight_decay"] = keys
    vars(plain)["_exclude_from_weight_decay_cache"] = {}
    return plain


def _plain_class(kind: type) -> type:
    """Return an optimizer's class without the methods that a backend overrides."""
    base = type("Plain", (keras.Optimizer,), _without_overrides(keras.Optimizer))  # what super() finds
    return type(kind.__name__, (kind, base), _without_overrides(kind))


def _without_overrides(kind: type) -> dict[str, FunctionType]:
    """Return the original of each method that a backend overrides, by name."""
    found = {}
    for name in dir(BaseOptimizer):
        owners = [base for base in kind.__mro__ if name in vars(base)]
        if not name.startswith("__") and owners[0].__module__.startswith(_BACKENDS):
            owner = next(base for base in owners if not base.__module__.startswith(_BACKENDS))
            found[name] = vars(owner)[name]
    return found


def hyperparameters_in(tensors: Iterable[str]) -> dict[str, str]:
    """Return the hyperparameters that are variables of an optimizer (`Engine.hyperparameters_in`)."""
    rate = next((name for name in tensors if name.partition(".")[2] == RATE), None)
    return {} if rate is None else {"lr": rate}
