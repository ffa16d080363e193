"""Sums over the rows of a batch, packed into two tensors that ranks can add up.

The gradients are `(member, number)`, for all parameters in their order. The columns are `(member, column)`: the
loss's total, its count, the rows, the epoch's sums, and for every parameter 1 if it took part in the loss.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from modelfleet.frameworks.torch.fused.state import exact
from modelfleet.frameworks.torch.fused.updating import flat, per_member
from modelfleet.frameworks.torch.optimizers.coefficients import pairs, widest
from modelfleet.types import State

Tensors = dict[str, Tensor]


def pack(
    state: State, gradients: Tensors, total: Tensor, count: Tensor, sums: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the gradients and the columns of some rows."""
    params = state["params"]
    dtype = widest(params.values())
    all_gradients = [gradients.get(name, torch.zeros_like(p)) for name, p in params.items()]
    numbers = torch.cat([flat(pairs(g)).to(dtype) for g in all_gradients], 1)
    dtype = exact(numbers.device)
    total = total.to(dtype)
    used, unused = torch.ones_like(total), torch.zeros_like(total)
    columns = [total, count, sums["rows"], *(sums[name] for name in _summed(state))]
    columns += [used if name in gradients else unused for name in params]
    return numbers, torch.stack([column.to(dtype) for column in columns], 1)


def zeros(state: State) -> tuple[Tensor, Tensor]:
    """Return the gradients and the columns of no rows."""
    params, seed = state["params"], state["member"]["seed"]
    numbers = sum(pairs(p[0]).numel() for p in params.values())
    columns = 3 + len(_summed(state)) + len(params)
    return (
        torch.zeros(len(seed), numbers, dtype=widest(params.values()), device=seed.device),
        torch.zeros(len(seed), columns, dtype=exact(seed.device), device=seed.device),
    )


def unpack(state: State, numbers: Tensor, columns: Tensor) -> tuple[Tensors, Tensor, Tensors, Tensors]:
    """Return the gradients of the mean loss, the loss, the epoch's sums and the parameters used, for `update`."""
    params = state["params"]
    total, count, rows, *rest = columns.unbind(1)
    loss = total / count
    sums = {**dict(zip(_summed(state), rest, strict=False)), "loss": loss * rows, "rows": rows}
    used = dict(zip(params, (columns[:, -len(params) :] > 0).unbind(1), strict=True))
    parts = (numbers / per_member(count, numbers)).split([pairs(p[0]).numel() for p in params.values()], 1)
    gradients = {name: _shaped(part, p) for (name, p), part in zip(params.items(), parts, strict=True)}
    return gradients, loss, sums, used


def _shaped(numbers: Tensor, parameter: Tensor) -> Tensor:
    """Return numbers `(member, number)` in the shape and dtype of a parameter. A complex parameter has pairs."""
    own = numbers.reshape(pairs(parameter).shape).to(pairs(parameter).dtype)
    return torch.view_as_complex(own) if parameter.is_complex() else own


def _summed(state: State) -> list[str]:
    """Return the names of the epoch's sums that are plain sums over rows."""
    return [name for name in state["sums"] if name not in ("loss", "rows")]
