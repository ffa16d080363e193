"""The feed of loaders: anything that yields batches, read in the background while the device computes."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from copy import copy
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, TypeVar

import numpy as np

from modelfleet.errors import InputError
from modelfleet.feeds._base import Arrays, Batch, difference, grouped, settle, spec
from modelfleet.trees import leaves, map_tree, rebuild

T = TypeVar("T")


class LoaderFeed:
    """Batches from one loader for all members (`shared`), or from one loader per member.

    A loader is an iterable of batches that can be read again and again, or a function that returns one. Feeds that
    `select` made of one shared feed and that step side by side read its loader once: they get the same batches.
    `check`, if there is one, is given every batch as it is read, and raises for one that can't be trained on.
    """

    rows: np.ndarray | None = None

    def __init__(
        self, loaders: Sequence[Any], *, wheres: Sequence[str], shared: bool, device: Any, arrays: Arrays
    ) -> None:
        self.shared: bool = shared
        self.failures: dict[int, Exception] = {}
        self.check: Callable[[Any], None] | None = None
        self._members = len(wheres)
        self._sources = [_Source(loader, where) for loader, where in zip(loaders, wheres, strict=False)]
        self.device = device
        self._arrays = arrays
        self._reading = _Reading()

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
        # Opened here and not in the thread: a DataLoader starts its processes best from the caller's, and it
        # draws the seed of its shuffle with its first batch, which must happen at a fixed moment.
        if self.shared:
            with closing(self._reading.batches(number, lambda: self._open(start))) as batches:
                for data, rows in batches:
                    own = map_tree(lambda leaf: self._arrays.place(leaf, self.device), data)
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
        batch = self._own_batch(found, failures)
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

    def _open(self, start: int) -> Generator[tuple[Any, int], None, None]:
        self._sources[0].peek()
        return ahead(self._placed(raw) for step, raw in enumerate(self._sources[0].read()) if step >= start)

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
                batch = self._own_batch(found, failures)
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

    def _own_batch(self, found: dict[int, tuple[Any, int]], failures: dict[int, Exception]) -> Batch | None:
        """One batch from the members' own. Those unlike most of the others are added to `failures`."""
        specs = {member: spec(tree) for member, (tree, _) in found.items()}
        if not specs:
            return None
        expected = Counter(specs.values()).most_common(1)[0][0]
        for member, own in specs.items():
            if own != expected:
                del found[member]
                failures[member] = InputError(
                    f"{self._sources[member].where} does not fit the other members': "
                    f"{difference(own, expected)}. Members that run together need rows of one form."
                )
        size = max(rows for _, rows in found.values())
        stand_in = next(iter(found))
        columns: list[list[Any]] = [[] for _ in expected]
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


class _Reading:
    """One reading of a loader for all that step side by side: a batch is read once, and handed to each of them."""

    def __init__(self) -> None:
        self._batches: Generator[tuple[Any, int], None, None] | None = None
        self._number = -1
        self._index = -1
        self._last: tuple[Any, int] | None = None

    def batches(
        self, number: int, start: Callable[[], Generator[tuple[Any, int], None, None]]
    ) -> Generator[tuple[Any, int], None, None]:
        """The batches of an epoch: of the reading that others of this epoch are at, or of a new one."""
        index = 0
        try:
            while True:
                if index == 0 and (self._number != number or self._index > 0):
                    self._close()
                    self._batches, self._number = start(), number
                if index > self._index:
                    assert self._batches is not None
                    self._last, self._index = next(self._batches, None), index
                if self._last is None:
                    return
                yield self._last
                index += 1
        except GeneratorExit:
            self._close()
            raise

    def _close(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._batches, self._number, self._index, self._last = None, -1, -1, None


class _Source:
    """One loader, opened anew for every epoch. What was peeked at is not lost."""

    def __init__(self, loader: Any, where: str) -> None:
        self.where = where
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self._peeked: list[Any] = []

    @property
    def steps(self) -> int | None:
        """Its number of batches, where it knows."""
        return steps_of(self._loader)

    def open(self) -> None:
        """Begin the coming epoch, if it has not begun."""
        if self._batches is None:
            self._batches = opened(self._loader, self.where)

    def peek(self) -> Any:
        """The first batch of the coming epoch."""
        self.open()
        if not self._peeked:
            batches, self._batches = self._batches, None  # so that after an error the next try begins anew
            assert batches is not None
            for first in batches:
                self._peeked, self._batches = [first], batches
                break
            else:
                raise InputError(
                    f"{self.where} has yielded no batch. Every epoch reads it anew: give a loader "
                    f"with at least one batch, or a function that returns a new iterator at every call."
                )
        return self._peeked[0]

    def forget(self) -> None:
        """Let the coming epoch begin anew."""
        self._batches, self._peeked = None, []

    def read(self) -> Generator[Any, None, None]:
        """The batches of the epoch."""
        first, rest = self.peek(), self._batches
        assert rest is not None
        self._peeked, self._batches = [], None
        yield first
        yield from rest


def opened(loader: Any, where: str) -> Iterator[Any]:
    """The batches of a loader, from the first on."""
    called = callable(loader) and not hasattr(loader, "__iter__")
    batches = loader() if called else loader
    if not hasattr(batches, "__iter__"):
        raise InputError(
            f"{where} is a function that returned {type(batches).__name__}. It must return an iterator of batches."
        )
    return iter(batches)


def steps_of(loader: Any) -> int | None:
    """A loader's number of batches, where it knows."""
    try:
        return len(loader)
    except TypeError:  # no __len__, or a DataLoader over a stream, or a tf.data.Dataset that can't tell
        return None


def ahead(source: Iterator[T], depth: int = 2) -> Generator[T, None, None]:
    """The items of `source`, read by a background thread that is at most `depth` items ahead.

    An exception in `source` is raised here. Closing this generator ends the thread and closes `source`.
    """
    ready: SimpleQueue[tuple[Any, BaseException | None, bool]] = SimpleQueue()
    room = Semaphore(depth)
    closed = False

    def work() -> None:
        try:
            while True:
                room.acquire()
                if closed:
                    break
                ready.put((next(source), None, False))
        except StopIteration:
            ready.put((None, None, True))
        except BaseException as error:  # whatever it is, the reader would wait for ever if it were not told
            ready.put((None, error, True))
        finally:
            if isinstance(source, Generator):
                source.close()

    thread = Thread(target=work, name="modelfleet-feed", daemon=True)
    thread.start()
    try:
        while True:
            item, error, ended = ready.get()
            if error is not None:
                raise error
            if ended:
                return
            room.release()
            yield item
    finally:
        closed = True
        room.release()
        thread.join()
