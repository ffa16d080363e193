"""Class weights: sample weights by label, as Keras's own `fit` makes them from `class_weight`."""

from collections.abc import Iterator, Mapping

import numpy as np

from modelfleet.errors import InputError
from modelfleet.trees import leaves
from modelfleet.types import Data, Tensor, Tree


def weighted(data: Data, class_weight: Mapping[int, float], loader: bool) -> Data:
    """Return the data, arrays or a loader of batches, with the weight of each row's class as third part."""
    if not isinstance(class_weight, Mapping):
        raise InputError(
            f"class_weight is a {type(class_weight).__name__}. Give a weight for each class: {{0: 1.0, 1: 5.0}}."
        )
    return _Loader(data, class_weight) if loader else _with_weights(data, class_weight)


def class_weights(y: Tensor, class_weight: Mapping[int, float]) -> np.ndarray:
    """Return the weight of each row's class, `(row,)`. Labels are integers `(row,)` or `(row, 1)`, or one-hot."""
    labels = np.asarray(y.detach().cpu() if hasattr(y, "detach") else y)
    if labels.ndim > 1:
        labels = labels.argmax(axis=-1) if labels.shape[-1] > 1 else labels[..., 0]
    if labels.ndim != 1:
        raise InputError(
            f"class_weight needs one label per row, and the targets are {np.shape(y)}. "
            f"Give sample weights instead."
        )
    found = np.ones(len(labels), dtype=np.float32)
    for label, weight in class_weight.items():
        found[np.round(labels).astype(np.int64) == label] = weight
    return found


def _with_weights(batch: Tree, class_weight: Mapping[int, float]) -> tuple[Tree, Tree, np.ndarray]:
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if len(parts) == 3 and parts[2] is not None:
        raise InputError("fit got class_weight, and data with sample weights. Give one of the two.")
    if len(parts) < 2 or len(leaves(parts[1])) != 1:
        raise InputError(
            "class_weight is for data of (x, y), with one output to train. Give sample weights instead."
        )
    return parts[0], parts[1], class_weights(leaves(parts[1])[0], class_weight)


class _Loader:
    """Loader that adds class weights to the batches of another loader."""

    def __init__(self, loader: Data, class_weight: Mapping[int, float]) -> None:
        self._loader = loader
        self._class_weight = class_weight

    def __iter__(self) -> Iterator[tuple[Tree, Tree, np.ndarray]]:
        for batch in self._loader() if callable(self._loader) else self._loader:
            yield _with_weights(batch, self._class_weight)

    def __len__(self) -> int:
        return len(self._loader)
