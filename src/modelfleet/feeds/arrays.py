"""The feed of arrays: stored once on the device, and gathered there by index."""

from collections.abc import Generator, Sequence
from copy import copy
from typing import Any

import numpy as np

from modelfleet.errors import InputError
from modelfleet.feeds._base import Arrays, Batch, difference, spec
from modelfleet.streams import permutations
from modelfleet.trees import leaves, map_tree, rebuild

_MOST_INDICES = 1 << 22  # uploaded at once: 32 MB, many steps of most fleets
_MOST_BYTES = 1 << 26  # of rows gathered at once, where several steps come in one batch


class ArrayFeed:
    """Every member's rows, in its own order, from trees of arrays.

    `data` has a checked tree and its number of rows per member. Trees may share arrays, and each array is
    stored once: shared and own data differ in where a member's rows begin, and in nothing else. With `going_on`,
    an epoch has so many steps and goes on where the last one stopped; it ends where the rows do.
    """

    def __init__(
        self,
        data: Sequence[tuple[Any, int]],
        *,
        wheres: Sequence[str],
        seeds: np.ndarray,
        batch_sizes: np.ndarray,
        shuffle: bool,
        device: Any,
        arrays: Arrays,
        epochs_done: np.ndarray,
        going_on: int | None = None,
    ) -> None:
        trees = _tensors(data, wheres, arrays)
        self.failures: dict[int, Exception] = {}
        self.rows: np.ndarray = np.array([rows for _, rows in data], dtype=np.int64)
        self._seeds = seeds
        self._epochs_done = epochs_done
        self._batch_sizes = batch_sizes
        self._going_on = going_on
        self._shuffle = shuffle
        self._device = device
        self._arrays = arrays
        self._tree = map_tree(lambda _: 0, trees[0])  # the form of a batch
        self._stored: list[Any] = []
        # Where the members' rows begin within a stored leaf, and for every leaf: which of these are its own.
        self._offsets: list[np.ndarray] = []
        self._layout: list[int] = []
        for column in zip(*(leaves(tree) for tree in trees), strict=True):
            self._store(column)
        one = all((offsets == offsets[0]).all() for offsets in self._offsets)
        even = bool((self.rows == self.rows[0]).all() and (batch_sizes == batch_sizes[0]).all())
        self.shared: bool = one and even and not shuffle

    @property
    def steps(self) -> np.ndarray:
        """`(member,)`: steps per epoch."""
        return -(-self.rows // self._batch_sizes)

    @property
    def settings(self) -> dict[str, Any]:
        """The sizes of the batches, and whether rows are shuffled."""
        return {"sizes": self._batch_sizes.tolist(), "shuffled": self._shuffle}

    def rewind(self) -> None:
        """Nothing to forget: every epoch's order is known from its number."""

    def _store(self, column: Sequence[Any]) -> None:
        """Put one leaf of all members on the device, the same tensor once."""
        begins: dict[int, int] = {}
        pieces: list[Any] = []
        total = 0
        for leaf in column:
            if id(leaf) not in begins:
                begins[id(leaf)] = total
                pieces.append(leaf)
                total += self._arrays.size(leaf)
        joined = pieces[0] if len(pieces) == 1 else self._arrays.concatenate(pieces)
        self._stored.append(self._arrays.place(joined, self._device))
        offsets = np.array([begins[id(leaf)] for leaf in column], dtype=np.int64)
        for which, known in enumerate(self._offsets):
            if (known == offsets).all():
                self._layout.append(which)
                return
        self._layout.append(len(self._offsets))
        self._offsets.append(offsets)

    def epoch(self, number: int, *, start: int = 0, several: int = 1) -> Generator[Batch, None, None]:
        """The batches of one epoch, without the first `start` of them; up to `several` steps in one."""
        several = max(1, min(several, _MOST_BYTES // self._step_bytes()))
        passes, done = self._standing(number)
        if self.shared:
            return self._slices(start + int(done[0]), several)
        return self._gathered(self._order(passes), start, several, done=done)

    def first(self) -> Batch:
        """A batch shaped like those that will come. Consumes nothing."""
        return next(self._slices(0, 1) if self.shared else self._gathered(None, 0, 1, chunk=1))

    def _step_bytes(self) -> int:
        """What one step's rows take."""
        rows = int(self._batch_sizes[:1].sum() if self.shared else self._batch_sizes.sum())
        return rows * sum(max(1, leaf.nbytes // max(1, self._arrays.size(leaf))) for leaf in self._stored)

    def select(self, keep: Sequence[int]) -> "ArrayFeed":
        """A feed for the members at these positions, in this order, on the same stored arrays."""
        members = np.asarray(keep, dtype=np.int64)
        chosen = copy(self)
        chosen.failures = {}
        chosen.rows = self.rows[members]
        chosen._seeds = self._seeds[members]
        chosen._epochs_done = self._epochs_done[members]
        chosen._batch_sizes = self._batch_sizes[members]
        chosen._offsets = [offsets[members] for offsets in self._offsets]
        return chosen

    def _slices(self, start: int, several: int) -> Generator[Batch, None, None]:
        """Shared batches: the one data set in its own order; copied, for a model may write into its inputs."""
        rows, size = int(self.rows[0]), int(self._batch_sizes[0])
        begins = [int(offsets[0]) for offsets in self._offsets]
        low = start * size
        while low < rows:
            steps = min(several, (rows - low) // size)
            high = low + steps * size if steps else rows
            parts = [
                self._arrays.place(leaf[begins[which] + low : begins[which] + high], self._device, copy=True)
                for leaf, which in zip(self._stored, self._layout, strict=True)
            ]
            if steps > 1:
                parts = [part.reshape(steps, size, *part.shape[1:]) for part in parts]
            counts = np.full(len(self.rows), size if steps else rows - low)
            yield Batch(rebuild(self._tree, parts), True, counts, steps if steps > 1 else None)
            low = high

    def _standing(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """`(member,)` each: how often all rows have been passed before an epoch, and the steps since."""
        if self._going_on is None:
            return np.full(len(self.rows), epoch), np.zeros(len(self.rows), dtype=np.int64)
        epochs = -(-self.steps // self._going_on)  # that a pass takes
        return epoch // epochs, epoch % epochs * self._going_on

    def _gathered(
        self,
        order: np.ndarray | None,
        start: int,
        several: int,
        chunk: int | None = None,
        done: np.ndarray | int = 0,
    ) -> Generator[Batch, None, None]:
        """Batches with a member axis. The indices of many steps are worked out and uploaded at once."""
        before = done
        take, pairs = self._arrays.take, list(zip(self._stored, self._layout, strict=True))
        width = int(np.minimum(self.rows, self._batch_sizes).max())
        total = int((self.steps - before).max())
        begins = (np.cumsum(self.rows) - self.rows)[:, None]
        chunk = chunk or max(1, _MOST_INDICES // (len(self.rows) * width))
        for low in range(start, total, chunk):
            steps = np.arange(low, min(low + chunk, total))
            done = (steps[:, None] + before) * self._batch_sizes
            counts = np.clip(self.rows - done, 0, self._batch_sizes)
            local = done[:, :, None] + np.arange(width)
            if counts.min() < width:  # past its last row a member begins again: padding is its own rows
                rows = self.rows[:, None]
                np.remainder(local, rows, out=local, where=local >= rows)
            if order is not None:
                local = order.take(local + begins)
            blocks = [self._arrays.index(local + offsets[:, None], self._device) for offsets in self._offsets]
            step, full = 0, int((counts == width).all(axis=1).sum())  # the full ones come first
            while step < len(steps):
                most = min(several, full - step)
                if most > 1:
                    parts = [take(leaf, blocks[which][step : step + most]) for leaf, which in pairs]
                    yield Batch(rebuild(self._tree, parts), False, counts[step], most)
                    step += most
                    continue
                size = int(counts[step].max())
                index = [block[step] if size == width else block[step, :, :size] for block in blocks]
                parts = [take(leaf, index[which]) for leaf, which in pairs]
                yield Batch(rebuild(self._tree, parts), False, counts[step])
                step += 1

    def _order(self, passes: np.ndarray) -> np.ndarray | None:
        """Every member's rows in the order of this pass, one member after the other; None: as they are."""
        if not self._shuffle:
            return None
        epochs = self._epochs_done + passes
        if (self.rows == self.rows[0]).all():
            return permutations(self._seeds, epochs, self.rows).reshape(-1)
        order = np.empty(int(self.rows.sum()), dtype=np.int64)
        begins = np.cumsum(self.rows) - self.rows
        # Members of like length together: one with very many rows must not widen the shuffles of all.
        likeness = np.frexp(self.rows.astype(np.float64))[1]
        for like in np.unique(likeness):
            members = np.flatnonzero(likeness == like)
            shuffled = permutations(self._seeds[members], epochs[members], self.rows[members])
            position = np.arange(shuffled.shape[1])
            real = position < self.rows[members, None]
            order[(begins[members, None] + position)[real]] = shuffled[real]
        return order


def _tensors(data: Sequence[tuple[Any, int]], wheres: Sequence[str], arrays: Arrays) -> list[Any]:
    """The members' trees as tensors, wherever they are now, once it is certain that they are alike."""
    known: dict[int, Any] = {}

    def tensor(leaf: Any) -> Any:
        if id(leaf) not in known:
            known[id(leaf)] = arrays.place(leaf, None)
        return known[id(leaf)]

    trees = [map_tree(tensor, tree) for tree, _ in data]
    expected = spec(trees[0])
    checked = {id(data[0][0])}
    for (tree, _), tensors, where in zip(data, trees, wheres, strict=True):
        if id(tree) not in checked:
            checked.add(id(tree))
            if (found := spec(tensors)) != expected:
                raise InputError(
                    f"{where} does not fit {wheres[0]}: {difference(found, expected)}. "
                    f"Members that run together need rows of one form."
                )
    return trees
