"""Batches as models and losses take them."""

from collections.abc import Mapping
from typing import Any

from modelfleet.errors import InputError
from modelfleet.types import Tree


def inputs(batch: Tree) -> Tree:
    """Return the x of (x,) and (x, y), or the batch itself."""
    return batch[0] if isinstance(batch, tuple) and 1 <= len(batch) <= 2 else batch


def weighted_inputs(batch: Tree) -> Tree:
    """Return the x of (x,), (x, y) and (x, y, sample_weight), or the batch itself."""
    return batch[0] if isinstance(batch, tuple) and 1 <= len(batch) <= 3 else batch


def input_and_target(batch: Tree, loss: str) -> tuple[Tree, Tree]:
    """Return the x and y of a batch, or raise InputError if the named loss gets anything else."""
    if isinstance(batch, tuple) and len(batch) == 2:
        return batch
    if isinstance(batch, Mapping):
        form = f"a dict of {', '.join(map(str, batch))}"
    else:
        form = f"{len(batch)} arrays" if isinstance(batch, tuple | list) else "one array"
    raise InputError(
        f"the loss {loss!r} needs (x, y), but the data hold {form}. "
        f"Give (x, y), or compile with an objective, which takes any batch."
    )


def loss_and_metrics(result: Any, tensor: type) -> tuple[Any, Mapping[str, Any]]:
    """Return the loss and the metrics that a user's objective returned; `tensor` is the framework's class."""
    if isinstance(result, tensor):
        return result, {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return result
    raise InputError(
        f"the objective returned {type(result).__name__}; expected a loss, or a loss and a dict of metrics."
    )
