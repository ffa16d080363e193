"""The feed of loaders: anything that yields batches, read in the background while the device computes."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from modelfleet.errors import InputError
from modelfleet.feeds._base import Arrays, Batch, grouped, settle, spec
from modelfleet.feeds.reading import SharedLoader, Source, ahead
from modelfleet.trees import leaves, map_tree, rebuild


class LoaderFeed:
    """Batches from one loader for all members (`shared`), or from one loader per member.

    A loader is an iterable of batches that can be read again and again, or a function that returns one. All feeds
    of one `SharedLoader` that step side by side get the same batches. Where members' own batches have rows of
    unlike shapes, those that are alike come together (`Batch.others`). `check`, if there is one, is given every
    batch as it is read, and raises for one that can't be trained on.
    """

    rows: np.ndarray | None = None

    def __init__(
        self, loaders: SharedLoader | Sequence[Any], *, wheres: Sequence[str], device: Any, arrays: Arrays
    ) -> None:
        self.shared: bool = isinstance(loaders, SharedLoader)
        self.failures: dict[int, Exception] = {}
        self.check: Callable[[Any], None] | None = None
        self._members = len(wheres)
        self.device = device
        self._arrays = arrays
        self._one: SharedLoader | None = None
        if isinstance(loaders, SharedLoader):
            self._one = loaders
            self._sources = [loaders.source]
            loaders.convert(id(arrays), self._placed)
        else:
            self._sources = [Source(loader, where) for loader, where in zip(loaders, wheres, strict=True)]

    @property
    def settings(self) -> dict[str, Any]:
        """Return nothing: how a loader makes its batches is its own affair."""
        return {}

    @property
    def steps(self) -> np.ndarray | None:
        """`(member,)`: steps per epoch, where all loaders know."""
        steps = [source.steps for source in self._sources]
        if None in steps:
            return None
        return np.array(steps * self._members if self.shared else steps, dtype=np.int64)

    def epoch(self, number: int, *, start: int = 0, several: int = 1) -> Generator[Batch, None, None]:
        """The batches of one epoch, without the first `start` of them; up to `several` steps in one."""
        if several > 1:
            return self._several(number, start, several)
        return self._singly(number, start)

    def _several(self, number: int, start: int, several: int) -> Generator[Batch, None, None]:
        # A failure is known when its batch is: so what was read before it is handed on first.
        with closing(self._singly(number, start)) as batches:
            yield from grouped(batches, several, self._arrays)

    def _singly(self, number: int, start: int) -> Generator[Batch, None, None]:
        if self._one is not None:
            with closing(self._one.batches(id(self._arrays), number, start)) as batches:
                for data, rows in batches:
                    several = self._one.readers > 1  # of whom one may write into what it is given
                    own = map_tree(lambda leaf, c=several: self._arrays.place(leaf, self.device, copy=c), data)
                    self._checked(own, self._sources[0].where)
                    yield Batch(own, True, np.full(self._members, rows))
            return
        readers = {}
        for member, source in enumerate(self._sources):
            if member not in self.failures:
                try:
                    source.peek()
                    readers[member] = source.read()
                except Exception as error:
                    self.failures[member] = error
        # What failed travels with the batch, so that it is known no earlier than the batch is.
        with closing(ahead(self._own(readers, start))) as steps:
            for batch, failures in steps:
                self.failures.update(failures)
                if batch is not None:
                    yield batch

    def first(self) -> Batch:
        """A batch shaped like those that will come. The coming epoch has it again."""
        if self.shared:
            data, rows = self._placed(self._sources[0].peek())
            self._checked(data, self._sources[0].where)
            return Batch(data, True, np.full(self._members, rows))
        found, failures = {}, {}
        for member, source in enumerate(self._sources):
            if member not in self.failures:
                try:
                    found[member] = self._settled(source.peek(), source.where)
                except Exception as error:
                    failures[member] = error
        batch = self._own_batch(found)
        self.failures.update(failures)
        if batch is None:
            raise InputError("no member's data could be read.") from next(iter(self.failures.values()), None)
        return batch

    def rewind(self) -> None:
        """Forget the batch that was peeked at: the coming epoch opens its loaders anew."""
        for source in self._sources:
            source.forget()

    def select(self, keep: Sequence[int]) -> "LoaderFeed":
        """A feed for the members at these positions, in this order, on the same loaders."""
        chosen = copy(self)
        chosen._members = len(keep)
        chosen.failures = {new: self.failures[old] for new, old in enumerate(keep) if old in self.failures}
        if not self.shared:
            chosen._sources = [self._sources[member] for member in keep]
        return chosen

    def _placed(self, raw: Any) -> tuple[Any, int]:
        """A shared batch on the device, and its number of rows."""
        tree, rows = settle(raw, self._arrays, self._sources[0].where)
        # A copy, for a loader may write its next batch where this one is.
        return map_tree(lambda leaf: self._arrays.place(leaf, self.device, copy=True), tree), rows

    def _own(
        self, readers: dict[int, Generator[Any, None, None]], start: int
    ) -> Iterator[tuple[Batch | None, dict[int, Exception]]]:
        """Step by step: the batch of all members, and the members that failed in it."""
        step = 0
        try:
            while readers:
                found, failures = {}, {}
                for member, reader in list(readers.items()):
                    try:
                        raw = next(reader)
                        if step >= start:
                            found[member] = self._settled(raw, self._sources[member].where)
                    except StopIteration:
                        del readers[member]
                    except Exception as error:
                        failures[member] = error
                batch = self._own_batch(found)
                for member in failures:
                    readers.pop(member).close()
                if batch is not None or failures:
                    yield batch, failures
                step += 1
        finally:
            for reader in readers.values():
                reader.close()

    def _settled(self, raw: Any, where: str) -> tuple[Any, int]:
        tree, rows = settle(raw, self._arrays, where)
        data = map_tree(lambda leaf: self._arrays.place(leaf, None), tree)
        self._checked(data, where)
        return data, rows

    def _checked(self, data: Any, where: str) -> None:
        if self.check is not None:
            try:
                self.check(data)
            except InputError as error:
                raise InputError(f"{where}: {error}") from None

    def _own_batch(self, found: dict[int, tuple[Any, int]]) -> Batch | None:
        """One batch from the members' own; those whose rows are of one form come together."""
        alike: dict[Any, dict[int, tuple[Any, int]]] = {}
        for member, own in found.items():
            alike.setdefault(spec(own[0]), {})[member] = own
        # Most first: they stand in for the others, in the trials that a batch is used for, too.
        batches = [self._stacked(own) for own in sorted(alike.values(), key=len, reverse=True)]
        return replace(batches[0], others=tuple(batches[1:])) if batches else None

    def _stacked(self, found: dict[int, tuple[Any, int]]) -> Batch:
        """A batch of members whose rows are of one form; the others sit it out."""
        size = max(rows for _, rows in found.values())
        stand_in = next(iter(found))
        columns: list[list[Any]] = [[] for _ in leaves(found[stand_in][0])]
        for member in range(self._members):
            tree, rows = found.get(member, found[stand_in])
            padding = None
            if rows < size:
                padding = self._arrays.index(np.arange(size) % rows, None)
            for column, leaf in zip(columns, leaves(tree), strict=True):
                column.append(leaf if padding is None else self._arrays.take(leaf, padding))
        stacked = [self._arrays.place(self._arrays.stack(column), self.device) for column in columns]
        counts = np.array([found[member][1] if member in found else 0 for member in range(self._members)])
        return Batch(rebuild(found[stand_in][0], stacked), False, counts)
