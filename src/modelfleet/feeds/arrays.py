"""Feeds of arrays: stored once on the device, and gathered there by index; on the host if they are too large."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from copy import copy

import numpy as np

from modelfleet.errors import InputError
from modelfleet.feeds._base import ArrayOperations, Batch, Sender
from modelfleet.feeds.checking import describe_difference, form_of, row_spec
from modelfleet.feeds.orders import OrderAhead, order_of
from modelfleet.feeds.reading import read_ahead
from modelfleet.feeds.sending import send
from modelfleet.feeds.stored import StoredArrays
from modelfleet.trees import leaves, map_tree, rebuild
from modelfleet.types import Json, NativeDevice, Tensor, Tree

_MAX_INDICES = 1 << 22  # uploaded at once: 32 MB, many steps of most fleets
_MAX_BYTES = 1 << 26  # of rows gathered at once, where one batch holds several steps


class ArrayFeed:
    """Batches of every member's rows, in the member's own order, from trees of arrays.

    Trees may share arrays, and each array is stored once: shared and own data differ only in where a member's rows
    begin.

    Arrays that the device has no room for stay on the host. Their rows are gathered there, and sent ahead.

    Args:
        data: For each member a checked tree of arrays and its number of rows.
        labels: For each member a name of its data for errors, such as "data of member 'm07'".
        seeds: `(member,)`: the seed of each member's shuffles.
        batch_sizes: `(member,)`: the rows that each member takes per step.
        shuffle: Shuffle each member's rows, in a new order every epoch.
        device: The device to store the arrays on.
        arrays: The array operations of the framework.
        stored: What this verb has stored already.
        epochs_done: `(member,)`: how many epochs of shuffles each member has used before.
        steps_per_epoch: `(member,)`: end each epoch after this many steps, or after the last row. The next epoch
            continues there.
    """

    def __init__(
        self,
        data: Sequence[tuple[Tree, int]],
        *,
        labels: Sequence[str],
        seeds: np.ndarray,
        batch_sizes: np.ndarray,
        shuffle: bool,
        device: NativeDevice,
        arrays: ArrayOperations,
        stored: StoredArrays,
        epochs_done: np.ndarray,
        steps_per_epoch: np.ndarray | None = None,
    ) -> None:
        trees = _as_tensors(data, labels, arrays, stored)
        self.failures: dict[int, Exception] = {}
        self.rows: np.ndarray = np.array([rows for _, rows in data], dtype=np.int64)
        self._seeds = seeds
        self._epochs_done = epochs_done
        self._batch_sizes = batch_sizes
        self._steps_per_epoch = steps_per_epoch
        self._shuffle = shuffle
        self._device = device
        self._arrays = arrays
        self._tree = map_tree(lambda _: 0, trees[0])  # the structure of a batch
        self._stored: list[Tensor] = []  # one tensor per leaf, which holds the rows of all members
        self._offsets: list[np.ndarray] = []  # `(member,)` each: where the members' rows begin in a stored leaf
        self._layout: list[int] = []  # for every leaf, the index of its offsets
        columns = list(zip(*(leaves(tree) for tree in trees), strict=True))
        distinct = [list({id(leaf): leaf for leaf in column}.values()) for column in columns]
        fits = stored.fit(distinct, arrays, device)
        self._where = device if fits else None  # where rows are gathered; None for the host
        self._sender = None if fits else arrays.sender(device)
        for column in columns:
            self._store(column, stored)
        self._beside = stored.room(arrays, device) is not None  # True if the host is free meanwhile
        self._ahead: OrderAhead | None = None
        same_rows = all((offsets == offsets[0]).all() for offsets in self._offsets)
        numbers = (self.rows, batch_sizes, *([] if steps_per_epoch is None else [steps_per_epoch]))
        same_sizes = all(bool((number == number[0]).all()) for number in numbers)
        self.shared: bool = same_rows and same_sizes and not shuffle

    @property
    def steps(self) -> np.ndarray:
        """`(member,)`: steps per epoch."""
        return -(-self.rows // self._batch_sizes)

    @property
    def settings(self) -> dict[str, Json]:
        """Return the sizes of the batches, and whether rows are shuffled."""
        return {"sizes": self._batch_sizes.tolist(), "shuffled": self._shuffle}

    @property
    def form(self) -> str:
        """Return the parts of a batch in words."""
        return form_of(self._tree)

    def state(self) -> dict[str, np.ndarray]:
        """Return nothing: the number of an epoch alone decides its order."""
        return {}

    @property
    def has_state(self) -> bool:
        """Return False."""
        return False

    def rewind(self, state: Mapping[str, np.ndarray]) -> None:
        """Do nothing: the number of an epoch alone decides its order."""

    def give_up(self) -> None:
        """Do nothing: nobody waits for arrays."""

    def _store(self, column: Sequence[Tensor], stored: StoredArrays) -> None:
        """Store one leaf of all members. A tensor that several members have is stored once."""
        starts: dict[int, int] = {}
        distinct: list[Tensor] = []
        total = 0
        for leaf in column:
            if id(leaf) not in starts:
                starts[id(leaf)] = total
                distinct.append(leaf)
                total += self._arrays.size(leaf)
        self._stored.append(stored.joined(distinct, self._arrays, self._where))
        offsets = np.array([starts[id(leaf)] for leaf in column], dtype=np.int64)
        for index, known in enumerate(self._offsets):
            if (known == offsets).all():
                self._layout.append(index)
                return
        self._layout.append(len(self._offsets))
        self._offsets.append(offsets)

    def epoch(self, number: int, *, start: int = 0, several: int = 1) -> Generator[Batch, None, None]:
        """Yield the batches of one epoch, without the first `start`, with up to `several` steps in one."""
        several = max(1, min(several, _MAX_BYTES // self._step_bytes()))
        passes, done = self._progress_at(number)
        if self.shared:
            batches = self._slices(start + int(done[0]), several)
        else:
            batches = self._gathered(self._order(passes), start, several, done=done)
            self._prepare_order(self._progress_at(number + 1)[0])
        return batches if self._sender is None else self._sent(batches, self._sender)

    def first(self) -> Batch:
        """Return a batch shaped like those to come, without consuming anything."""
        batch = next(self._slices(0, 1) if self.shared else self._gathered(None, 0, 1, chunk=1))
        return batch if self._sender is None else send(self._sender, batch)()

    @staticmethod
    def _sent(batches: Generator[Batch, None, None], sender: Sender) -> Generator[Batch, None, None]:
        """Yield batches of the host on the device. A thread gathers and sends them ahead."""
        with closing(read_ahead(send(sender, batch) for batch in batches)) as sent:
            for receive in sent:
                yield receive()

    def _step_bytes(self) -> int:
        """Return the bytes of one step's rows."""
        rows = int(self._batch_sizes[:1].sum() if self.shared else self._batch_sizes.sum())
        return rows * sum(max(1, leaf.nbytes // max(1, self._arrays.size(leaf))) for leaf in self._stored)

    def select(self, keep: Sequence[int]) -> "ArrayFeed":
        """Return a feed for the members at these positions, in this order, on the same stored arrays."""
        members = np.asarray(keep, dtype=np.int64)
        chosen = copy(self)
        chosen.failures = {}
        chosen._ahead = None
        chosen.rows = self.rows[members]
        chosen._seeds = self._seeds[members]
        chosen._epochs_done = self._epochs_done[members]
        chosen._batch_sizes = self._batch_sizes[members]
        if self._steps_per_epoch is not None:
            chosen._steps_per_epoch = self._steps_per_epoch[members]
        chosen._offsets = [offsets[members] for offsets in self._offsets]
        return chosen

    def _slices(self, start: int, several: int) -> Generator[Batch, None, None]:
        """Yield shared batches in the order of the rows; copies, since a model may write to its inputs."""
        rows, size = int(self.rows[0]), int(self._batch_sizes[0])
        starts = [int(offsets[0]) for offsets in self._offsets]
        low = start * size
        while low < rows:
            steps = min(several, (rows - low) // size)
            high = low + steps * size if steps else rows
            parts = [
                self._arrays.place(leaf[starts[index] + low : starts[index] + high], self._where, copy=True)
                for leaf, index in zip(self._stored, self._layout, strict=True)
            ]
            if steps > 1:
                parts = [part.reshape(steps, size, *part.shape[1:]) for part in parts]
            counts = np.full(len(self.rows), size if steps else rows - low)
            yield Batch(rebuild(self._tree, parts), True, counts, steps if steps > 1 else None)
            low = high

    def _progress_at(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return how many passes over all rows an epoch comes after, and the steps since: `(member,)` each."""
        if self._steps_per_epoch is None:
            return np.full(len(self.rows), epoch), np.zeros(len(self.rows), dtype=np.int64)
        epochs_per_pass = -(-self.steps // self._steps_per_epoch)
        return epoch // epochs_per_pass, epoch % epochs_per_pass * self._steps_per_epoch

    def _gathered(
        self,
        order: np.ndarray | None,
        start: int,
        several: int,
        chunk: int | None = None,
        done: np.ndarray | int = 0,
    ) -> Generator[Batch, None, None]:
        """Yield batches with a member axis. The indices of many steps are computed and uploaded at once."""
        before = done
        take, stored = self._arrays.take, list(zip(self._stored, self._layout, strict=True))
        width = int(np.minimum(self.rows, self._batch_sizes).max())
        total = int((self.steps - before).max())
        starts = (np.cumsum(self.rows) - self.rows)[:, None]
        chunk = chunk or max(1, _MAX_INDICES // (len(self.rows) * width))
        for low in range(start, total, chunk):
            steps = np.arange(low, min(low + chunk, total))
            done = (steps[:, None] + before) * self._batch_sizes
            counts = np.clip(self.rows - done, 0, self._batch_sizes)
            local = done[:, :, None] + np.arange(width)
            if counts.min() < width:  # past its last row a member starts again: its padding is its own rows
                rows = self.rows[:, None]
                np.remainder(local, rows, out=local, where=local >= rows)
            if order is not None:
                local = order.take(local + starts)
            blocks = [self._arrays.index(local + offsets[:, None], self._where) for offsets in self._offsets]
            step, full = 0, int((counts == width).all(axis=1).sum())  # the full ones come first
            while step < len(steps):
                most = min(several, full - step)
                if most > 1:
                    parts = [take(leaf, blocks[i][step : step + most]) for leaf, i in stored]
                    yield Batch(rebuild(self._tree, parts), False, counts[step], most)
                    step += most
                    continue
                size = int(counts[step].max())
                index = [block[step] if size == width else block[step, :, :size] for block in blocks]
                parts = [take(leaf, index[i]) for leaf, i in stored]
                yield Batch(rebuild(self._tree, parts), False, counts[step])
                step += 1

    def _order(self, passes: np.ndarray) -> np.ndarray | None:
        """Return every member's rows in the order of this pass, one member after the other; None for no change."""
        if not self._shuffle:
            return None
        epochs = self._epochs_done + passes
        order = None if self._ahead is None else self._ahead.take(epochs)
        return order_of(self._seeds, epochs, self.rows) if order is None else order

    def _prepare_order(self, passes: np.ndarray) -> None:
        """Have the order of the next pass worked out, if the device computes while the host has nothing to do."""
        if self._shuffle and self._beside:
            self._ahead = OrderAhead(self._seeds, self._epochs_done + passes, self.rows)


def _as_tensors(
    data: Sequence[tuple[Tree, int]], labels: Sequence[str], arrays: ArrayOperations, stored: StoredArrays
) -> list[Tree]:
    """Return the members' trees as tensors, wherever they are now. Raise `InputError` if their rows differ."""
    trees = [map_tree(lambda leaf: stored.tensor(leaf, arrays), tree) for tree, _ in data]
    expected = row_spec(trees[0])
    checked = {id(data[0][0])}
    for (tree, _), tensors, label in zip(data, trees, labels, strict=True):
        if id(tree) not in checked:
            checked.add(id(tree))
            if (found := row_spec(tensors)) != expected:
                raise InputError(
                    f"{label} does not fit {labels[0]}: {describe_difference(found, expected)}. "
                    f"Members that run together need rows of one shape and dtype."
                )
    return trees
