"""Gradients that replicas of a node sum: which parameters any of them has reached."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Reached:
    """Gradients of a step with, for each parameter, on how many replicas a micro-batch has reached it.

    A parameter that none has reached has no gradient, and its optimizer leaves it as it is, weight decay included.
    """

    def __init__(self) -> None:
        self._params: list[Tensor] = []
        self._counts: Tensor | None = None

    def gradients(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the gradients to be summed in place, zeros for parameters that were not reached here."""
        self._params = [parameter for parameter in params if parameter.requires_grad]
        if not self._params:
            return []
        counts = [float(parameter.grad is not None) for parameter in self._params]
        self._counts = torch.tensor(counts, dtype=torch.float32, device=self._params[0].device)
        found = []
        for parameter in self._params:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:  # each replica has other rows
                parameter.grad = parameter.grad.to_dense()
            found.append(parameter.grad)
        return [*found, self._counts]

    def drop_unreached(self) -> None:
        """Drop the gradients of the parameters that no replica has reached, once all are summed."""
        if self._counts is not None:
            for parameter, count in zip(self._params, self._counts.tolist(), strict=True):
                if not count:
                    parameter.grad = None
        self._params, self._counts = [], None
