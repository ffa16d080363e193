"""Optimizers on stacked parameters: every member has its own value of every hyperparameter.

Each agrees with the `torch.optim` class of its name, step by step. All is elementwise on `(member, …)`
tensors. What is one number per member and step (bias corrections and the like) is computed in float64, since
`1 - 0.999**t` in float32 is off by 6e-5, and only then cast to the parameter's type.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelfleet.each import Each, spread
from modelfleet.errors import InputError, unknown

# Where torch's optimizers choose an implementation, not a result: taken, and without effect here.
SWITCHES = frozenset({"foreach", "fused", "capturable", "differentiable"})

# Terms that are exactly nothing where the hyperparameter is 0, so that leaving them out changes no number.
_OPTIONAL = ("weight_decay", "momentum", "dampening")


@dataclass(frozen=True)
class Optimizer:
    """An update rule for stacked parameters, as four plain facts and three pure functions.

    `flags` change the algorithm rather than a number (`nesterov`, `amsgrad`, …). `unused` names the
    hyperparameters that are 0 for every member: their terms and slots are left out.
    """

    name: str
    flags: Mapping[str, bool]
    unused: frozenset[str] = frozenset()

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The numeric hyperparameters by torch's names, with torch's defaults."""
        return _ALGORITHMS[self.name].defaults

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the state tensors that each parameter has, as in `torch.optim`'s state."""
        return _ALGORITHMS[self.name].slots(self)

    @property
    def torch_class(self) -> type[torch.optim.Optimizer] | None:
        """The class of `torch.optim` that this agrees with; None for Lion, which torch does not have."""
        return _ALGORITHMS[self.name].torch_class

    @property
    def decoupled(self) -> bool:
        """Whether weight decay shrinks the parameter, instead of adding to the gradient."""
        return self.name in ("adamw", "lion") or self.flags.get("decoupled_weight_decay", False)

    def initial(self, param: Tensor, hyper: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The slots of one parameter `(member, …)` before its first step."""
        slots = {name: torch.zeros_like(param) for name in self.slots}
        if "sum" in slots:
            slots["sum"] = slots["sum"] + _wide(hyper["initial_accumulator_value"], param)
        if "mu_product" in slots:  # one running number per member, kept in float64
            slots["mu_product"] = torch.ones(len(param), dtype=torch.float64, device=param.device)
        return slots

    def coefficients(self, hyper: Mapping[str, Tensor], step: Tensor) -> dict[str, Tensor]:
        """The numbers of this step for `apply`, each `(member,)` in float64; `step` counts from 1."""
        values = _ALGORITHMS[self.name].coefficients(hyper, step)
        if "weight_decay" in self.unused:
            return values
        if self.decoupled:
            values["shrink"] = 1 - hyper["lr"] * hyper["weight_decay"]
        else:
            values["weight_decay"] = hyper["weight_decay"]
        return values

    def apply(
        self, param: Tensor, grad: Tensor, slots: Mapping[str, Tensor], coefficients: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The parameter `(member, …)` after one step, and its slots."""
        wide = _Wide(coefficients, param)
        if self.flags.get("maximize", False):
            grad = -grad
        if "weight_decay" not in self.unused:
            if self.decoupled:
                param = param * wide["shrink"]
            else:
                grad = torch.addcmul(grad, param, wide["weight_decay"])
        return _ALGORITHMS[self.name].update(self, param, grad, slots, wide)


class _Wide:
    """Coefficients `(member,)` made to fit a parameter: its dtype, and shape `(member, 1, …, 1)`."""

    def __init__(self, coefficients: Mapping[str, Tensor], param: Tensor) -> None:
        self.coefficients, self.param = coefficients, param

    def __getitem__(self, name: str) -> Tensor:
        return _wide(self.coefficients[name], self.param)


def _wide(value: Tensor, param: Tensor) -> Tensor:
    return value.to(param.dtype).reshape(-1, *[1] * (param.dim() - 1))


# --- the algorithms, in the order of operations of torch's single-tensor loops, so that rounding agrees. A
# scalar goes with the first factor, since torch's `addcmul` and `addcdiv` compute `(value * a) * b` and
# `(value * a) / b`.

_Hyper = Mapping[str, Tensor]
_Slots = Mapping[str, Tensor]
_Updated = tuple[Tensor, dict[str, Tensor]]


def _sgd_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    # As in torch: no dampening without momentum, nor in the first step, whose buffer is the gradient itself.
    undamped = (hyper["momentum"] == 0) | (step == 1)
    return {
        "step_size": -hyper["lr"],
        "momentum": hyper["momentum"],
        "grad_weight": torch.where(undamped, 1.0, 1 - hyper["dampening"]),
    }


def _sgd(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Wide) -> _Updated:
    if "momentum" in optimizer.unused:
        return torch.addcmul(param, grad, c["step_size"]), {}
    added = grad if "dampening" in optimizer.unused else grad * c["grad_weight"]
    buffer = torch.addcmul(added, slots["momentum_buffer"], c["momentum"])
    direction = torch.addcmul(grad, buffer, c["momentum"]) if optimizer.flags["nesterov"] else buffer
    return torch.addcmul(param, direction, c["step_size"]), {"momentum_buffer": buffer}


def _moments(hyper: _Hyper) -> dict[str, Tensor]:
    return {
        "grad_weight": 1 - hyper["beta1"],
        "beta2": hyper["beta2"],
        "square_weight": 1 - hyper["beta2"],
        "eps": hyper["eps"],
    }


def _square_average(average: Tensor, grad: Tensor, decay: Tensor, weight: Tensor) -> Tensor:
    return torch.addcmul(average * decay, grad * weight, grad)


def _adam_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    return _moments(hyper) | {
        "step_size": -(hyper["lr"] / (1 - hyper["beta1"] ** step)),
        "correction": (1 - hyper["beta2"] ** step).sqrt(),
    }


def _adam(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Wide) -> _Updated:
    average = torch.lerp(slots["exp_avg"], grad, c["grad_weight"])
    square = _square_average(slots["exp_avg_sq"], grad, c["beta2"], c["square_weight"])
    after = {"exp_avg": average, "exp_avg_sq": square}
    if optimizer.flags["amsgrad"]:
        square = after["max_exp_avg_sq"] = torch.maximum(slots["max_exp_avg_sq"], square)
    denominator = square.sqrt() / c["correction"] + c["eps"]
    return torch.addcdiv(param, average * c["step_size"], denominator), after


def _rmsprop_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    return {
        "step_size": -hyper["lr"],
        "alpha": hyper["alpha"],
        "weight": 1 - hyper["alpha"],
        "eps": hyper["eps"],
        "momentum": hyper["momentum"],
    }


def _rmsprop(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Wide) -> _Updated:
    square = _square_average(slots["square_avg"], grad, c["alpha"], c["weight"])
    after = {"square_avg": square}
    if optimizer.flags["centered"]:
        average = after["grad_avg"] = torch.lerp(slots["grad_avg"], grad, c["weight"])
        square = torch.addcmul(square, average, average, value=-1)
    direction = grad / (square.sqrt() + c["eps"])
    if "momentum" not in optimizer.unused:
        direction = torch.addcmul(direction, slots["momentum_buffer"], c["momentum"])
        after["momentum_buffer"] = direction
    return torch.addcmul(param, direction, c["step_size"]), after


def _adagrad_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    return {"step_size": -(hyper["lr"] / (1 + (step - 1) * hyper["lr_decay"])), "eps": hyper["eps"]}


def _adagrad(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Wide) -> _Updated:
    total = torch.addcmul(slots["sum"], grad, grad)
    return torch.addcdiv(param, grad * c["step_size"], total.sqrt() + c["eps"]), {"sum": total}


def _adadelta_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    return {"step_size": -hyper["lr"], "rho": hyper["rho"], "weight": 1 - hyper["rho"], "eps": hyper["eps"]}


def _adadelta(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Wide) -> _Updated:
    square = _square_average(slots["square_avg"], grad, c["rho"], c["weight"])
    delta = (slots["acc_delta"] + c["eps"]).sqrt() / (square + c["eps"]).sqrt() * grad
    accumulated = _square_average(slots["acc_delta"], delta, c["rho"], c["weight"])
    return torch.addcmul(param, delta, c["step_size"]), {"square_avg": square, "acc_delta": accumulated}


def _nadam_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    def momentum(at: Tensor) -> Tensor:
        return hyper["beta1"] * (1 - 0.5 * 0.96 ** (at * hyper["momentum_decay"]))

    return _moments(hyper) | {
        "lr": hyper["lr"],
        "mu": momentum(step),
        "mu_next": momentum(step + 1),
        "correction": 1 - hyper["beta2"] ** step,
    }


def _nadam(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Wide) -> _Updated:
    lr, mu, mu_next = (c.coefficients[name] for name in ("lr", "mu", "mu_next"))
    product = slots["mu_product"] * mu
    grad_step = _wide(-lr * (1 - mu) / (1 - product), param)
    average_step = _wide(-lr * mu_next / (1 - product * mu_next), param)
    average = torch.lerp(slots["exp_avg"], grad, c["grad_weight"])
    square = _square_average(slots["exp_avg_sq"], grad, c["beta2"], c["square_weight"])
    denominator = (square / c["correction"]).sqrt() + c["eps"]
    param = torch.addcdiv(param, grad * grad_step, denominator)
    param = torch.addcdiv(param, average * average_step, denominator)
    return param, {"exp_avg": average, "exp_avg_sq": square, "mu_product": product}


def _radam_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    decayed = hyper["beta2"] ** step
    most = 2 / (1 - hyper["beta2"]) - 1
    length = most - 2 * step * decayed / (1 - decayed)
    rectified = length > 5
    ratio = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
    return _moments(hyper) | {
        "lr": hyper["lr"],
        "correction": 1 - hyper["beta1"] ** step,
        "root_correction": (1 - decayed).sqrt(),
        "rectified": rectified.to(torch.float64),
        "rectification": torch.where(rectified, ratio, 1.0).sqrt(),
    }


def _radam(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Wide) -> _Updated:
    average = torch.lerp(slots["exp_avg"], grad, c["grad_weight"])
    square = _square_average(slots["exp_avg_sq"], grad, c["beta2"], c["square_weight"])
    plain = average / c["correction"] * c["lr"]
    adapted = plain * (c["root_correction"] / (square.sqrt() + c["eps"])) * c["rectification"]
    param = param - torch.where(c["rectified"] > 0, adapted, plain)
    return param, {"exp_avg": average, "exp_avg_sq": square}


def _adamax_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    return _moments(hyper) | {"step_size": -(hyper["lr"] / (1 - hyper["beta1"] ** step))}


def _adamax(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Wide) -> _Updated:
    average = torch.lerp(slots["exp_avg"], grad, c["grad_weight"])
    largest = torch.maximum(slots["exp_inf"] * c["beta2"], grad.abs() + c["eps"])
    param = torch.addcdiv(param, average * c["step_size"], largest)
    return param, {"exp_avg": average, "exp_inf": largest}


def _lion_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    return {
        "step_size": -hyper["lr"],
        "beta1": hyper["beta1"],
        "grad_weight": 1 - hyper["beta1"],
        "beta2": hyper["beta2"],
        "average_weight": 1 - hyper["beta2"],
    }


def _lion(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Wide) -> _Updated:
    average = slots["exp_avg"]
    direction = (average * c["beta1"] + grad * c["grad_weight"]).sign()
    average = average * c["beta2"] + grad * c["average_weight"]
    return torch.addcmul(param, direction, c["step_size"]), {"exp_avg": average}


@dataclass(frozen=True)
class _Algorithm:
    torch_class: type[torch.optim.Optimizer] | None
    coefficients: Callable[[_Hyper, Tensor], dict[str, Tensor]]
    update: Callable[[Optimizer, Tensor, Tensor, _Slots, _Wide], _Updated]
    slots: Callable[[Optimizer], tuple[str, ...]]
    defaults: Mapping[str, Any]
    flags: Mapping[str, bool]


def _keeps(*always: str, **when: str) -> Callable[[Optimizer], tuple[str, ...]]:
    """The slots `always` kept, and those kept `when` a flag is set or a hyperparameter is in use."""

    def slots(optimizer: Optimizer) -> tuple[str, ...]:
        used = (slot for name, slot in when.items() if optimizer.flags.get(name, name not in optimizer.unused))
        return (*always, *used)

    return slots


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}
_MAXIMIZE = {"maximize": False}
_ADAM_SLOTS = _keeps("exp_avg", "exp_avg_sq", amsgrad="max_exp_avg_sq")

