"""Update rules of the optimizers, on stacked parameters `(member, …)`.

Each rule agrees step by step with the `torch.optim` class of its name. Operations come in the order of torch's
single-tensor loops, so that rounding agrees. A scalar goes with the first factor, since torch's `addcmul` and
`addcdiv` compute `(value * a) * b` and `(value * a) / b`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from modelfleet.frameworks.torch.optimizers.coefficients import Coefficients, one_per_member, pairs

STEP = "step"  # the optimizer tensor `(member,)` that counts a parameter's own steps


class Options(Protocol):
    """Choices that change which terms an update has."""

    @property
    def flags(self) -> Mapping[str, bool]:
        """Return the algorithm's own switches, such as `nesterov` and `amsgrad`."""
        ...

    @property
    def unused(self) -> frozenset[str]:
        """Return the hyperparameters that are 0 for every member. Their terms and tensors are left out."""
        ...


_Hyper = Mapping[str, Tensor]
_Tensors = Mapping[str, Tensor]
_Updated = tuple[Tensor, dict[str, Tensor]]


def _sgd_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    # As in torch: no dampening without momentum, nor in the first step, where the buffer is the gradient itself.
    undamped = (hyper["momentum"] == 0) | (step == 1)
    return {
        "step_size": -hyper["lr"],
        "momentum": hyper["momentum"],
        "grad_weight": torch.where(undamped, 1.0, 1 - hyper["dampening"]),
    }


def _sgd(options: Options, param: Tensor, grad: Tensor, tensors: _Tensors, c: Coefficients) -> _Updated:
    if "momentum" in options.unused:
        return c.plus_scaled(param, grad, "step_size"), {}
    weight = None if "dampening" in options.unused else "grad_weight"
    buffer = c.decayed(tensors["momentum_buffer"], "momentum", grad, weight)
    direction = c.plus_scaled(grad, buffer, "momentum") if options.flags["nesterov"] else buffer
    return c.plus_scaled(param, direction, "step_size"), {"momentum_buffer": buffer}


def _moments(hyper: _Hyper) -> dict[str, Tensor]:
    return {
        "grad_weight": 1 - hyper["beta1"],
        "beta2": hyper["beta2"],
        "square_weight": 1 - hyper["beta2"],
        "eps": hyper["eps"],
    }


def _adam_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    return _moments(hyper) | {
        "step_size": -(hyper["lr"] / (1 - hyper["beta1"] ** step)),
        "correction": (1 - hyper["beta2"] ** step).sqrt(),
    }


def _adam(options: Options, param: Tensor, grad: Tensor, tensors: _Tensors, c: Coefficients) -> _Updated:
    average = c.lerp(tensors["exp_avg"], grad, "grad_weight")
    square = c.square_average(tensors["exp_avg_sq"], grad, "beta2", "square_weight")
    after = {"exp_avg": average, "exp_avg_sq": square}
    if options.flags["amsgrad"]:
        square = after["max_exp_avg_sq"] = torch.maximum(tensors["max_exp_avg_sq"], square)
    denominator = c.plus(c.over(square.sqrt(), "correction"), "eps")
    return c.plus_ratio(param, average, denominator, "step_size"), after


def _rmsprop_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    return {
        "step_size": -hyper["lr"],
        "alpha": hyper["alpha"],
        "weight": 1 - hyper["alpha"],
        "eps": hyper["eps"],
        "momentum": hyper["momentum"],
    }


def _rmsprop(options: Options, param: Tensor, grad: Tensor, tensors: _Tensors, c: Coefficients) -> _Updated:
    square = c.square_average(tensors["square_avg"], grad, "alpha", "weight")
    after = {"square_avg": square}
    if options.flags["centered"]:
        average = after["grad_avg"] = c.lerp(tensors["grad_avg"], grad, "weight")
        square = torch.addcmul(square, average, average, value=-1)
    denominator = c.plus(square.sqrt(), "eps")
    plain = c.plus_ratio(param, grad, denominator, "step_size")
    if "momentum" in options.unused:
        return plain, after
    buffer = torch.addcdiv(c.times(tensors["momentum_buffer"], "momentum"), grad, denominator)
    after["momentum_buffer"] = buffer
    # A member without momentum rounds as torch does without it.
    return torch.where(c["momentum"] > 0, c.plus_scaled(param, buffer, "step_size"), plain), after


def _adagrad_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    return {"step_size": -(hyper["lr"] / (1 + (step - 1) * hyper["lr_decay"])), "eps": hyper["eps"]}


def _adagrad(options: Options, param: Tensor, grad: Tensor, tensors: _Tensors, c: Coefficients) -> _Updated:
    total = torch.addcmul(tensors["sum"], grad, grad)
    return c.plus_ratio(param, grad, c.plus(total.sqrt(), "eps"), "step_size"), {"sum": total}


