"""Reading loaders: in the background while the device computes, and once for all lanes that step side by side."""

import inspect
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, TypeAlias, TypeVar

import numpy as np

from modelfleet.errors import InputError
from modelfleet.feeds.checking import form_of
from modelfleet.feeds.loader_state import LoaderState, has_state, loader_state, restore_loader
from modelfleet.types import Data

T = TypeVar("T")

RawBatch: TypeAlias = Any
"""Batch as a user's loader yields it."""
Converted: TypeAlias = dict[int, Any]
"""One batch in the form of every framework that reads it."""
PATIENCE = 2.0
"""Seconds for which a reader that is given up may still take for the batch that it is at."""


class Readers:
    """The readers of a feed. Ctrl-C gives them up: then nobody waits for a loader that may hang."""

    def __init__(self) -> None:
        self.given_up = False
        self._waiting: set[SimpleQueue[Any]] = set()

    def give_up(self) -> None:
        """Have `read_ahead` raise KeyboardInterrupt in threads that wait for a batch. Any thread may call this."""
        self.given_up = True
        for ready in list(self._waiting):
            ready.put((None, KeyboardInterrupt(), True))

    def add(self, ready: SimpleQueue[Any]) -> None:
        """Remember a queue that a thread waits at."""
        self._waiting.add(ready)
        if self.given_up:
            ready.put((None, KeyboardInterrupt(), True))

    def remove(self, ready: SimpleQueue[Any]) -> None:
        """Forget a queue."""
        self._waiting.discard(ready)


