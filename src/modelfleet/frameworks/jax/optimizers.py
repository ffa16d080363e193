"""Optimizers of Optax: a name, a function that makes one, or a gradient transformation.

Values that may differ between fused members are in the optimizer's state, one per member: the learning rate, and
every number that is given as `each(...)`. All other values are part of the program, so that members need equal
ones.
"""

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from modelfleet.each import Each, per_member
from modelfleet.errors import InputError, MissingExtraError
from modelfleet.formatting import without_period
from modelfleet.types import OptimizerLike, ScheduleLike, Tensor, Tree
from modelfleet.unknown_names import unknown

if TYPE_CHECKING:
    from optax import GradientTransformation, GradientTransformationExtraArgs, MultiSteps

Maker = Callable[..., "GradientTransformation"]

# Default learning rates: those of torch's optimizers, since Optax has none.
NAMES: Mapping[str, float] = {
    "sgd": 1e-3,
    "adam": 1e-3,
    "adamw": 1e-3,
    "amsgrad": 1e-3,
    "nadam": 2e-3,
    "nadamw": 2e-3,
    "radam": 1e-3,
    "adamax": 2e-3,
    "adabelief": 1e-3,
    "adadelta": 1.0,
    "adagrad": 1e-2,
    "rmsprop": 1e-2,
    "lamb": 1e-3,
    "lars": 1e-3,
    "lion": 1e-4,
    "novograd": 1e-3,
    "yogi": 1e-3,
}


@dataclass(frozen=True)
class Optimizer:
    """Gradient transformation of Optax, or a function that makes one.

    `fixed` are arguments of the function. `own` names the arguments of which each member has its own value, in its
    state.
    """

    name: str
    make: "Maker | GradientTransformation"
    fixed: tuple[tuple[str, Hashable], ...] = ()
    own: tuple[str, ...] = ()

    @functools.cached_property
    def transformation(self) -> "GradientTransformationExtraArgs":
        """Return the transformation. Its state holds the member's own hyperparameters."""
        optax = _optax()
        if isinstance(self.make, optax.GradientTransformation):
            return optax.with_extra_args_support(self.make)
        if not self.own:
            return optax.with_extra_args_support(self._made({}))
        return optax.GradientTransformationExtraArgs(self._init, self._update)

    def taken(self, **extra: Any) -> dict[str, Any]:
        """Return the extra arguments that the transformation takes."""
        takes = inspect.signature(self.transformation.update).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
            return extra
        return {name: value for name, value in extra.items() if name in takes}

    def state(self, params: Tree, values: Mapping[str, float]) -> Tree:
        """Return the initial state for a tree of params and a member's own hyperparameters."""
        if not self.own:
            return _initial(self)(params)
        return _initial(self)(params, {name: np.asarray(values[name], float) for name in self.own})

    def _init(self, params: Tree, values: Mapping[str, Tensor] | None = None) -> "_OwnState":
        values = dict.fromkeys(self.own, 0.0) if values is None else values
        return _OwnState(
            {name: jax.numpy.asarray(values[name], float) for name in self.own}, self._made(values).init(params)
        )

    def _update(
        self, updates: Tree, state: "_OwnState", params: Tree = None, **extra: Any
    ) -> tuple[Tree, "_OwnState"]:
        made = _optax().with_extra_args_support(self._made(state.values))
        updates, inner = made.update(updates, state.inner, params, **extra)
        return updates, _OwnState(state.values, inner)

    def _made(self, values: Mapping[str, Tensor]) -> "GradientTransformation":
        assert callable(self.make)
        return self.make(**dict(self.fixed), **{name: _weakly_typed(values[name]) for name in self.own})


class _OwnState(NamedTuple):
    """Hyperparameters of one member, and the state of the transformation that is made with them."""

    values: dict[str, Tensor]
    inner: Tree


def _weakly_typed(value: float | jax.Array) -> float | jax.Array:
    """Return a scalar that takes the dtype of the other operand, like a Python number.

    `optax.inject_hyperparams` would round hyperparameters to the params' dtype: in bfloat16, 0.999 is 1.
    """
    if isinstance(value, float):
        return value
    value = jax.numpy.asarray(value)
    # jax 0.10 has no other way to give a traced value a weak type.
    return jax.lax.convert_element_type_p.bind(value, new_dtype=value.dtype, weak_type=True, sharding=None)


@functools.lru_cache(maxsize=64)
def _initial(optimizer: Optimizer) -> Callable[..., Tree]:
    """Return the compiled `init` of an optimizer, shared by all recipes with this optimizer."""
    return jax.jit(optimizer.transformation.init)


