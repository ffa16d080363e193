"""From the optimizer and hyperparameters of `compile` to what a lane needs, checked."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from modelfleet.each import Each, per_member
from modelfleet.errors import InputError
from modelfleet.frameworks.torch.optimizers.rules import ALGORITHMS
from modelfleet.frameworks.torch.optimizers.stacked import Optimizer
from modelfleet.types import OptimizerLike
from modelfleet.unknown_names import unknown

# Options of torch's optimizers that choose an implementation, not a result. They are accepted and have no effect.
SWITCHES = frozenset({"foreach", "fused", "capturable", "differentiable"})

# Hyperparameters whose terms are exactly 0 if they are 0, so that leaving the terms out changes no number.
_OPTIONAL = ("weight_decay", "momentum", "dampening")


def resolve_each(
    optimizer: OptimizerLike, given: Mapping[str, Any], names: Sequence[str]
) -> tuple[list[Optimizer], dict[str, np.ndarray]]:
    """Return every member's optimizer, and the numeric hyperparameters `(member,)` as float64 arrays.

    Members that may be fused get the same object. Numbers that a member's optimizer does not have are NaN.

    Raises:
        InputError: An optimizer or a hyperparameter is unknown, or a value does not fit.
    """
    if not isinstance(optimizer, Each):
        found, hyper = resolve(optimizer, given)
        return _by_flags(found, static_flags(optimizer, given, names)), columns(hyper, names)
    chosen: dict[str, Optimizer] = {}
    arrays: dict[str, np.ndarray] = {}
    for algorithm, own in _by_algorithm(optimizer, given, names).items():
        settings = _joined(algorithm, own)
        optimizers, numbers = resolve_each(algorithm, settings, list(own))
        chosen |= dict(zip(own, optimizers, strict=True))
        places = [position for position, name in enumerate(names) if name in own]
        for key, values in numbers.items():
            arrays.setdefault(key, np.full(len(names), np.nan))[places] = values
    return [chosen[name] for name in names], arrays


def _by_algorithm(
    optimizer: Each, given: Mapping[str, Any], names: Sequence[str]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the settings of every member by its name, the members of one optimizer together."""
    values = {key: per_member(value, names, key) for key, value in given.items()}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for position, (name, own) in enumerate(zip(names, per_member(optimizer, names, "optimizer"), strict=True)):
        try:
            algorithm, settings = _settings(own, {key: column[position] for key, column in values.items()})
        except InputError as error:
            raise InputError(f"member {name!r}: {error}") from None
        found.setdefault(algorithm, {})[name] = settings
    return found


def _joined(algorithm: str, own: Mapping[str, Mapping[str, Any]]) -> dict[str, Each]:
    """Return the settings of members of one optimizer, with its defaults for members that do not set them."""
    known = {**ALGORITHMS[algorithm].defaults, **ALGORITHMS[algorithm].flags}
    keys = [key for key in known if any(key in settings for settings in own.values())]
    return {key: Each({name: settings.get(key, known[key]) for name, settings in own.items()}) for key in keys}


def _by_flags(optimizer: Optimizer, flags: Sequence[dict[str, bool]]) -> list[Optimizer]:
    """Return the optimizer with every member's flags; the same object for members with the same flags."""
    keys = [tuple(sorted(own.items())) for own in flags]
    found = {key: replace(optimizer, flags=own) for key, own in zip(keys, flags, strict=True)}
    return [found[key] for key in keys]


def resolve(optimizer: OptimizerLike, given: Mapping[str, Any]) -> tuple[Optimizer, dict[str, Any]]:
    """Return the optimizer, and its numeric hyperparameters with the defaults filled in.

    Args:
        optimizer: A name, a class of `torch.optim`, or a `functools.partial` of one.
        given: Hyperparameters. Values that are `each(...)` stay so; flags that are `each(...)` are left at their
            defaults here (see `static_flags`).

    Raises:
        InputError: The optimizer or a hyperparameter is unknown, or a flag is not True or False.
    """
    name, settings = _settings(optimizer, given)
    algorithm = ALGORITHMS[name]
    hyper = {key: settings.get(key, default) for key, default in algorithm.defaults.items()}
    flags = dict(algorithm.flags)
    for flag in flags:
        if flag in settings and not isinstance(settings[flag], Each):
            flags[flag] = _flag(name, flag, settings[flag])
    unused = frozenset(key for key in _OPTIONAL if key in hyper and _always_zero(hyper[key]))
    return Optimizer(name, flags, unused), hyper