class SharedLoader:
    """One loader for all members. It is read once per epoch, whatever lanes and frameworks the members are in.

    All lanes that step side by side get the same batches. Each batch is converted for every framework as soon as
    it is read, since a loader may write its next batch to the same memory.
    """

    def __init__(self, loader: Data, label: str) -> None:
        self.source = Source(loader, label)
        self.reading = Readers()
        self.readers = 0
        self._conversions: dict[int, Callable[[RawBatch], Any]] = {}
        self._batches: Generator[Converted, None, None] | None = None
        self._epoch = -1
        self._index = -1
        self._last: Converted | None = None

    def add_conversion(self, form: int, convert: Callable[[RawBatch], Any]) -> None:
        """Have every batch converted by `convert`, for `batches(form, …)`."""
        self._conversions.setdefault(form, convert)

    def batches(self, form: int, epoch: int, start: int) -> Generator[Any, None, None]:
        """Yield the batches of an epoch in one form, without the first `start`.

        Readers of the same epoch share one pass over the loader.
        """
        index = 0
        self.readers += 1
        try:
            while True:
                if index == 0 and (self._epoch != epoch or self._index > 0):
                    self._close()
                    self._batches, self._epoch = self._open(start), epoch
                if index > self._index:
                    assert self._batches is not None
                    self._last, self._index = next(self._batches, None), index
                if self._last is None:
                    return
                yield self._last[form]
                index += 1
        finally:
            self.readers -= 1
            if not self.readers:
                self._close()

    def _open(self, start: int) -> Generator[Converted, None, None]:
        # Opened here and not in the thread: a DataLoader starts its processes best from the caller's thread, and
        # it draws the seed of its shuffle with its first batch, which must happen at a fixed moment.
        self.source.peek()
        conversions = dict(self._conversions)
        converted = (
            {form: convert(raw) for form, convert in conversions.items()}
            for step, raw in enumerate(self.source.read())
            if step >= start
        )
        return read_ahead(converted, self.reading)

    def _close(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._batches, self._epoch, self._index, self._last = None, -1, -1, None


class Source:
    """One loader, opened again for every epoch. A batch that was peeked at is not lost."""

    def __init__(self, loader: Data, label: str) -> None:
        self.label = label
        self.form = ""
        """Parts of its batches, in words; empty before the first one."""
        self._loader = loader
        self._batches: Iterator[RawBatch] | None = None
        self._peeked: list[RawBatch] = []
        self._opened_at: LoaderState = {}

    @property
    def steps(self) -> int | None:
        """Number of batches; None if the loader does not know."""
        return batch_count(self._loader)

    def open(self) -> None:
        """Begin the next epoch, if it has not begun."""
        if self._batches is None:
            self._opened_at = loader_state(self._loader)
            self._batches = open_loader(self._loader, self.label)

    def peek(self) -> RawBatch:
        """Return the first batch of the next epoch, which `read` will yield again."""
        self.open()
        if not self._peeked:
            batches, self._batches = self._batches, None  # after an error, the next try opens the loader again
            assert batches is not None
            for first in batches:
                self._peeked, self._batches, self.form = [first], batches, form_of(first)
                break
            else:
                raise InputError(
                    f"{self.label} has yielded no batch. Every epoch reads it again: give a loader "
                    f"with at least one batch, or a function that returns a new iterator at every call."
                )
        return self._peeked[0]

    def state(self) -> LoaderState:
        """Return where the loader is at the start of the next epoch, which may have been peeked at."""
        return loader_state(self._loader) if self._batches is None else self._opened_at

    @property
    def has_state(self) -> bool:
        """Return True if the loader has state of its own."""
        return has_state(self._loader)

    def rewind(self, state: Mapping[str, np.ndarray]) -> None:
        """Drop what was read of the next epoch. It will open the loader again, as it was in `state`."""
        self._batches, self._peeked = None, []
        restore_loader(self._loader, state)

    def read(self) -> Generator[RawBatch, None, None]:
        """Yield the batches of the epoch."""
        first, rest = self.peek(), self._batches
        assert rest is not None
        self._peeked, self._batches = [], None
        yield first
        yield from rest


def open_loader(loader: Data, label: str) -> Iterator[RawBatch]:
    """Return an iterator over the batches of a loader, from the first one."""
    is_function = callable(loader) and not hasattr(loader, "__iter__")
    if is_function and _needs_arguments(loader):
        raise InputError(
            f"{label} is a function that takes arguments. It is called without any, once an epoch: give a "
            f"function without arguments that returns an iterator of batches, such as lambda: batches(...)."
        )
    batches = loader() if is_function else loader
    if not hasattr(batches, "__iter__"):
        raise InputError(
            f"{label} is a function that returned {type(batches).__name__}. It must return an iterator of batches."
        )
    return iter(batches)


def _needs_arguments(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # a builtin that does not tell
        return False
    return False


def batch_count(loader: Data) -> int | None:
    """Return a loader's number of batches; None if the loader does not know."""
    try:
        return len(loader)
    except TypeError:  # no __len__, or a DataLoader over a stream, or a tf.data.Dataset of unknown length
        return None


def read_ahead(source: Iterator[T], readers: Readers | None = None, depth: int = 2) -> Generator[T, None, None]:
    """Yield the items of `source`, which a background thread reads up to `depth` items ahead.

    An exception in `source` is raised here. Closing this generator ends the thread and closes `source`. After
    Ctrl-C the thread is left behind if it is still reading, because a source that hangs would hold up the end for
    ever. Ctrl-C is a KeyboardInterrupt here or where this generator is closed, or `readers.give_up`.
    """
    readers = readers or Readers()
    around = sys.exc_info()[1]
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
        except BaseException as error:  # of any kind: without a message, the reader would wait forever
            ready.put((None, error, True))
        finally:
            if isinstance(source, Generator):
                source.close()

    thread = Thread(target=work, name="modelfleet-feed", daemon=True)
    thread.start()
    readers.add(ready)
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
        readers.remove(ready)
        closed = True
        room.release()
        thread.join(PATIENCE if readers.given_up or _is_interrupted(around) else None)


def _is_interrupted(around: BaseException | None) -> bool:
    """Return True if a KeyboardInterrupt is on its way, here or where a generator is being closed for it.

    Args:
        around: The exception that was being handled before, which has nothing to do with it.
    """
    error = sys.exc_info()[1]
    while error is not None and error is not around:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False
