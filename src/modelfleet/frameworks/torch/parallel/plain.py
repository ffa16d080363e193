"""Rows of one plain member's batches, divided over several processes, with the gradients summed."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from modelfleet.frameworks.torch.fused.state import exact
from modelfleet.frameworks.torch.parallel.process_group import ProcessGroup
from modelfleet.frameworks.torch.random.operations import DrawFromStreams
from modelfleet.frameworks.torch.random.streams import BatchRows, DrawShapes, Streams
from modelfleet.frameworks.torch.task import Task
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Tree


def backward(
    group: ProcessGroup,
    task: Task,
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    key: tuple[int, int],
    draws: DrawShapes,
    batch: Tree,
    weights: Tensor | None,
    scale: float | None,
) -> tuple[float, dict[str, Tensor | float]]:
    """Give the parameters the gradients of a whole batch, of which this rank computes its own rows.

    Args:
        group: The ranks that compute the batch together.
        task: The member's task.
        model: The member's model.
        params: All parameters of the model by name.
        key: The member's seed and step.
        draws: What the rows of the batch draw.
        batch: The whole batch, `(row, …)`.
        weights: The weights of the rows, or None.
        scale: float16's loss scale, or None.

    Returns:
        The batch's loss, and what it adds to the sums of the epoch. Both are the same on every rank.
    """
    count = len(leaves(batch)[0])
    start, end = group.rows(count)
    idle = start == end  # a rank without rows computes one that does not count, to know the shapes of the sums
    if idle:
        start, end = 0, 1
    own = map_tree(lambda leaf: leaf[start:end], batch)
    weights = None if weights is None else weights[start:end]
    device = next(iter(params.values())).device
    part = BatchRows(torch.tensor(start, device=device), torch.tensor(count, device=device), end - start, draws)
    seed, step = (torch.tensor(number, device=device) for number in key)
    with DrawFromStreams(Streams(seed, step, part)):
        fraction = torch.tensor((end - start) / count, device=device)
        total, counted, sums = task.partial_loss(model, own, weights, fraction)
        # float16's scale is meant for the gradients of the whole batch's mean.
        unit = 1.0 if scale is None else scale * (end - start) / count / max(float(counted), 1.0)
        (total if scale is None else total * unit).backward()

    dtype = exact(device)
    names = [name for name in sums if name not in ("loss", "rows")]
    columns = torch.stack(
        [
            torch.as_tensor(number, device=device).detach().to(dtype)
            for number in (total, counted, sums["rows"], *(sums[name] for name in names))
        ]
        + [torch.tensor(float(p.grad is not None), dtype=dtype, device=device) for p in params.values()]
    )
    dtype = torch.float32
    for parameter in params.values():
        dtype = torch.promote_types(dtype, parameter.dtype)
    flat = torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1).to(dtype)
            for p in params.values()
        ]
    )
    if scale is not None:
        flat /= unit
    if idle:
        columns, flat = torch.zeros_like(columns), torch.zeros_like(flat)
    group.sum([flat, columns])

    total, counted, rows, *rest = columns.tolist()
    used = rest[len(names) :]
    pieces = (flat / counted).split([p.numel() for p in params.values()])
    for parameter, piece, taken in zip(params.values(), pieces, used, strict=True):
        gradient = piece.reshape(parameter.shape).to(parameter.dtype)
        parameter.grad = gradient if taken else None
    return total / counted, {**dict(zip(names, rest, strict=False)), "rows": rows}
