"""Batches as models and losses take them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from modelfleet.errors import InputError
from modelfleet.types import Tensor, Tree


def inputs(batch: Tree) -> Tree:
    """Return the x of (x,) and (x, y), or the batch itself."""
    return batch[0] if isinstance(batch, tuple) and 1 <= len(batch) <= 2 else batch


def weighted_inputs(batch: Tree) -> Tree:
    """Return the x of (x,), (x, y) and (x, y, sample_weight), or the batch itself."""
    return batch[0] if isinstance(batch, tuple) and 1 <= len(batch) <= 3 else batch


def has_target(batch: Tree) -> bool:
    """Return True for (x, y) and (x, y, sample_weight)."""
    return isinstance(batch, tuple) and len(batch) in (2, 3)


def unpack(batch: Tree, loss: str) -> tuple[Tree, Tree, Tensor | None]:
    """Return the x, y and sample weights of a batch. The weights are None for (x, y).

    Raises:
        InputError: The named loss gets anything else, or the third part can't be weights.
    """
    if isinstance(batch, tuple) and has_target(batch):
        x, y, weights = (*batch, None)[:3]
        if weights is not None and not _one_float_per_row(weights):
            form = f"{tuple(weights.shape)} {weights.dtype}" if hasattr(weights, "shape") else "no array"
            raise InputError(
                f"the loss {loss!r} needs (x, y), but the data hold 3 arrays, which is more than (x, y). A third "
                f"is taken as sample_weight, one floating-point number for every row, and this one is {form}. "
                f"Give such weights, or compile with an objective, which takes any batch. Whole numbers could be "
                f"labels: if they are weights, give fit((x, y), sample_weight=w), or have a loader give floats."
            )
        return x, y, weights
    if isinstance(batch, Mapping):
        form = f"a dict of {', '.join(map(str, batch))}"
    else:
        form = f"{len(batch)} arrays" if isinstance(batch, tuple | list) else "one array"
    raise InputError(
        f"the loss {loss!r} needs (x, y), but the data hold {form}. "
        f"Give (x, y), or compile with an objective, which takes any batch."
    )


def check_weights(weights: np.ndarray) -> None:
    """Raise InputError for a weight that is not finite, or below 0. `unpack` refuses what can't be weights."""
    if not _one_float_per_row(weights):
        return
    wrong = ~(np.isfinite(weights) & (weights >= 0))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise InputError(
            f"sample_weight in row {row} is {weights[row]}; expected a finite number, 0 or more. "
            f"To leave out a row, give it the weight 0."
        )


def _one_float_per_row(weights: Any) -> bool:
    return len(getattr(weights, "shape", ())) == 1 and "float" in str(weights.dtype)


def loss_and_metrics(result: Any, tensor: type) -> tuple[Any, Mapping[str, Any]]:
    """Return the loss and the metrics that a user's objective returned; `tensor` is the framework's class."""
    if isinstance(result, tensor):
        return result, {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return result
    raise InputError(
        f"the objective returned {type(result).__name__}; expected a loss, or a loss and a dict of metrics."
    )
