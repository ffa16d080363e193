"""Reading loaders: in the background while the device computes, and once for all that step side by side."""

from collections.abc import Callable, Generator, Iterator
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, TypeVar

from modelfleet.errors import InputError

T = TypeVar("T")
Converted = dict[int, Any]


class SharedLoader:
    """One loader for all members. It is read once an epoch, whatever lanes and frameworks they are in.

    Everybody that steps side by side gets the same batches. A batch is converted for each framework as it is read,
    for a loader may write its next batch where this one is.
    """

    def __init__(self, loader: Any, where: str) -> None:
        self.source = Source(loader, where)
        self._forms: dict[int, Callable[[Any], Any]] = {}
        self._batches: Generator[Converted, None, None] | None = None
        self.readers = 0
        self._number = -1
        self._index = -1
        self._last: Converted | None = None

    def convert(self, form: int, how: Callable[[Any], Any]) -> None:
        """Have batches in a form: `how` makes it of what the loader gives."""
        self._forms.setdefault(form, how)

    def batches(self, form: int, number: int, start: int) -> Generator[Any, None, None]:
        """The batches of an epoch in a form, without the first `start`: of the reading that others of this epoch
        are at, or of a new one."""
        index = 0
        self.readers += 1
        try:
            while True:
                if index == 0 and (self._number != number or self._index > 0):
                    self._close()
                    self._batches, self._number = self._open(start), number
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
        # Opened here and not in the thread: a DataLoader starts its processes best from the caller's, and it
        # draws the seed of its shuffle with its first batch, which must happen at a fixed moment.
        self.source.peek()
        forms = dict(self._forms)
        return ahead(
            {form: how(raw) for form, how in forms.items()}
            for step, raw in enumerate(self.source.read())
            if step >= start
        )

    def _close(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._batches, self._number, self._index, self._last = None, -1, -1, None


class Source:
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