_ALGORITHMS: Mapping[str, _Algorithm] = {
    "sgd": _Algorithm(
        torch.optim.SGD,
        _sgd_coefficients,
        _sgd,
        _keeps(momentum="momentum_buffer"),
        {"lr": 1e-3, "momentum": 0, "dampening": 0, "weight_decay": 0},
        {"nesterov": False} | _MAXIMIZE,
    ),
    "adam": _Algorithm(
        torch.optim.Adam,
        _adam_coefficients,
        _adam,
        _ADAM_SLOTS,
        _ADAM,
        {"amsgrad": False, "decoupled_weight_decay": False} | _MAXIMIZE,
    ),
    "adamw": _Algorithm(
        torch.optim.AdamW,
        _adam_coefficients,
        _adam,
        _ADAM_SLOTS,
        _ADAM | {"weight_decay": 1e-2},
        {"amsgrad": False} | _MAXIMIZE,
    ),
    "rmsprop": _Algorithm(
        torch.optim.RMSprop,
        _rmsprop_coefficients,
        _rmsprop,
        _keeps("square_avg", momentum="momentum_buffer", centered="grad_avg"),
        {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0, "momentum": 0},
        {"centered": False} | _MAXIMIZE,
    ),
    "adagrad": _Algorithm(
        torch.optim.Adagrad,
        _adagrad_coefficients,
        _adagrad,
        _keeps("sum"),
        {"lr": 1e-2, "lr_decay": 0, "weight_decay": 0, "initial_accumulator_value": 0, "eps": 1e-10},
        _MAXIMIZE,
    ),
    "adadelta": _Algorithm(
        torch.optim.Adadelta,
        _adadelta_coefficients,
        _adadelta,
        _keeps("square_avg", "acc_delta"),
        {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0},
        _MAXIMIZE,
    ),
    "nadam": _Algorithm(
        torch.optim.NAdam,
        _nadam_coefficients,
        _nadam,
        _keeps("exp_avg", "exp_avg_sq", "mu_product"),
        _ADAM | {"lr": 2e-3, "momentum_decay": 4e-3},
        {"decoupled_weight_decay": False} | _MAXIMIZE,
    ),
    "radam": _Algorithm(
        torch.optim.RAdam,
        _radam_coefficients,
        _radam,
        _keeps("exp_avg", "exp_avg_sq"),
        _ADAM,
        {"decoupled_weight_decay": False} | _MAXIMIZE,
    ),
    "adamax": _Algorithm(
        torch.optim.Adamax,
        _adamax_coefficients,
        _adamax,
        _keeps("exp_avg", "exp_inf"),
        _ADAM | {"lr": 2e-3},
        _MAXIMIZE,
    ),
    "lion": _Algorithm(
        None,
        _lion_coefficients,
        _lion,
        _keeps("exp_avg"),
        {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0},
        _MAXIMIZE,
    ),
}


