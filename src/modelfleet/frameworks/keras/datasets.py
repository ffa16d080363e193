"""Data sets of Keras as loaders, with hooks at the start and the end of every epoch, as in Keras's `fit`."""

from collections.abc import Iterator

import keras

from modelfleet.types import Data, Tree


def as_loader(data: Data, *, again: bool) -> Data:
    """Return a loader for a `PyDataset`, and any other data as they are.

    With `again`, every iteration counts as the first.
    """
    return _DatasetLoader(data, again) if isinstance(data, keras.utils.PyDataset) else data


class _DatasetLoader:
    """Loader of a `PyDataset` that calls its `on_epoch_begin` and `on_epoch_end` when Keras does."""

    def __init__(self, dataset: keras.utils.PyDataset, again: bool) -> None:
        self._dataset = dataset
        self._again = again
        self._opened = False

    def __len__(self) -> int:
        steps = self._dataset.num_batches
        if steps is None:
            raise TypeError("this data set is endless")
        return int(steps)

    def __iter__(self) -> Iterator[Tree]:
        if self._again or not self._opened:
            self._dataset.on_epoch_end()  # Keras calls it before the first epoch, too: some shuffle in it
        self._opened = True
        self._dataset.on_epoch_begin()
        try:
            yield from iter(self._dataset)
        finally:
            self._dataset.on_epoch_end()
