"""The order of every member's rows in an epoch."""

from threading import Thread

import numpy as np

from modelfleet.shuffles import permutations


def order_of(seeds: np.ndarray, epochs: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return every member's rows in the order of an epoch, one member after the other.

    Args:
        seeds: `(member,)`: the seeds of the members' shuffles.
        epochs: `(member,)`: the number of the epoch, over all fits.
        rows: `(member,)`: how many rows each member has.
    """
    if (rows == rows[0]).all():
        return permutations(seeds, epochs, rows).reshape(-1)
    order = np.empty(int(rows.sum()), dtype=np.int64)
    starts = np.cumsum(rows) - rows
    # Members of similar length together: one with very many rows must not widen the shuffles of all.
    magnitudes = np.frexp(rows.astype(np.float64))[1]
    for magnitude in np.unique(magnitudes):
        members = np.flatnonzero(magnitudes == magnitude)
        shuffled = permutations(seeds[members], epochs[members], rows[members])
        position = np.arange(shuffled.shape[1])
        real = position < rows[members, None]
        order[(starts[members, None] + position)[real]] = shuffled[real]
    return order


class OrderAhead:
    """An order that a thread works out before it is needed, while an accelerator trains the epoch before."""

    def __init__(self, seeds: np.ndarray, epochs: np.ndarray, rows: np.ndarray) -> None:
        self._arguments = seeds, epochs, rows
        self._order: np.ndarray | None = None
        self._thread = Thread(target=self._work, name="modelfleet-order", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self._order = order_of(*self._arguments)

    def take(self, epochs: np.ndarray) -> np.ndarray | None:
        """Return the order, if it is the one of these epochs."""
        if not np.array_equal(epochs, self._arguments[1]):
            return None
        self._thread.join()
        return self._order