def static_flags(
    optimizer: OptimizerLike, given: Mapping[str, Any], names: Sequence[str]
) -> list[dict[str, bool]]:
    """Return the flags of every member. Members with different flags need different lanes."""
    name, settings = _settings(optimizer, given)
    flags: list[dict[str, bool]] = [{} for _ in names]
    for flag, default in ALGORITHMS[name].flags.items():
        for position, value in enumerate(per_member(settings.get(flag, default), names, flag)):
            flags[position][flag] = _flag(name, flag, value, names[position])
    if name == "sgd":
        momentum = per_member(settings.get("momentum", 0), names, "momentum")
        dampening = per_member(settings.get("dampening", 0), names, "dampening")
        for member, flag, own, damping in zip(names, flags, momentum, dampening, strict=True):
            if flag["nesterov"] and not (own and not damping):
                raise InputError(
                    f"member {member!r}: nesterov=True with momentum={own!r} and dampening={damping!r}. "
                    f"Nesterov needs a momentum above 0 and no dampening."
                )
    return flags


def columns(hyper: Mapping[str, Any], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return all numeric hyperparameters, checked, as float64 arrays `(member,)`; `betas` as two."""
    arrays = {flat: np.empty(len(names)) for name in hyper for flat in flat_names(name)}
    for name, value in hyper.items():
        flats = flat_names(name)
        for position, own in enumerate(per_member(value, names, name)):
            if len(flats) > 1 and not (isinstance(own, tuple | list) and len(own) == len(flats)):
                raise _wrong_value(names[position], name, own, f"{len(flats)} numbers, as in {name}=(0.9, 0.99)")
            for flat, number in zip(flats, own if len(flats) > 1 else (own,), strict=True):
                arrays[flat][position] = _number(names[position], flat, number)
    return arrays


def flat_names(name: str) -> tuple[str, ...]:
    """Return the names of a hyperparameter's columns: `betas` has two, any other has one."""
    return ("beta1", "beta2") if name == "betas" else (name,)


def _settings(optimizer: OptimizerLike, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the optimizer's name, and its settings: those of a partial, overridden by `given`."""
    preset: Mapping[str, Any] = {}
    if isinstance(optimizer, functools.partial):
        if optimizer.args:
            raise InputError(
                f"optimizer {optimizer!r} has positional arguments. Give hyperparameters by name: "
                f"functools.partial(torch.optim.SGD, lr=0.1)."
            )
        preset, optimizer = optimizer.keywords, optimizer.func
    name = _name(optimizer)
    settings = {**preset, **given}
    known = {**ALGORITHMS[name].defaults, **ALGORITHMS[name].flags}
    for key in settings:
        if key not in known and key not in SWITCHES:
            raise unknown(f"hyperparameter of {name}", key, known)
    return name, settings


def _name(optimizer: OptimizerLike) -> str:
    if isinstance(optimizer, str):
        name = optimizer.lower().replace("_", "").replace("-", "")
        if name not in ALGORITHMS:
            raise unknown("optimizer", optimizer, ALGORITHMS)
        return name
    for name, algorithm in ALGORITHMS.items():
        if optimizer is algorithm.torch_class and optimizer is not None:
            return name
    shown = optimizer.__qualname__ if isinstance(optimizer, type) else repr(optimizer)
    raise InputError(
        f"optimizer {shown} is not available in fleets. "
        f"Give one of {', '.join(sorted(ALGORITHMS))}, by name or as its torch.optim class."
    )


def _flag(optimizer: str, flag: str, value: object, member: str | None = None) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    where = "" if member is None else f"member {member!r}: "
    raise InputError(f"{where}{flag} of {optimizer} is {value!r}, expected True or False.")


def _always_zero(value: object) -> bool:
    if isinstance(value, Each):
        own = value.values.values() if isinstance(value.values, dict) else value.values
        return all(_always_zero(one) for one in own)
    return isinstance(value, int | float | np.number) and value == 0


def _number(member: str, name: str, value: object) -> float:
    try:
        if isinstance(value, str):  # float would read it
            raise TypeError
        number = float(value)  # pyrefly: ignore[bad-argument-type]  # a value that is no number raises
    except (TypeError, ValueError):
        raise _wrong_value(member, name, value, "a number") from None
    expected, fits = _RANGES.get(name, _NOT_NEGATIVE)
    if not (math.isfinite(number) and fits(number)):
        raise _wrong_value(member, name, value, expected)
    return number


def _wrong_value(member: str, name: str, value: object, expected: str) -> InputError:
    return InputError(f"member {member!r}: {name} is {value!r}, expected {expected}.")


_Range = tuple[str, Callable[[float], bool]]
_NOT_NEGATIVE: _Range = ("a finite number, 0 or more", lambda value: value >= 0)
_BETA: _Range = ("a number from 0 to below 1", lambda value: 0 <= value < 1)
_RANGES: Mapping[str, _Range] = {
    "beta1": _BETA,
    "beta2": _BETA,
    "rho": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "dampening": ("a finite number", lambda value: True),
}
