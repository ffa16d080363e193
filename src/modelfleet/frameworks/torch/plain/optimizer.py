"""A real `torch.optim` optimizer for one member, and its state in the form that fused lanes have.

Fused lanes keep `{tensor name: {parameter: (member, …)}}`, with zeros for a parameter that has not been stepped.
torch makes the state of a parameter at its first step.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelfleet.frameworks.torch.optimizers.hyperparameters import flat_names
from modelfleet.frameworks.torch.optimizers.rules import STEP
from modelfleet.frameworks.torch.optimizers.stacked import Optimizer

StateByName = dict[str, dict[str, Tensor]]
MAX_JOINED = 1 << 17  # numbers; joining more of them takes longer than it saves


class Lion(torch.optim.Optimizer):
    """Lion as in its paper (Chen et al. 2023, algorithm 2), which torch does not have."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"], state["exp_avg"] = torch.tensor(0.0), torch.zeros_like(parameter)
                state["step"] += 1
                gradient = -parameter.grad if group["maximize"] else parameter.grad
                average = state["exp_avg"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                direction = average.mul(beta1).add_(gradient, alpha=1 - beta1)
                if parameter.is_complex():  # as pairs of numbers, as torch's adaptive optimizers take them
                    sign = torch.view_as_complex(torch.view_as_real(direction).sign())
                else:
                    sign = direction.sign()
                parameter.add_(sign, alpha=-group["lr"])
                average.mul_(beta2).add_(gradient, alpha=1 - beta2)


NOT_IN_TORCH: dict[str, type[torch.optim.Optimizer]] = {"lion": Lion}
"""Classes of the algorithms that torch does not have."""
FUSED = (torch.optim.Adam, torch.optim.AdamW)  # with one call for all parameters on the CPU: a third of the time


def make(
    optimizer: Optimizer, params: Iterable[nn.Parameter], hyper: Mapping[str, float]
) -> torch.optim.Optimizer:
    """Return the torch optimizer that `optimizer` stands for, over all of `params`.

    Its steps skip parameters that take no gradient. They may take one later.
    """
    # torch refuses an optimizer without parameters, which a stage of a chain such as nn.ReLU() would have.
    params = list(params) or [nn.Parameter(torch.empty(0))]
    chosen = optimizer.torch_class or NOT_IN_TORCH[optimizer.name]
    fused = {"fused": True} if chosen in FUSED and all(_can_fuse(parameter) for parameter in params) else {}
    return chosen(params, **settings(optimizer, hyper), **optimizer.flags, **fused)  # pyrefly: ignore


def _can_fuse(parameter: nn.Parameter) -> bool:
    # For narrower types, torch's fused update rounds once where its other updates round several times.
    return (
        parameter.device.type == "cpu"
        and parameter.dtype in (torch.float32, torch.float64)
        and parameter.is_contiguous()
    )


def step(made: torch.optim.Optimizer, params: Iterable[nn.Parameter]) -> None:
    """Take a step of an optimizer that `make` returned for these parameters."""
    (group,) = made.param_groups
    if not group.get("fused"):
        made.step()
        return
    stepped: list[Tensor] = [parameter for parameter in params if parameter.grad is not None]
    gradients: list[Any] = [parameter.grad for parameter in stepped]
    # torch 2.13's fused updates do not look at strides: with a gradient of another layout they mix up its numbers.
    if not all(t.layout is torch.strided and t.is_contiguous() for t in (*stepped, *gradients)):
        group["fused"] = False
    states = [made.state[parameter] for parameter in stepped] if group["fused"] and not group["amsgrad"] else [{}]
    # The first step of a parameter makes its state. Without any gradient, there is nothing to update.
    if not states or not all(states):
        made.step()
        return
    # What `made.step` does, without the Python around it, which takes longer than the update of a small model.
    counts = [state["step"] for state in states]
    fused = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    with torch.no_grad():
        torch._foreach_add_(counts, 1)
        fused(
            stepped,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            counts,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=group["maximize"],
        )


def settings(optimizer: Optimizer, hyper: Mapping[str, float]) -> dict[str, float | tuple[float, ...]]:
    """Return a member's hyperparameters by torch's names: `beta1` and `beta2` as `betas`."""
    found: dict[str, float | tuple[float, ...]] = {}
    for name in optimizer.defaults:
        values = tuple(hyper[flat] for flat in flat_names(name))
        found[name] = values if len(values) > 1 else values[0]
    return found


def read_state(
    optimizer: Optimizer, made: torch.optim.Optimizer, params: Mapping[str, Tensor], hyper: Mapping[str, Tensor]
) -> StateByName:
    """Return the state of some parameters by tensor name, `(1, …)` each.

    It shares the memory of the state there is.
    """
    found: StateByName = {key: {} for key in optimizer.tensor_names}
    for name, parameter in params.items():
        state = made.state.get(parameter) or {}
        initial = optimizer.initial(parameter.detach().unsqueeze(0), hyper)
        step = _steps(state)
        for key, fresh in initial.items():
            value = torch.tensor(step) if key == STEP else state.get(key) if step else None
            found[key][name] = fresh if value is None else torch.as_tensor(value).unsqueeze(0).to(fresh)
    return found


def write_state(
    made: torch.optim.Optimizer, parameter: nn.Parameter, given: Mapping[str, Tensor], steps: float
) -> None:
    """Give a parameter a copy of the state that `read_state` returned for it, without the member axis.

    `steps` is the number of steps that the member has taken. It is used if the optimizer keeps no count.
    """
    count = float(given.get(STEP, steps))
    if not count and "sum" not in made.state.get(parameter, {}):  # Adagrad makes its state before the first step
        made.state.pop(parameter, None)
        return
    state = {key: _copy_like(parameter, value.detach()) for key, value in given.items() if key != STEP}
    if not isinstance(made, torch.optim.SGD):  # SGD keeps no count
        state[STEP] = torch.tensor(count, dtype=torch.get_default_dtype())
    made.state[parameter] = state


def _copy_like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return a copy of a tensor on the device of a parameter, and in its layout if it has the same shape."""
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _steps(state: Mapping[str, Any]) -> float:
    """Return the number of steps that a parameter has taken. SGD does not count: 1 if it has any state."""
    if "step" in state:
        return float(state["step"])
    return 1.0 if any(value is not None for value in state.values()) else 0.0


def finite(gradients: Sequence[Tensor]) -> bool:
    """Return True if all gradients are finite."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault(gradient.dtype, []).append(gradient._values() if gradient.is_sparse else gradient)
    for tensors in kinds.values():
        total = _sum(tensors)
        # A sum may overflow where no term does. Then every number is checked.
        if not math.isfinite(abs(total)) and not all(bool(torch.isfinite(t).all()) for t in tensors):
            return False
    return True


def _sum(tensors: Sequence[Tensor]) -> complex:
    if sum(t.numel() for t in tensors) <= MAX_JOINED:  # one call costs less than one for each
        return torch.cat([t.reshape(-1) for t in tensors]).sum().item()
    return torch.stack([t.sum() for t in tensors]).sum().item()