# --- from what a person gives to what a lane needs


def resolve(optimizer: object, given: Mapping[str, Any]) -> tuple[Optimizer, dict[str, Any]]:
    """The optimizer that was asked for, and its numeric hyperparameters with the defaults filled in.

    `optimizer` is a name, a class of `torch.optim`, or a `functools.partial` of one. Values in `given` may be
    `each(...)` and stay so; a flag that is one per member is left at its default here: see `static_flags`.
    """
    name, settings = _settings(optimizer, given)
    algorithm = _ALGORITHMS[name]
    hyper = {key: settings.get(key, default) for key, default in algorithm.defaults.items()}
    flags = dict(algorithm.flags)
    for flag in flags:
        if flag in settings and not isinstance(settings[flag], Each):
            flags[flag] = _flag(name, flag, settings[flag])
    unused = frozenset(key for key in _OPTIONAL if key in hyper and _always_zero(hyper[key]))
    return Optimizer(name, flags, unused), hyper


def static_flags(optimizer: object, given: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, bool]]:
    """The flags of every member, from the same arguments as `resolve`: unlike ones need unlike lanes."""
    name, settings = _settings(optimizer, given)
    flags: list[dict[str, bool]] = [{} for _ in names]
    for flag, default in _ALGORITHMS[name].flags.items():
        for row, value in enumerate(spread(settings.get(flag, default), names, flag)):
            flags[row][flag] = _flag(name, flag, value, names[row])
    if name == "sgd":
        momentum = spread(settings.get("momentum", 0), names, "momentum")
        dampening = spread(settings.get("dampening", 0), names, "dampening")
        for row, member in enumerate(names):
            if flags[row]["nesterov"] and not (momentum[row] and not dampening[row]):
                raise InputError(
                    f"member {member!r}: nesterov=True with momentum={momentum[row]!r} and "
                    f"dampening={dampening[row]!r}. Nesterov needs a momentum above 0 and no dampening."
                )
    return flags


