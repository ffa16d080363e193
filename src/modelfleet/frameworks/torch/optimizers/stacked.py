"""Optimizers on stacked parameters `(member, …)`: every member has its own value of every hyperparameter.

Complex parameters are updated as pairs of real numbers. Steps are counted per parameter, in the tensor `step`,
as torch counts them: a parameter that is frozen, or takes no part in a step, does not count that step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelfleet.frameworks.torch.fused.state import exact
from modelfleet.frameworks.torch.optimizers.coefficients import Coefficients, pairs
from modelfleet.frameworks.torch.optimizers.rules import ALGORITHMS, STEP


@dataclass(frozen=True)
class Optimizer:
    """Update rule for stacked parameters, with pure functions: `initial`, `coefficients` and `apply`.

    `flags` change the algorithm rather than a number (`nesterov`, `amsgrad`, …). `unused` names the
    hyperparameters that are 0 for every member. Their terms and tensors are left out.
    """

    name: str
    flags: Mapping[str, bool]
    unused: frozenset[str] = frozenset()

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Return the numeric hyperparameters by torch's names, with torch's defaults."""
        return ALGORITHMS[self.name].defaults

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Return the names of the state tensors that each parameter has, as in `torch.optim`'s state."""
        return ALGORITHMS[self.name].tensor_names(self)

    @property
    def torch_class(self) -> type[torch.optim.Optimizer] | None:
        """Return the class of `torch.optim` that this optimizer agrees with; None for Lion, which torch lacks."""
        return ALGORITHMS[self.name].torch_class

    @property
    def decoupled(self) -> bool:
        """Return True if weight decay shrinks the parameter instead of adding to the gradient."""
        return ALGORITHMS[self.name].decoupled or self.flags.get("decoupled_weight_decay", False)

    @property
    def counts(self) -> bool:
        """Return True if a step's coefficients depend on how many steps a parameter has taken."""
        return ALGORITHMS[self.name].counts(self)

    @property
    def precise(self) -> frozenset[str]:
        """Return the coefficients that `apply` uses in float64, whatever the parameter's dtype."""
        return ALGORITHMS[self.name].precise

    def initial(self, param: Tensor, hyper: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state tensors of one parameter `(member, …)` before its first step."""
        special = ALGORITHMS[self.name].initial
        tensors = {
            name: special[name](param, hyper) if name in special else torch.zeros_like(param)
            for name in self.tensor_names
        }
        if STEP in tensors:
            tensors[STEP] = torch.zeros(len(param), dtype=exact(param.device), device=param.device)
        return tensors

    def coefficients(self, hyper: Mapping[str, Tensor], step: Tensor) -> dict[str, Tensor]:
        """Return the coefficients of a step for `apply`, each `(member,)` in float64. `step` counts from 1.

        `step` may have axes before the member's: for several steps, or for parameters with different counts.
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
        self, param: Tensor, grad: Tensor, tensors: Mapping[str, Tensor], coefficients: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a parameter `(member, …)` and its state tensors after one step."""
        is_complex = param.is_complex()
        if is_complex:
            param, grad = pairs(param), pairs(grad)
            tensors = {name: pairs(own) if own.is_complex() else own for name, own in tensors.items()}
        c = Coefficients(coefficients, param)
        if self.flags.get("maximize", False):
            grad = -grad
        if "weight_decay" not in self.unused:
            if self.decoupled:
                param = c.times(param, "shrink")
            else:
                grad = c.plus_scaled(grad, param, "weight_decay")
        param, after = ALGORITHMS[self.name].update(self, param, grad, tensors, c)
        if STEP in tensors:
            after[STEP] = tensors[STEP] + 1
        if is_complex:
            param = torch.view_as_complex(param.contiguous())
            after = {
                name: torch.view_as_complex(own.contiguous()) if own.dim() == grad.dim() else own
                for name, own in after.items()
            }
        return param, after
