"""Keras's own data sets as loaders: told of the beginning and the end of every epoch, as by Keras's `fit`."""

from collections.abc import Iterator
from typing import Any

import keras


def as_loader(data: Any, *, again: bool) -> Any:
    """Return a loader for a `PyDataset`, and anything else as it is. `again`: each reading is one of its own."""
    return _Told(data, again) if isinstance(data, keras.utils.PyDataset) else data


class _Told:
    """The batches of a `PyDataset`, with its `on_epoch_begin` and `on_epoch_end` called when Keras calls them."""

    def __init__(self, dataset: Any, again: bool) -> None:
        self._dataset = dataset
        self._again = again
        self._opened = False

    def __len__(self) -> int:
        steps = self._dataset.num_batches
        if steps is None:
            raise TypeError("this data set goes on and on")
        return int(steps)

    def __iter__(self) -> Iterator[Any]:
        if self._again or not self._opened:
            self._dataset.on_epoch_end()  # Keras calls it before the first epoch, too: some shuffle in it
        self._opened = True
        self._dataset.on_epoch_begin()
        try:
            yield from iter(self._dataset)
        finally:
            self._dataset.on_epoch_end()
