"""Optimizers on stacked parameters: every member has its own value of every hyperparameter.

Each agrees with the `torch.optim` class of its name, step by step. All is elementwise on `(member, …)`
tensors. What is one number per member and step (bias corrections and the like) is computed in float64, since
`1 - 0.999**t` in float32 is off by 6e-5, and only then cast to what the parameter's operations compute in: float32
for bfloat16 and float16, as torch does with a Python number. Complex parameters are pairs of real numbers.

Steps are counted per parameter, in the slot `step`, as torch counts them: one that was frozen, or takes no part in
a step, does not count it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelfleet.frameworks.torch.state import exact

STEP = "step"  # the slot `(member,)` that counts a parameter's own steps
PER_MEMBER = frozenset({STEP, "mu_product"})  # the slots that are one number per member, not one per weight


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
        return ALGORITHMS[self.name].defaults

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the state tensors that each parameter has, as in `torch.optim`'s state."""
        return ALGORITHMS[self.name].slots(self)

    @property
    def torch_class(self) -> type[torch.optim.Optimizer] | None:
        """The class of `torch.optim` that this agrees with; None for Lion, which torch does not have."""
        return ALGORITHMS[self.name].torch_class

    @property
    def decoupled(self) -> bool:
        """Whether weight decay shrinks the parameter, instead of adding to the gradient."""
        return self.name in ("adamw", "lion") or self.flags.get("decoupled_weight_decay", False)

    @property
    def counts(self) -> bool:
        """Whether a step's numbers depend on how many steps a parameter has taken."""
        return ALGORITHMS[self.name].counts(self)

    @property
    def precise(self) -> frozenset[str]:
        """The coefficients that `apply` computes with in float64, whatever the parameter's dtype."""
        return frozenset({"lr", "mu", "mu_next"}) if self.name == "nadam" else frozenset()

    def initial(self, param: Tensor, hyper: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The slots of one parameter `(member, …)` before its first step."""
        slots = {name: torch.zeros_like(param) for name in self.slots}
        if "sum" in slots:
            parts = pairs(slots["sum"])
            parts += _wide(hyper["initial_accumulator_value"], parts.dtype, parts.dim())
        if "mu_product" in slots:  # one running number per member, rounded as torch rounds it
            dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
            slots["mu_product"] = torch.ones(len(param), dtype=dtype, device=param.device)
        if STEP in slots:
            slots[STEP] = torch.zeros(len(param), dtype=exact(param.device), device=param.device)
        return slots

    def coefficients(self, hyper: Mapping[str, Tensor], step: Tensor) -> dict[str, Tensor]:
        """The numbers of this step for `apply`, each `(member,)` in float64; `step` counts from 1.

        `step` may have more axes before the member's: several steps, or parameters with counts of their own.
        """
        values = ALGORITHMS[self.name].coefficients(hyper, step)
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
        paired = param.is_complex()
        if paired:
            param, grad = pairs(param), pairs(grad)
            slots = {name: pairs(slot) if slot.is_complex() else slot for name, slot in slots.items()}
        c = _Numbers(coefficients, param)
        if self.flags.get("maximize", False):
            grad = -grad
        if "weight_decay" not in self.unused:
            if self.decoupled:
                param = c.times(param, "shrink")
            else:
                grad = c.plus_scaled(grad, param, "weight_decay")
        param, after = ALGORITHMS[self.name].update(self, param, grad, slots, c)
        if STEP in slots:
            after[STEP] = slots[STEP] + 1
        if paired:
            param = torch.view_as_complex(param.contiguous())
            after = {
                name: torch.view_as_complex(slot.contiguous()) if slot.dim() == grad.dim() else slot
                for name, slot in after.items()
            }
        return param, after


class _Numbers:
    """A step's coefficients, and torch's operations between a tensor and a Python number with them.

    Such an operation computes in the tensor's own dtype, or in float32 if that is narrower, and rounds its result
    once. `c["beta2"]` is the number of each member, in that dtype and of shape `(member, 1, …, 1)`.
    """

    def __init__(self, coefficients: Mapping[str, Tensor], param: Tensor) -> None:
        self.coefficients = coefficients
        self.dtype = param.dtype
        self.computes = computing(param.dtype)
        self.narrow = self.computes != param.dtype
        self._axes = param.dim()
        self._rounds_addends = self.narrow and param.device.type == "cpu"

    def __getitem__(self, name: str) -> Tensor:
        return _wide(self.coefficients[name], self.computes, self._axes)

    def wide(self, value: Tensor) -> Tensor:
        """Numbers `(member,)` as `c[…]` gives them."""
        return _wide(value, self.computes, self._axes)

    def up(self, tensor: Tensor) -> Tensor:
        """A tensor in the dtype that is computed in."""
        return tensor.to(self.computes)

    def down(self, tensor: Tensor) -> Tensor:
        """A result, rounded to the parameter's dtype."""
        return tensor.to(self.dtype)

    def times(self, tensor: Tensor, name: str) -> Tensor:
        """`tensor * number`."""
        return self.down(self.up(tensor) * self[name])

    def over(self, tensor: Tensor, name: str) -> Tensor:
        """`tensor / number`."""
        return self.down(self.up(tensor) / self[name])

    def plus(self, tensor: Tensor, name: str) -> Tensor:
        """`tensor + number`."""
        return self.down(self.up(tensor) + self._addend(name))

    def plus_scaled(self, tensor: Tensor, other: Tensor, name: str) -> Tensor:
        """`tensor.add(other, alpha=number)`."""
        return self.down(torch.addcmul(self.up(tensor), self.up(other), self._addend(name)))

    def lerp(self, start: Tensor, end: Tensor, name: str) -> Tensor:
        """`start.lerp(end, number)`."""
        return self.down(torch.lerp(self.up(start), self.up(end), self[name]))

    def plus_product(self, tensor: Tensor, first: Tensor, second: Tensor, name: str) -> Tensor:
        """`tensor.addcmul(first, second, value=number)`."""
        return self.down(torch.addcmul(self.up(tensor), self.up(first) * self[name], self.up(second)))

    def plus_ratio(self, tensor: Tensor, first: Tensor, second: Tensor, number: str | Tensor) -> Tensor:
        """`tensor.addcdiv(first, second, value=number)`."""
        value = self[number] if isinstance(number, str) else self.wide(number)
        return self.down(torch.addcdiv(self.up(tensor), self.up(first) * value, self.up(second)))

    def decayed(self, tensor: Tensor, name: str, added: Tensor, weight: str | None = None) -> Tensor:
        """`tensor.mul(number).add(added, alpha=weight)`."""
        if self.narrow:
            tensor = self.times(tensor, name)
            return tensor + added if weight is None else self.plus_scaled(tensor, added, weight)
        return torch.addcmul(added if weight is None else added * self[weight], tensor, self[name])

    def _addend(self, name: str) -> Tensor:
        # On the CPU, `add` alone rounds a Python number, and its alpha, to the tensor's own dtype.
        return self.up(self.down(self[name])) if self._rounds_addends else self[name]

    def square_average(self, average: Tensor, grad: Tensor, decay: str, weight: str) -> Tensor:
        """`average.mul(decay).addcmul(grad, grad, value=weight)`."""
        return self.plus_product(self.times(average, decay), grad, grad, weight)


def computing(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which operations on this one compute: float32 for narrower ones, a complex one's parts."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def pairs(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, a view; a real one as it is."""
    return torch.view_as_real(tensor.resolve_conj().resolve_neg()) if tensor.is_complex() else tensor


def _wide(value: Tensor, dtype: torch.dtype, axes: int) -> Tensor:
    return value.to(dtype).reshape(-1, *[1] * (axes - 1))


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


def _sgd(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Numbers) -> _Updated:
    if "momentum" in optimizer.unused:
        return c.plus_scaled(param, grad, "step_size"), {}
    weight = None if "dampening" in optimizer.unused else "grad_weight"
    buffer = c.decayed(slots["momentum_buffer"], "momentum", grad, weight)
    direction = c.plus_scaled(grad, buffer, "momentum") if optimizer.flags["nesterov"] else buffer
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


def _adam(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Numbers) -> _Updated:
    average = c.lerp(slots["exp_avg"], grad, "grad_weight")
    square = c.square_average(slots["exp_avg_sq"], grad, "beta2", "square_weight")
    after = {"exp_avg": average, "exp_avg_sq": square}
    if optimizer.flags["amsgrad"]:
        square = after["max_exp_avg_sq"] = torch.maximum(slots["max_exp_avg_sq"], square)
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


def _rmsprop(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Numbers) -> _Updated:
    square = c.square_average(slots["square_avg"], grad, "alpha", "weight")
    after = {"square_avg": square}
    if optimizer.flags["centered"]:
        average = after["grad_avg"] = c.lerp(slots["grad_avg"], grad, "weight")
        square = torch.addcmul(square, average, average, value=-1)
    denominator = c.plus(square.sqrt(), "eps")
    plain = c.plus_ratio(param, grad, denominator, "step_size")
    if "momentum" in optimizer.unused:
        return plain, after
    buffer = torch.addcdiv(c.times(slots["momentum_buffer"], "momentum"), grad, denominator)
    after["momentum_buffer"] = buffer
    # A member without momentum rounds as torch does without it.
    return torch.where(c["momentum"] > 0, c.plus_scaled(param, buffer, "step_size"), plain), after


def _adagrad_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    return {"step_size": -(hyper["lr"] / (1 + (step - 1) * hyper["lr_decay"])), "eps": hyper["eps"]}


def _adagrad(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Numbers) -> _Updated:
    total = torch.addcmul(slots["sum"], grad, grad)
    return c.plus_ratio(param, grad, c.plus(total.sqrt(), "eps"), "step_size"), {"sum": total}


def _adadelta_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    return {"step_size": -hyper["lr"], "rho": hyper["rho"], "weight": 1 - hyper["rho"], "eps": hyper["eps"]}


def _adadelta(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Numbers) -> _Updated:
    square = c.square_average(slots["square_avg"], grad, "rho", "weight")
    delta = c.plus(slots["acc_delta"], "eps").sqrt() / c.plus(square, "eps").sqrt() * grad
    accumulated = c.square_average(slots["acc_delta"], delta, "rho", "weight")
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


def _nadam(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Numbers) -> _Updated:
    lr, mu, mu_next = (c.coefficients[name] for name in ("lr", "mu", "mu_next"))
    product = slots["mu_product"] * mu.to(slots["mu_product"].dtype)
    so_far = product.to(mu.dtype)
    average = c.lerp(slots["exp_avg"], grad, "grad_weight")
    square = c.square_average(slots["exp_avg_sq"], grad, "beta2", "square_weight")
    denominator = c.plus(c.over(square, "correction").sqrt(), "eps")
    param = c.plus_ratio(param, grad, denominator, -lr * (1 - mu) / (1 - so_far))
    param = c.plus_ratio(param, average, denominator, -lr * mu_next / (1 - so_far * mu_next))
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
        "rectified": rectified.to(step.dtype),
        "rectification": torch.where(rectified, ratio, 1.0).sqrt(),
    }


def _radam(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Numbers) -> _Updated:
    average = c.lerp(slots["exp_avg"], grad, "grad_weight")
    square = c.square_average(slots["exp_avg_sq"], grad, "beta2", "square_weight")
    plain = c.times(c.over(average, "correction"), "lr")
    # torch divides a number by a tensor as `reciprocal() * number`.
    adaptive = c.times(c.plus(square.sqrt(), "eps").reciprocal(), "root_correction")
    adapted = c.times(plain * adaptive, "rectification")
    param = param - torch.where(c["rectified"] > 0, adapted, plain)
    return param, {"exp_avg": average, "exp_avg_sq": square}


def _adamax_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    return _moments(hyper) | {"step_size": -(hyper["lr"] / (1 - hyper["beta1"] ** step))}


def _adamax(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Numbers) -> _Updated:
    average = c.lerp(slots["exp_avg"], grad, "grad_weight")
    largest = torch.maximum(c.times(slots["exp_inf"], "beta2"), c.plus(grad.abs(), "eps"))
    return c.plus_ratio(param, average, largest, "step_size"), {"exp_avg": average, "exp_inf": largest}


def _lion_coefficients(hyper: _Hyper, step: Tensor) -> dict[str, Tensor]:
    return {
        "step_size": -hyper["lr"],
        "beta1": hyper["beta1"],
        "grad_weight": 1 - hyper["beta1"],
        "beta2": hyper["beta2"],
        "average_weight": 1 - hyper["beta2"],
    }


def _lion(optimizer: Optimizer, param: Tensor, grad: Tensor, slots: _Slots, c: _Numbers) -> _Updated:
    average = slots["exp_avg"]
    direction = (c.times(average, "beta1") + c.times(grad, "grad_weight")).sign()
    average = c.times(average, "beta2") + c.times(grad, "average_weight")
    return c.plus_scaled(param, direction, "step_size"), {"exp_avg": average}


@dataclass(frozen=True)
class _Algorithm:
    torch_class: type[torch.optim.Optimizer] | None
    coefficients: Callable[[_Hyper, Tensor], dict[str, Tensor]]
    update: Callable[[Optimizer, Tensor, Tensor, _Slots, _Numbers], _Updated]
    slots: Callable[[Optimizer], tuple[str, ...]]
    defaults: Mapping[str, Any]
    flags: Mapping[str, bool]
    counts: Callable[[Optimizer], bool] = lambda optimizer: True


def _keeps(*always: str, **when: str) -> Callable[[Optimizer], tuple[str, ...]]:
    """The slots `always` kept, and those kept `when` a flag is set or a hyperparameter is in use."""

    def slots(optimizer: Optimizer) -> tuple[str, ...]:
        used = (slot for name, slot in when.items() if optimizer.flags.get(name, name not in optimizer.unused))
        return (*always, *used)

    return slots


def _never(optimizer: Optimizer) -> bool:
    return False


def _keeps_momentum(optimizer: Optimizer) -> tuple[str, ...]:
    # torch has no count for SGD, but no buffer either before a parameter's first step: here that is a count of 0.
    return () if "momentum" in optimizer.unused else (STEP, "momentum_buffer")


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}
_MAXIMIZE = {"maximize": False}
_ADAM_SLOTS = _keeps(STEP, "exp_avg", "exp_avg_sq", amsgrad="max_exp_avg_sq")

