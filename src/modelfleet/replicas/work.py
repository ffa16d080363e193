"""The work of a replica: one model on one device, answering batch after batch."""

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelfleet import frameworks
from modelfleet.devices import parse_devices
from modelfleet.errors import InputError
from modelfleet.members import Member
from modelfleet.replicas.rows import joined
from modelfleet.trees import leaves, map_tree
from modelfleet.workers import Shared
from modelfleet.workers.shared import portable


@dataclass(frozen=True)
class Order:
    """All that a worker needs to be a replica."""

    framework: str
    model: Shared
    device: str
    precision: str
    batch_size: int


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
    framework = frameworks.adapter(order.framework)
    model = order.model.get()
    devices = parse_devices(order.device)
    device = framework.native(framework.choose(devices)[0])
    made = getattr(framework, "Replica", None)
    replica: Any
    if made is not None:
        replica = made(model, device, order.precision)
    else:
        replica = _Stepped(framework, model, device, order.batch_size)
    try:
        rows = yield Reply()
        while rows is not None:
            rows = yield _answered(replica, rows, order.batch_size)
    finally:
        replica.close()


def _answered(replica: Any, rows: Any, size: int) -> Reply:
    """The outputs for rows of one batch or of several."""
    begun = time.perf_counter()
    count = len(leaves(rows)[0])
    try:
        parts = []
        for start in range(0, count, size):
            batch = map_tree(lambda leaf, start=start: leaf[start : start + size], rows)
            parts.append(replica(batch))
            _check(parts[-1], min(size, count - start))
        outputs = joined(parts)
    except Exception as error:  # a model may raise anything
        return Reply(error=portable(error), memory=replica.out_of_memory(error))
    return Reply(outputs, seconds=time.perf_counter() - begun)


def _check(outputs: Any, count: int) -> None:
    for leaf in leaves(outputs):
        if leaf.ndim == 0 or len(leaf) != count:
            raise InputError(
                f"the model gave {leaf.shape} for {count} rows; expected one answer per row, ({count}, …). "
                f"Give a model whose outputs have the rows first, as its inputs do."
            )


class _Stepped:
    """A model of a framework whose programs are compiled for one size of batch: rows are padded to few sizes."""

    def __init__(self, framework: Any, model: Any, device: Any, batch_size: int) -> None:
        member = Member("model", model, 0, framework)
        prepared = framework.prepare(None, [member], "predict")
        self._engine = framework.Engine([member], prepared.tasks[0], dict(prepared.columns), device, fused=False)
        self._framework = framework
        self._device = device
        self._batch_size = batch_size

    def __call__(self, rows: Any) -> Any:
        """The model's outputs on a tree of NumPy arrays."""
        count = len(leaves(rows)[0])
        size = count if count >= self._batch_size else min(self._batch_size, 1 << (count - 1).bit_length())
        arrays = self._framework.arrays
        padded = map_tree(lambda leaf: arrays.place(_padded(leaf, size), self._device), rows)
        outputs = self._engine.predict(padded, shared=True)
        return map_tree(np.asarray, self._engine.rows(outputs, 0, count))

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device is out of memory."""
        return self._engine.out_of_memory(error)

    def close(self) -> None:
        """End what goes on beside."""
        self._engine.stop()


def _padded(leaf: np.ndarray, size: int) -> np.ndarray:
    # By copies of a real row: they are never looked at, and bring no NaN or index of their own.
    return leaf if len(leaf) == size else np.concatenate([leaf, np.repeat(leaf[-1:], size - len(leaf), axis=0)])