def _initial_sum(param: Tensor, hyper: _Hyper) -> Tensor:
    total = torch.zeros_like(param)
    parts = pairs(total)
    parts += one_per_member(hyper["initial_accumulator_value"], parts.dtype, parts.dim())
    return total


def _adadelta_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    return {"step_size": -hyper["lr"], "rho": hyper["rho"], "weight": 1 - hyper["rho"], "eps": hyper["eps"]}


def _adadelta(options: Options, param: Tensor, grad: Tensor, tensors: _Tensors, c: Coefficients) -> _Updated:
    square = c.square_average(tensors["square_avg"], grad, "rho", "weight")
    delta = c.plus(tensors["acc_delta"], "eps").sqrt() / c.plus(square, "eps").sqrt() * grad
    accumulated = c.square_average(tensors["acc_delta"], delta, "rho", "weight")
    return c.plus_scaled(param, delta, "step_size"), {"square_avg": square, "acc_delta": accumulated}


def _nadam_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    def momentum(at: Tensor) -> Tensor:
        return hyper["beta1"] * (1 - 0.5 * 0.96 ** (at * hyper["momentum_decay"]))

    return _moments(hyper) | {
        "lr": hyper["lr"],
        "mu": momentum(step),
        "mu_next": momentum(step + 1),
        "correction": 1 - hyper["beta2"] ** step,
    }


def _nadam(options: Options, param: Tensor, grad: Tensor, tensors: _Tensors, c: Coefficients) -> _Updated:
    lr, mu, mu_next = (c.coefficients[name] for name in ("lr", "mu", "mu_next"))
    product = tensors["mu_product"] * mu.to(tensors["mu_product"].dtype)
    so_far = product.to(mu.dtype)
    average = c.lerp(tensors["exp_avg"], grad, "grad_weight")
    square = c.square_average(tensors["exp_avg_sq"], grad, "beta2", "square_weight")
    denominator = c.plus(c.over(square, "correction").sqrt(), "eps")
    param = c.plus_ratio(param, grad, denominator, -lr * (1 - mu) / (1 - so_far))
    param = c.plus_ratio(param, average, denominator, -lr * mu_next / (1 - so_far * mu_next))
    return param, {"exp_avg": average, "exp_avg_sq": square, "mu_product": product}


def _initial_product(param: Tensor, hyper: _Hyper) -> Tensor:
    # One running product per member, rounded as torch rounds it.
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return torch.ones(len(param), dtype=dtype, device=param.device)


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
        "rectified": rectified.to(step.dtype),
        "rectification": torch.where(rectified, ratio, 1.0).sqrt(),
    }


def _radam(options: Options, param: Tensor, grad: Tensor, tensors: _Tensors, c: Coefficients) -> _Updated:
    average = c.lerp(tensors["exp_avg"], grad, "grad_weight")
    square = c.square_average(tensors["exp_avg_sq"], grad, "beta2", "square_weight")
    plain = c.times(c.over(average, "correction"), "lr")
    # torch divides a number by a tensor as `reciprocal() * number`.
    adaptive = c.times(c.plus(square.sqrt(), "eps").reciprocal(), "root_correction")
    adapted = c.times(plain * adaptive, "rectification")
    param = param - torch.where(c["rectified"] > 0, adapted, plain)
    return param, {"exp_avg": average, "exp_avg_sq": square}


def _adamax_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    return _moments(hyper) | {"step_size": -(hyper["lr"] / (1 - hyper["beta1"] ** step))}


def _adamax(options: Options, param: Tensor, grad: Tensor, tensors: _Tensors, c: Coefficients) -> _Updated:
    average = c.lerp(tensors["exp_avg"], grad, "grad_weight")
    largest = torch.maximum(c.times(tensors["exp_inf"], "beta2"), c.plus(grad.abs(), "eps"))
    return c.plus_ratio(param, average, largest, "step_size"), {"exp_avg": average, "exp_inf": largest}


def _lion_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    return {
        "step_size": -hyper["lr"],
        "beta1": hyper["beta1"],
        "grad_weight": 1 - hyper["beta1"],
        "beta2": hyper["beta2"],
        "average_weight": 1 - hyper["beta2"],
    }


def _lion(options: Options, param: Tensor, grad: Tensor, tensors: _Tensors, c: Coefficients) -> _Updated:
    average = tensors["exp_avg"]
    direction = (c.times(average, "beta1") + c.times(grad, "grad_weight")).sign()
    average = c.times(average, "beta2") + c.times(grad, "average_weight")
    return c.plus_scaled(param, direction, "step_size"), {"exp_avg": average}


