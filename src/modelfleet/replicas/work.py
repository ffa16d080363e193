"""The work of a replica: one model on one device, answering batch after batch."""

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from modelfleet import frameworks
from modelfleet.devices import parse_devices
from modelfleet.errors import InputError
from modelfleet.frameworks.protocol import Replica
from modelfleet.replicas.models import Source, Unmade
from modelfleet.replicas.rows import joined
from modelfleet.trees import leaves, map_tree
from modelfleet.workers import Shared
from modelfleet.workers.shared import portable


@dataclass(frozen=True)
class Order:
    """All that a worker needs to be a replica."""

    framework: str | None
    """None: `model` is a factory, to be called in the worker."""
    model: Shared
    device: str
    precision: str
    batch_size: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the owner has set in its frameworks."""


@dataclass(frozen=True)
class Reply:
    """What became of a batch."""

    outputs: Any = None
    """A tree of NumPy arrays `(row, …)`."""
    error: Exception | None = None
    """What the model raised instead."""
    memory: bool = False
    """Whether that was for want of memory."""
    seconds: float = 0.0


def serve(order: Order) -> Generator[Reply, Any, None]:
    """Answer batches (trees of NumPy arrays) until None comes; the first reply says that all is ready."""
    with frameworks.using(order.settings):
        yield from _serve(order)


def _serve(order: Order) -> Generator[Reply, Any, None]:
    replica = _replica(order)
    try:
        rows = yield Reply()
        while rows is not None:
            rows = yield _answered(replica, rows, order.batch_size)
    finally:
        replica.close()


def _replica(order: Order) -> Replica:
    """The order's model on its device; a factory is called here."""
    framework = Unmade() if order.framework is None else frameworks.adapter(order.framework)
    source = Source(order.model.get(), framework).made()
    source.check_precision(order.precision)
    device = source.framework.choose(parse_devices(order.device))[0]
    # Nothing else keeps the model: what is not shared need not be here twice.
    return source.framework.Replica(source.value, source.framework.native(device), order.precision)


def _answered(replica: Replica, rows: Any, size: int) -> Reply:
    """The outputs for rows of one batch or of several."""
    begun = time.perf_counter()
    count = len(leaves(rows)[0])
    try:
        parts = []
        for start in range(0, count, size):
            batch = map_tree(lambda leaf, start=start: leaf[start : start + size], rows)
            parts.append(_outputs(replica, batch, size))
        outputs = joined(parts)
    except Exception as error:  # a model may raise anything
        if replica.broken(error):
            raise
        return Reply(error=portable(error), memory=replica.out_of_memory(error))
    return Reply(outputs, seconds=time.perf_counter() - begun)


def _outputs(replica: Replica, batch: Any, most: int) -> Any:
    """The outputs for one batch, padded to a power of two or to `most` where every size is compiled."""
    count = len(leaves(batch)[0])
    size = min(most, 1 << (count - 1).bit_length()) if replica.pads else count
    outputs = replica(map_tree(lambda leaf: _padded(leaf, size), batch))
    _check(outputs, size)
    return map_tree(lambda leaf: leaf[:count], outputs)


def _check(outputs: Any, count: int) -> None:
    found = leaves(outputs)
    if not found:
        raise InputError(f"the model gave {outputs!r} for {count} rows; expected arrays, one answer per row.")
    for leaf in found:
        if leaf.ndim == 0 or len(leaf) != count:
            raise InputError(
                f"the model gave {leaf.shape} for {count} rows; expected one answer per row, ({count}, …). "
                f"Give a model whose outputs have the rows first, as its inputs do."
            )


def _padded(leaf: np.ndarray, size: int) -> np.ndarray:
    # By copies of a real row: they are never looked at, and bring no NaN or index of their own.
    return leaf if len(leaf) == size else np.concatenate([leaf, np.repeat(leaf[-1:], size - len(leaf), axis=0)])
