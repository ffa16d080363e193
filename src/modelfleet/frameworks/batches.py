"""Which part of a batch a model is called with. Adapters export the one of these that their framework means."""

from typing import Any


def inputs(batch: Any) -> Any:
    """The x of (x,) and (x, y), or the batch itself."""
    return batch[0] if isinstance(batch, tuple) and 1 <= len(batch) <= 2 else batch


def weighted_inputs(batch: Any) -> Any:
    """The same, and the x of (x, y, sample_weight)."""
    return batch[0] if isinstance(batch, tuple) and 1 <= len(batch) <= 3 else batch