@dataclass(frozen=True)
class Algorithm:
    """Update rule: coefficients of a step from the hyperparameters, and the update that uses them."""

    torch_class: type[torch.optim.Optimizer] | None
    coefficients: Callable[[_Hyper, Tensor], dict[str, Tensor]]
    update: Callable[[Options, Tensor, Tensor, _Tensors, Coefficients], _Updated]
    tensor_names: Callable[[Options], tuple[str, ...]]
    """Names of the state tensors that each parameter has, as in `torch.optim`'s state."""
    defaults: Mapping[str, Any]
    flags: Mapping[str, bool]
    counts: Callable[[Options], bool] = lambda options: True
    """Return True if the coefficients depend on how many steps a parameter has taken."""
    decoupled: bool = False
    """True if weight decay always shrinks the parameter instead of adding to the gradient."""
    precise: frozenset[str] = frozenset()
    """Coefficients that `update` uses in float64, whatever the parameter's dtype."""
    initial: Mapping[str, Callable[[Tensor, _Hyper], Tensor]] = field(default_factory=dict)
    """State tensors of a parameter that do not begin as zeros of its shape, by name."""


def _tensor_names(*always: str, **when: str) -> Callable[[Options], tuple[str, ...]]:
    """Return a function that names an optimizer's tensors: `always`, and `when` an option is used."""

    def tensor_names(options: Options) -> tuple[str, ...]:
        used = (tensor for name, tensor in when.items() if options.flags.get(name, name not in options.unused))
        return (*always, *used)

    return tensor_names


def _never_counts(options: Options) -> bool:
    return False


def _sgd_tensor_names(options: Options) -> tuple[str, ...]:
    # torch counts no steps for SGD, but has no buffer before a parameter's first step. Here that is a count of 0.
    return () if "momentum" in options.unused else (STEP, "momentum_buffer")


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}
_MAXIMIZE = {"maximize": False}
_ADAM_TENSOR_NAMES = _tensor_names(STEP, "exp_avg", "exp_avg_sq", amsgrad="max_exp_avg_sq")

ALGORITHMS: Mapping[str, Algorithm] = {
    "sgd": Algorithm(
        torch.optim.SGD,
        _sgd_coefficients,
        _sgd,
        _sgd_tensor_names,
        {"lr": 1e-3, "momentum": 0, "dampening": 0, "weight_decay": 0},
        {"nesterov": False} | _MAXIMIZE,
        lambda options: not {"momentum", "dampening"} & options.unused,
    ),
    "adam": Algorithm(
        torch.optim.Adam,
        _adam_coefficients,
        _adam,
        _ADAM_TENSOR_NAMES,
        _ADAM,
        {"amsgrad": False, "decoupled_weight_decay": False} | _MAXIMIZE,
    ),
    "adamw": Algorithm(
        torch.optim.AdamW,
        _adam_coefficients,
        _adam,
        _ADAM_TENSOR_NAMES,
        _ADAM | {"weight_decay": 1e-2},
        {"amsgrad": False} | _MAXIMIZE,
        decoupled=True,
    ),
    "rmsprop": Algorithm(
        torch.optim.RMSprop,
        _rmsprop_coefficients,
        _rmsprop,
        _tensor_names(STEP, "square_avg", momentum="momentum_buffer", centered="grad_avg"),
        {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0, "momentum": 0},
        {"centered": False} | _MAXIMIZE,
        _never_counts,
    ),
    "adagrad": Algorithm(
        torch.optim.Adagrad,
        _adagrad_coefficients,
        _adagrad,
        _tensor_names(STEP, "sum"),
        {"lr": 1e-2, "lr_decay": 0, "weight_decay": 0, "initial_accumulator_value": 0, "eps": 1e-10},
        _MAXIMIZE,
        initial={"sum": _initial_sum},
    ),
    "adadelta": Algorithm(
        torch.optim.Adadelta,
        _adadelta_coefficients,
        _adadelta,
        _tensor_names(STEP, "square_avg", "acc_delta"),
        {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0},
        _MAXIMIZE,
        _never_counts,
    ),
    "nadam": Algorithm(
        torch.optim.NAdam,
        _nadam_coefficients,
        _nadam,
        _tensor_names(STEP, "exp_avg", "exp_avg_sq", "mu_product"),
        _ADAM | {"lr": 2e-3, "momentum_decay": 4e-3},
        {"decoupled_weight_decay": False} | _MAXIMIZE,
        precise=frozenset({"lr", "mu", "mu_next"}),
        initial={"mu_product": _initial_product},
    ),
    "radam": Algorithm(
        torch.optim.RAdam,
        _radam_coefficients,
        _radam,
        _tensor_names(STEP, "exp_avg", "exp_avg_sq"),
        _ADAM,
        {"decoupled_weight_decay": False} | _MAXIMIZE,
    ),
    "adamax": Algorithm(
        torch.optim.Adamax,
        _adamax_coefficients,
        _adamax,
        _tensor_names(STEP, "exp_avg", "exp_inf"),
        _ADAM | {"lr": 2e-3},
        _MAXIMIZE,
    ),
    "lion": Algorithm(
        None,
        _lion_coefficients,
        _lion,
        _tensor_names("exp_avg"),
        {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0},
        _MAXIMIZE,
        _never_counts,
        decoupled=True,
    ),
}
