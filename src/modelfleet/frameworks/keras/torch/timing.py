"""Programs that are timed when a Keras model is cut into stages."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def timed_programs(
    compute: Callable[[Sequence[Tensor]], Tensor], values: Sequence[Tensor]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions: one computes a number from values, the other its gradients, too. Both wait for it."""
    own = [value.detach().requires_grad_() for value in values]

    def forward() -> None:
        compute(own).item()

    def both() -> None:
        for part in torch.autograd.grad(compute(own), own, allow_unused=True):
            if part is not None:
                part.sum().item()

    return forward, both
