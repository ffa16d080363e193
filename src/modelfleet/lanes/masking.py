"""Pieces of a batch in which padded rows do not count.

Members of a lane may have different numbers of rows in a batch. Missing rows are padding, which must not change
any result.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from modelfleet.feeds import Batch
from modelfleet.frameworks.engine import Engine


def pieces(engine: Engine, batch: Batch, live: np.ndarray) -> Iterator[Batch]:
    """Yield the batches to step instead of a batch: itself, with row weights if needed, or parts for some slots.

    Args:
        engine: The engine of the lane.
        batch: The batch, for all slots.
        live: `(slot,)`: True for each slot that takes part.
    """
    if batch.full:
        yield batch
        return
    counts = batch.counts[live]
    if not len(counts):
        return
    if (counts == batch.size).all():
        yield batch
    elif engine.can_mask_padding(batch):
        yield replace(batch, weights=engine.row_weights(batch.counts, batch.size))
    else:
        # Padding would change the result (BatchNorm, an unknown loss): exactness comes before speed.
        for count in np.unique(counts).tolist():
            yield engine.first_rows(batch, np.flatnonzero(live & (batch.counts == count)), count)


def prediction_pieces(engine: Engine, batch: Batch) -> Iterator[Batch]:
    """Yield the batches of inputs to predict instead of a batch, for all slots each."""
    inputs, counts = replace(batch, data=engine.inputs(batch.data)), batch.counts[batch.counts > 0]
    if not len(counts):
        return
    longest = int(batch.counts.argmax())
    if batch.full or (counts == batch.size).all() or engine.rows_are_independent(inputs.member(longest)):
        yield inputs
        return
    slots = np.arange(len(batch.counts))
    for count in np.unique(counts).tolist():  # padding would change the result: one row count at a time
        own = engine.first_rows(inputs, slots, count)
        yield replace(own, counts=np.where(batch.counts == count, count, 0), slots=None)
