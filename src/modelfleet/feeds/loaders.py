"""Feeds of loaders: anything that yields batches, read in the background while the device computes."""

from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from modelfleet.errors import InputError
from modelfleet.feeds._base import ArrayOperations, Batch
from modelfleet.feeds.checking import RowSpec, as_arrays, row_spec
from modelfleet.feeds.loader_state import with_prefix
from modelfleet.feeds.reading import RawBatch, Readers, SharedLoader, Source, read_ahead
from modelfleet.feeds.sending import send
from modelfleet.feeds.several_steps import group_steps
from modelfleet.trees import leaves, map_tree, rebuild
from modelfleet.types import Data, Json, NativeDevice, Tensor, Tree

Check: TypeAlias = Callable[[Tree], None]
"""Raises for a batch that can't be trained on."""


class LoaderFeed:
    """Batches from one loader for all members (`shared`), or from one loader per member.

    A loader is an iterable of batches that can be read again and again, or a function that returns one. All feeds
    of one `SharedLoader` that step side by side get the same batches. If the members' own batches have rows of
    different shapes, there is one batch per shape (`Batch.others`).

    Batches are checked on the host, where they are read, and then sent to the device.
    """

    rows: np.ndarray | None = None

    def __init__(
        self,
        loaders: SharedLoader | Sequence[Data],
        *,
        labels: Sequence[str],
        device: NativeDevice,
        arrays: ArrayOperations,
    ) -> None:
        self.shared: bool = isinstance(loaders, SharedLoader)
        self.failures: dict[int, Exception] = {}
        self._checks: dict[Hashable, Check] = {}  # of all lanes that read these loaders
        self._members = len(labels)
        self.device = device
        self._arrays = arrays
        self._sender = arrays.sender(device)
        self._readers = loaders.reading if isinstance(loaders, SharedLoader) else Readers()
        self._shared_loader: SharedLoader | None = None
        if isinstance(loaders, SharedLoader):
            self._shared_loader = loaders
            self._sources = [loaders.source]
            loaders.add_conversion(id(arrays), self._send_shared)
        else:
            self._sources = [Source(loader, label) for loader, label in zip(loaders, labels, strict=True)]

    @property
    def settings(self) -> dict[str, Json]:
        """Return nothing: a loader decides itself how it makes batches."""
        return {}

    @property
    def steps(self) -> np.ndarray | None:
        """`(member,)`: steps per epoch; None if a loader does not know."""
        steps = [source.steps for source in self._sources]
        if None in steps:
            return None
        return np.array(steps * self._members if self.shared else steps, dtype=np.int64)

    @property
    def form(self) -> str:
        """Return the parts of the first batch that was read, in words."""
        return next((source.form for source in self._sources if source.form), "")

    def check_batches(self, key: Hashable, check: Check) -> None:
        """Have every batch checked as it is read. Checks with equal keys are the same."""
        self._checks.setdefault(key, check)

    def epoch(self, number: int, *, start: int = 0, several: int = 1) -> Generator[Batch, None, None]:
        """Yield the batches of one epoch, without the first `start`, with up to `several` steps in one."""
        if several > 1:
            return self._several(number, start, several)
        return self._single(number, start)

    def _several(self, number: int, start: int, several: int) -> Generator[Batch, None, None]:
        # A failure is known when its batch is, so what was read before it is yielded first.
        with closing(self._single(number, start)) as batches:
            yield from group_steps(batches, several, self._arrays)

    def _single(self, number: int, start: int) -> Generator[Batch, None, None]:
        if self._shared_loader is not None:
            with closing(self._shared_loader.batches(id(self._arrays), number, start)) as batches:
                for receive, rows in batches:
                    copies = self._shared_loader.readers > 1  # since a model may write to its inputs
                    yield Batch(self._place(receive(), copy=copies), True, np.full(self._members, rows))
            return
        readers = {}
        for position, source in enumerate(self._sources):
            if position not in self.failures:
                try:
                    source.peek()
                    readers[position] = source.read()
                except Exception as error:
                    self.failures[position] = error
        # Failures travel with the batch, so that they are known no earlier than the batch is.
        with closing(read_ahead(self._read_own(readers, start), self._readers)) as steps:
            for receive, failures in steps:
                self.failures.update(failures)
                if receive is not None:
                    yield receive()

    def first(self) -> Batch:
        """Return a batch shaped like those to come. The next epoch yields it again."""
        if self.shared:
            data, rows = self._prepare(self._sources[0].peek(), self._sources[0].label)
            return Batch(self._place(data, copy=True), True, np.full(self._members, rows))
        found, failures = {}, {}
        for position, source in enumerate(self._sources):
            if position not in self.failures:
                try:
                    found[position] = self._prepare(source.peek(), source.label)
                except Exception as error:
                    failures[position] = error
        batch = self._join(found)
        self.failures.update(failures)
        if batch is None:
            raise InputError("no member's data could be read.") from next(iter(self.failures.values()), None)
        return send(self._sender, batch)()

    def state(self) -> dict[str, np.ndarray]:
        """Return where the loaders are at the start of the next epoch."""
        states = [source.state() for source in self._sources]
        return {f"{n}/{name}": value for n, own in enumerate(states) for name, value in own.items()}

    @property
    def has_state(self) -> bool:
        """Return True if a loader has generators of its own, or goes on over several epochs."""
        return any(source.has_state for source in self._sources)

    def rewind(self, state: Mapping[str, np.ndarray]) -> None:
        """Forget the batch that was peeked at: the next epoch opens its loaders again, as they were in `state`."""
        for number, source in enumerate(self._sources):
            source.rewind(with_prefix(state, f"{number}/"))

    def give_up(self) -> None:
        """Wait for no batch any longer."""
        self._readers.give_up()

    def select(self, keep: Sequence[int]) -> "LoaderFeed":
        """Return a feed for the members at these positions, in this order, on the same loaders."""
        chosen = copy(self)
        chosen._members = len(keep)
        chosen.failures = {new: self.failures[old] for new, old in enumerate(keep) if old in self.failures}
        if not self.shared:
            chosen._sources = [self._sources[position] for position in keep]
        return chosen

    def _send_shared(self, raw: RawBatch) -> tuple[Callable[[], Tree], int]:
        """Send a shared batch to the device. Return a function that returns it there, and its number of rows."""
        tree, rows = self._prepare(raw, self._sources[0].label)
        # A copy, since a loader may write its next batch to the same memory.
        return self._sender.send(tree, copy=True), rows

    def _place(self, data: Tree, *, copy: bool) -> Tree:
        return map_tree(lambda leaf: self._arrays.place(leaf, self.device, copy=copy), data)

    def _read_own(
        self, readers: dict[int, Generator[RawBatch, None, None]], start: int
    ) -> Iterator[tuple[Callable[[], Batch] | None, dict[int, Exception]]]:
        """Yield for every step a function that returns the batch of all members, as it is sent to the device.

        With it come the exceptions of the members that failed in the step.
        """
        step = 0
        try:
            while readers:
                found, failures = {}, {}
                for position, reader in list(readers.items()):
                    try:
                        raw = next(reader)
                        if step >= start:
                            found[position] = self._prepare(raw, self._sources[position].label)
                    except StopIteration:
                        del readers[position]
                    except Exception as error:
                        failures[position] = error
                batch = self._join(found)
                for position in failures:
                    readers.pop(position).close()
                if batch is not None or failures:
                    yield None if batch is None else send(self._sender, batch), failures
                step += 1
        finally:
            for reader in readers.values():
                reader.close()

    def _prepare(self, raw: RawBatch, label: str) -> tuple[Tree, int]:
        """Return a batch as checked tensors, wherever they are now, and its number of rows."""
        tree, rows = as_arrays(raw, self._arrays, label)
        data = map_tree(lambda leaf: self._arrays.place(leaf, None), tree)
        self._run_check(data, label)
        return data, rows

    def _run_check(self, data: Tree, label: str) -> None:
        for check in list(self._checks.values()):
            try:
                check(data)
            except InputError as error:
                raise InputError(f"{label}: {error}") from None

    def _join(self, found: dict[int, tuple[Tree, int]]) -> Batch | None:
        """Join the members' own batches into one per shape of rows."""
        by_shape: dict[RowSpec, dict[int, tuple[Tree, int]]] = {}
        for position, own in found.items():
            by_shape.setdefault(row_spec(own[0]), {})[position] = own
        # The most common shape first: trial steps take that one for all.
        batches = [self._stack(own) for own in sorted(by_shape.values(), key=len, reverse=True)]
        return replace(batches[0], others=tuple(batches[1:])) if batches else None

    def _stack(self, found: dict[int, tuple[Tree, int]]) -> Batch:
        """Stack the batches of members whose rows have one shape. The other members sit this batch out."""
        size = max(rows for _, rows in found.values())
        stand_in = next(iter(found))
        columns: list[list[Tensor]] = [[] for _ in leaves(found[stand_in][0])]
        for position in range(self._members):
            tree, rows = found.get(position, found[stand_in])
            padding = None
            if rows < size:
                padding = self._arrays.index(np.arange(size) % rows, None)
            for column, leaf in zip(columns, leaves(tree), strict=True):
                column.append(leaf if padding is None else self._arrays.take(leaf, padding))
        stacked = [self._arrays.stack(column) for column in columns]
        counts = np.array([found[position][1] if position in found else 0 for position in range(self._members)])
        return Batch(rebuild(found[stand_in][0], stacked), False, counts)