def resolve(
    optimizer: OptimizerLike, schedule: ScheduleLike, given: Mapping[str, Any], names: Sequence[str]
) -> tuple[list[Optimizer], list[dict[str, float]]]:
    """Return every member's optimizer and own hyperparameters. Members that may be fused get the same object."""
    chosen = per_member(optimizer, names, "optimizer")
    schedules = per_member(schedule, names, "schedule")
    settings = {key: per_member(value, names, key) for key, value in given.items()}
    varied = {key for key, value in given.items() if isinstance(value, Each)}
    known: dict[Optimizer, Optimizer] = {}
    optimizers: list[Optimizer] = []
    values: list[dict[str, float]] = []
    for position, name in enumerate(names):
        own = {key: column[position] for key, column in settings.items()}
        try:
            found, numbers = _resolve(chosen[position], schedules[position], own, varied)
            optimizers.append(known.setdefault(found, found))
        except InputError as error:
            raise InputError(f"member {name!r}: {error}") from None if isinstance(optimizer, Each) else error
        except TypeError as error:  # a value of the program that can't be compared
            raise InputError(
                f"member {name!r}: the optimizer does not take {own}: {without_period(error)}. "
                f"Make the transformation yourself, and pass it instead of the name."
            ) from error
        values.append(numbers)
    return optimizers, values


def _resolve(
    optimizer: OptimizerLike, schedule: ScheduleLike, given: Mapping[str, Any], varied: set[str]
) -> tuple[Optimizer, dict[str, float]]:
    optax = _optax()
    if schedule is not None and not callable(schedule):
        raise InputError(
            f"the schedule of a JAX model is {schedule!r}; expected a schedule of Optax, a function of the step, "
            f"such as optax.cosine_decay_schedule(1e-3, 1000)."
        )
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = _accumulating(optimizer)
    if isinstance(optimizer, optax.GradientTransformation):
        extra = [*given, *(["schedule"] if schedule is not None else [])]
        if extra:
            raise InputError(
                f"compile got {extra[0]} beside a finished optimizer. Give {extra[0]} to the optimizer itself, or "
                f"pass the function that makes the optimizer: optax.adam instead of optax.adam(1e-3)."
            )
        return Optimizer("an Optax transformation", optimizer), {}
    name, make = _maker(optimizer)
    takes = inspect.signature(make).parameters
    rate = next((name for name in ("learning_rate", "lr") if name in takes), None) or next(iter(takes), "lr")
    settings = _settings(name, given, takes, rate)
    if schedule is not None:
        if rate in settings:
            raise InputError("compile got both lr and a schedule of Optax, which gives the rate itself. Give one.")
        settings[rate] = schedule
    elif rate not in settings and name in NAMES:
        settings[rate] = NAMES[name]
    own, fixed = {}, {}
    for key, value in settings.items():
        asked = "lr" if key == rate else key
        if key == rate and isinstance(value, str):
            raise InputError(f"{asked} is {value!r}, expected a finite number, 0 or more.")
        number = isinstance(value, int | float) or getattr(value, "shape", None) == ()
        differs = asked in varied or (asked in ("b1", "b2") and "betas" in varied)
        if number and not isinstance(value, bool) and (key == rate or differs):
            own[key] = _number(asked, value)
        else:
            fixed[key] = value
    made = Optimizer(name, make, tuple(sorted(fixed.items())), tuple(sorted(own)))
    hash(made)
    return made, own


@functools.lru_cache(maxsize=64)
def _accumulating(optimizer: "MultiSteps") -> "GradientTransformation":
    """Return the transformation of an `optax.MultiSteps`, always as the same object."""
    return optimizer.gradient_transformation()


def _maker(optimizer: OptimizerLike) -> tuple[str, Maker]:
    if isinstance(optimizer, str):
        name = optimizer.lower().replace("-", "_")
        if name not in NAMES:
            raise unknown("optimizer", optimizer, NAMES)
        return name, getattr(_optax(), name)
    if not callable(optimizer):
        raise InputError(
            f"optimizer {optimizer!r} is not one of Optax. Give a name ({', '.join(sorted(NAMES))}), a function "
            f"that makes one, such as optax.adam, or what it makes: optax.adam(1e-3)."
        )
    return getattr(optimizer, "__name__", "a custom function"), optimizer


def _settings(
    name: str, given: Mapping[str, Any], takes: Mapping[str, inspect.Parameter], rate: str
) -> dict[str, Any]:
    """Return hyperparameters by the optimizer's own names; `lr` and torch's `betas` are translated."""
    settings: dict[str, Any] = {}
    for key, value in given.items():
        if key == "lr":
            settings[rate] = value
        elif key == "betas" and "betas" not in takes:
            if not (isinstance(value, tuple | list) and len(value) == 2):
                raise InputError(f"betas is {value!r}, expected two numbers, as in betas=(0.9, 0.99).")
            settings["b1"], settings["b2"] = value
        else:
            settings[key] = value
    if not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        for key in settings:
            if key not in takes:
                raise unknown(f"hyperparameter of {name}", key, ["lr", *takes])
    return settings


def _number(name: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise InputError(f"{name} is {value!r}, expected a finite number, 0 or more.")
    return number


def _optax() -> ModuleType:
    try:
        import optax
    except ModuleNotFoundError as error:
        raise MissingExtraError("optax", "jax", "training JAX models") from error
    return optax
