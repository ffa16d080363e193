"""Pieces of a batch in which padded rows do not count.

Members of a lane may have different numbers of rows in a batch. Missing rows are padding, which must not change
any result.
"""

from collections.abc import Iterator

import numpy as np

from modelfleet.feeds import Batch
from modelfleet.frameworks.engine import Engine
from modelfleet.trees import map_tree
from modelfleet.types import Tensor, Tree


def pieces(
    engine: Engine, batch: Batch, live: np.ndarray
) -> Iterator[tuple[np.ndarray | None, Tree, Tensor | None]]:
    """Yield the pieces of a batch to step: (slots or None for all, data, row weights or None).

    Args:
        engine: The engine of the lane.
        batch: The batch.
        live: `(slot,)`: True for each slot that takes part.
    """
    if batch.full:
        yield None, batch.data, None
        return
    counts = batch.counts[live]
    if not len(counts):
        return
    if (counts == batch.size).all():
        yield None, batch.data, None
    elif engine.maskable(batch):
        yield None, batch.data, engine.row_weights(batch.counts, batch.size)
    else:
        # Padding would change the result (BatchNorm, an unknown loss): exactness comes before speed.
        for count in np.unique(counts):
            slots = np.flatnonzero(live & (batch.counts == count))
            yield slots, engine.cut(batch.data, slots, int(count), shared=batch.shared), None


def prediction_pieces(engine: Engine, batch: Batch) -> Iterator[tuple[Tree, np.ndarray, int]]:
    """Yield the pieces of a batch to predict: (inputs, real rows of each slot, rows with padding)."""
    inputs, counts = engine.inputs(batch.data), batch.counts[batch.counts > 0]
    one = inputs if batch.shared else map_tree(lambda leaf: leaf[int(batch.counts.argmax())], inputs)
    if batch.full or (counts == batch.size).all() or engine.rows_apart(one):
        yield inputs, batch.counts, batch.size
        return
    slots = np.arange(len(batch.counts))
    for count in np.unique(counts).tolist():  # padding would change the result: one row count at a time
        own = np.where(batch.counts == count, count, 0)
        yield engine.cut(inputs, slots, count, shared=batch.shared), own, count