ALGORITHMS: Mapping[str, _Algorithm] = {
    "sgd": _Algorithm(
        torch.optim.SGD,
        _sgd_coefficients,
        _sgd,
        _keeps_momentum,
        {"lr": 1e-3, "momentum": 0, "dampening": 0, "weight_decay": 0},
        {"nesterov": False} | _MAXIMIZE,
        lambda optimizer: not {"momentum", "dampening"} & optimizer.unused,
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
        _keeps(STEP, "square_avg", momentum="momentum_buffer", centered="grad_avg"),
        {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0, "momentum": 0},
        {"centered": False} | _MAXIMIZE,
        _never,
    ),
    "adagrad": _Algorithm(
        torch.optim.Adagrad,
        _adagrad_coefficients,
        _adagrad,
        _keeps(STEP, "sum"),
        {"lr": 1e-2, "lr_decay": 0, "weight_decay": 0, "initial_accumulator_value": 0, "eps": 1e-10},
        _MAXIMIZE,
    ),
    "adadelta": _Algorithm(
        torch.optim.Adadelta,
        _adadelta_coefficients,
        _adadelta,
        _keeps(STEP, "square_avg", "acc_delta"),
        {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0},
        _MAXIMIZE,
        _never,
    ),
    "nadam": _Algorithm(
        torch.optim.NAdam,
        _nadam_coefficients,
        _nadam,
        _keeps(STEP, "exp_avg", "exp_avg_sq", "mu_product"),
        _ADAM | {"lr": 2e-3, "momentum_decay": 4e-3},
        {"decoupled_weight_decay": False} | _MAXIMIZE,
    ),
    "radam": _Algorithm(
        torch.optim.RAdam,
        _radam_coefficients,
        _radam,
        _keeps(STEP, "exp_avg", "exp_avg_sq"),
        _ADAM,
        {"decoupled_weight_decay": False} | _MAXIMIZE,
    ),
    "adamax": _Algorithm(
        torch.optim.Adamax,
        _adamax_coefficients,
        _adamax,
        _keeps(STEP, "exp_avg", "exp_inf"),
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
        _never,
    ),
}