def columns(hyper: Mapping[str, Any], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Every numeric hyperparameter as a checked float64 array `(member,)`; `betas` as `beta1` and `beta2`."""
    arrays = {flat: np.empty(len(names)) for name in hyper for flat in flat_names(name)}
    for name, value in hyper.items():
        flats = flat_names(name)
        for row, own in enumerate(spread(value, names, name)):
            if len(flats) > 1 and not (isinstance(own, tuple | list) and len(own) == len(flats)):
                raise _unfit(names[row], name, own, f"{len(flats)} numbers, as in {name}=(0.9, 0.99)")
            for flat, number in zip(flats, own if len(flats) > 1 else (own,), strict=True):
                arrays[flat][row] = _number(names[row], flat, number)
    return arrays


def flat_names(name: str) -> tuple[str, ...]:
    """The names of a hyperparameter's columns: `betas` has two, any other its own."""
    return ("beta1", "beta2") if name == "betas" else (name,)


def _settings(optimizer: object, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The optimizer's name, and all that was set for it: by a partial, then by the caller."""
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
    known = {**_ALGORITHMS[name].defaults, **_ALGORITHMS[name].flags}
    for key in settings:
        if key not in known and key not in SWITCHES:
            raise unknown(f"hyperparameter of {name}", key, known)
    return name, settings


def _name(optimizer: object) -> str:
    if isinstance(optimizer, str):
        name = optimizer.lower().replace("_", "").replace("-", "")
        if name not in _ALGORITHMS:
            raise unknown("optimizer", optimizer, _ALGORITHMS)
        return name
    for name, algorithm in _ALGORITHMS.items():
        if optimizer is algorithm.torch_class and optimizer is not None:
            return name
    shown = optimizer.__qualname__ if isinstance(optimizer, type) else repr(optimizer)
    raise InputError(
        f"optimizer {shown} can't be run on stacked members. "
        f"Give one of {', '.join(sorted(_ALGORITHMS))}, by name or as its torch.optim class."
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
        number = float(value)  # pyrefly: ignore[bad-argument-type]  # what can't be a float raises, and is named
    except (TypeError, ValueError):
        raise _unfit(member, name, value, "a number") from None
    expected, fits = _RANGES.get(name, _NOT_NEGATIVE)
    if not (math.isfinite(number) and fits(number)):
        raise _unfit(member, name, value, expected)
    return number


def _unfit(member: str, name: str, value: object, expected: str) -> InputError:
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
