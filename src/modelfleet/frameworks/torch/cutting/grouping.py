"""Group the nodes of a model into pieces that are worth measuring one by one."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from torch import Tensor, fx

from modelfleet.frameworks.torch.cutting.atoms import Layout
from modelfleet.types import Tensor as AnyTensor

PIECES_PER_STAGE = 16
FEW = 32  # no more boundaries than this are all kept


def group(
    layout: Layout, seconds: Mapping[fx.Node, float], values: Mapping[fx.Node, AnyTensor], stages: int
) -> list[tuple[int, int]]:
    """Return ranges of nodes, each of at most about a sixteenth of a stage's time if its nodes can be parted.

    Of the boundaries where a piece may end, the one that the fewest bytes cross is taken.
    """
    boundaries = list(layout.boundaries)
    if len(boundaries) > max(FEW, 2 * stages):
        boundaries = _chosen(layout, seconds, values, stages)
    edges = [0, *boundaries, len(layout.order)]
    return list(zip(edges, edges[1:], strict=False))


def _chosen(
    layout: Layout, seconds: Mapping[fx.Node, float], values: Mapping[fx.Node, AnyTensor], stages: int
) -> list[int]:
    elapsed = [0.0, *accumulate(seconds[node] for node in layout.order)]
    crossing = crossing_bytes(layout.order, values)
    step = elapsed[-1] / (PIECES_PER_STAGE * stages)
    chosen: list[int] = []
    window: list[int] = []
    last = 0.0
    for boundary in (*layout.boundaries, None):
        if window and (boundary is None or elapsed[boundary] - last > step):
            best = min(window, key=lambda cut: (crossing[cut], -cut))
            chosen.append(best)
            last = elapsed[best]
            window = [cut for cut in window if cut > best and elapsed[cut] - last > step / 2]
        if boundary is not None and elapsed[boundary] - last > step / 2:
            window.append(boundary)
    return chosen


def crossing_bytes(order: Sequence[fx.Node], values: Mapping[fx.Node, AnyTensor]) -> list[int]:
    """Return for each boundary the bytes of tensors that are made before and needed after it."""
    position = {node: number for number, node in enumerate(order)}
    change = [0] * (len(order) + 1)
    for node, number in position.items():
        value = values[node]
        last = max((position.get(user, number) for user in node.users), default=number)
        if isinstance(value, Tensor) and last > number:
            change[number + 1] += value.nbytes
            change[last + 1] -= value.nbytes
    return list(accumulate(change))
