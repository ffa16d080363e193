"""`map` and `imap`: a model over the data of many users, offline."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from modelfleet.each import Each
from modelfleet.errors import FleetError, InputError
from modelfleet.feeds import is_loader
from modelfleet.replicas.driver import MOST_AT_ONCE
from modelfleet.replicas.pool import Replicas
from modelfleet.replicas.reading import Reading, outcome
from modelfleet.replicas.rows import rows_of
from modelfleet.trees import leaves, map_tree
from modelfleet.words import count

LOOK = 0.5  # seconds between two looks at the progress
SPAN = 0.1  # seconds of work that a replica is given at once: here nobody waits for a single row
AHEAD = 2  # times what all replicas can be given at once: so many rows of streams are read before their turn
WAITING = 4  # times that: so many rows of arrays wait for their turn at least, while there are more
UNCLAIMED = 4  # times that: so many rows are answered before their user is taken from `imap`


class Answers(dict[Hashable, Any]):
    """Every user's answers, in the order of the data. Users that failed are not in it, but in `failed`."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: dict[Hashable, Exception] = {}
        """What went wrong, by user. A `RowsError` has the answers of the rows that did not fail."""

    def __missing__(self, user: Hashable) -> Any:
        if user in self.failed:
            raise FleetError(f"user {user!r} has no answers: {self.failed[user]}") from self.failed[user]
        raise KeyError(user)


def map(
    model: Any,
    data: Any,
    *,
    devices: str | Sequence[str] = "auto",
    batch_size: int = 32,
    balance: str = "least-busy",
    isolation: str = "rows",
    precision: str = "float32",
    timeout: float = 120.0,
    start_timeout: float = 300.0,
    progress: str | bool = "auto",
) -> Answers:
    """A model's answers to every user's rows, computed on all devices at once: {user: array}.

    data: `mf.each({user: rows})`, or a plain mapping. Rows are an array `(row, …)` or a tree of arrays; or a
        stream of batches: a `DataLoader` or any iterable of batches, a `tf.data.Dataset`, a function that returns
        an iterator. Streams are read as their rows are needed; of an (x, y) batch the y is left aside.
    The rest is as for `Replicas`. A user whose data fail is in `.failed` of the result; the others go on.

        answers = mf.map(model, mf.each({"ada": x1, "bob": x2}), devices="cuda:0,cuda:1")
    """
    users = _users(data)
    found: dict[Hashable, Any] = {}
    answers = Answers()
    stream = imap(
        model,
        users,
        devices=devices,
        batch_size=batch_size,
        balance=balance,
        isolation=isolation,
        precision=precision,
        timeout=timeout,
        start_timeout=start_timeout,
        progress=progress,
    )
    for user, answer in stream:
        if isinstance(answer, Exception):
            answers.failed[user] = answer
        else:
            found[user] = answer
    some = next((answer for answer in found.values() if not _is_empty(answer)), None)
    for user in users:
        if user in found:
            empty = some is not None and _is_empty(found[user])
            answers[user] = map_tree(lambda leaf: leaf[:0], some) if empty else found[user]
    return answers


def imap(
    model: Any,
    data: Any,
    *,
    devices: str | Sequence[str] = "auto",
    batch_size: int = 32,
    balance: str = "least-busy",
    isolation: str = "rows",
    precision: str = "float32",
    timeout: float = 120.0,
    start_timeout: float = 300.0,
    progress: str | bool = "auto",
    partial: bool = False,
) -> Iterator[tuple[Hashable, Any]]:
    """As `map`, but the answers as they come: (user, array), or (user, error) for one that failed.

    Of users' streams only few rows are in memory, and the answers of the users that are being read. Whoever takes
    the answers slowly holds up the replicas: only few are computed ahead.

    partial: the answers of a stream batch by batch, in its order, so that endless streams have answers, too:
        (user, array) for each batch, or (user, error) for one of which rows failed, numbered from the first of the
        stream. The last of every user is (user, None), also of one with arrays; if the stream raised, the error
        comes just before it.
    """
    users = _users(data)
    shown = _shown(progress)
    replicas = Replicas(
        model,
        devices=devices,
        max_queue=None,
        batch_size=batch_size,
        balance=balance,
        isolation=isolation,
        precision=precision,
        timeout=timeout,
        start_timeout=start_timeout,
    )
    replicas._span = SPAN
    room = len(replicas.stats().replicas) * batch_size * MOST_AT_ONCE
    return _Stream(replicas, _answers(replicas, users, shown, room, partial))


class _Stream(Iterator[tuple[Hashable, Any]]):
    """The answers as they come. Whoever drops it has dropped the replicas, too."""

    def __init__(self, replicas: Replicas, answers: Generator[tuple[Hashable, Any], None, None]) -> None:
        self._replicas, self._answers = replicas, answers

    def __next__(self) -> tuple[Hashable, Any]:
        self._replicas._refuse_inherited()
        return next(self._answers)

    def close(self) -> None:
        """Ask for no more."""
        if self._replicas._inherited:
            return
        self._answers.close()
        self._replicas.close(wait=False)

    def __del__(self) -> None:
        self.close()


class _Done:
    """Answers that were not handed out. While there are many of them, the replicas take no more rows."""

    def __init__(self, replicas: Replicas, most: int) -> None:
        self._replicas, self._most = replicas, most
        self._found: deque[tuple[Hashable, Any, int, bool]] = deque()
        self._news = threading.Condition()
        self._rows = 0
        replicas._stalled = lambda: self._rows >= most

    def put(self, user: Hashable, answer: Any, rows: int, last: bool) -> None:
        """Note an answer."""
        with self._news:
            self._found.append((user, answer, rows, last))
            self._rows += rows
            self._news.notify()

    def get(self, seconds: float | None = None) -> tuple[Hashable, Any, int, bool] | None:
        """The next answer; None if there is none within so many seconds."""
        with self._news:
            if not self._news.wait_for(lambda: bool(self._found), seconds):
                return None
            found = self._found.popleft()
            stalled = self._rows >= self._most
            self._rows -= found[2]
        if stalled:
            self._replicas._wake()
        return found


class _Turns:
    """Submits users with arrays a few at a time, those with the fewest rows first: so the first are done soon."""

    def __init__(self, replicas: Replicas, most: int, told: Callable[[Hashable, Any, int], None]) -> None:
        self._replicas, self._most, self._told = replicas, most, told
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Hashable, Any, int]] = deque()
        self.rows = 0
        """Of all users."""

    def add(self, user: Hashable, data: Any) -> None:
        """Note a user's arrays."""
        found, rows = rows_of(data, user)
        self._waiting.append((user, found, rows))
        self.rows += rows

    def begin(self) -> None:
        """Submit the first, and others as the replicas take rows."""
        self._waiting = deque(sorted(self._waiting, key=lambda one: one[2]))
        self._replicas._hungry = self.more
        self.more()

    def more(self) -> None:
        """Submit users until enough rows wait."""
        with self._lock:
            while self._waiting and (self._replicas._ahead() < self._most):
                user, data, rows = self._waiting.popleft()
                try:
                    future = self._replicas._submit(user, data, rows)
                except FleetError as error:
                    self._told(user, error, 0)
                else:
                    future.add_done_callback(
                        lambda ended, user=user, rows=rows: self._told(user, outcome(ended), rows)
                    )


def _answers(
    replicas: Replicas, users: Mapping[Hashable, Any], shown: Any, room: int, partial: bool
) -> Generator[tuple[Hashable, Any], None, None]:
    done = _Done(replicas, UNCLAIMED * room)
    reading: Reading | None = None
    framework = replicas._framework

    def told(user: Hashable, answer: Any, rows: int) -> None:
        """The outcome of a user with arrays."""
        done.put(user, answer, rows, last=not partial)
        if partial:
            done.put(user, None, 0, last=True)

    turns = _Turns(replicas, WAITING * room, told)
    streams: dict[Hashable, Any] = {}
    iterators: dict[int, Hashable] = {}  # whose each is
    left, failed, answered = len(users), 0, False
    try:
        for user, data in users.items():
            try:
                # An iterator will do here: data are read only once.
                where = f"the data of user {user!r}"
                if isinstance(data, Iterator):
                    _refuse_second(iterators.setdefault(id(data), user), user)
                if isinstance(data, Iterator) or is_loader(data, framework.arrays, where):
                    streams[user] = data
                else:
                    turns.add(user, data)
            except FleetError as error:
                told(user, error, 0)
        turns.begin()
        inputs = framework.inputs
        reading = Reading(replicas, streams, room=AHEAD * room, inputs=inputs, told=done.put, partial=partial)
        with shown(replicas, turns.rows, reading) as show:
            while left:
                show(failed)
                found = done.get(LOOK)
                if found is None:
                    continue
                user, answer, rows, last = found
                left -= last
                failed += isinstance(answer, Exception)
                answered = answered or not _is_no_answer(answer)
                if replicas.failure is not None and not answered:
                    rest = _rest(done, left)
                    if all(_is_no_answer(other[1]) for other in rest):  # no user's fault, and no use
                        raise replicas.failure
                    answered = True
                    for other in rest if partial else sorted(rest, key=lambda other: _is_no_answer(other[1])):
                        done.put(*other)  # those with answers first
                if user in streams:
                    reading.handed_out(user, rows, last)
                del found
                yield user, answer
            show(failed)
    finally:
        if reading is not None and not replicas._inherited:
            reading.close()
        replicas.close(wait=not left)


def _refuse_second(first: Hashable, user: Hashable) -> None:
    if first != user:
        raise InputError(
            f"users {first!r} and {user!r} have the same iterator as their data, and each batch of it would go to "
            f"one of them by chance. Give each an iterator of its own, or a function that returns one."
        )


def _rest(done: _Done, left: int) -> list[tuple[Hashable, Any, int, bool]]:
    """What is still to be handed out, when no replica is left to answer more, of so many users."""
    rest: list[tuple[Hashable, Any, int, bool]] = []
    while left:
        found = done.get()
        assert found is not None
        rest.append(found)
        left -= found[3]
    return rest


def _is_no_answer(answer: Any) -> bool:
    return answer is None or isinstance(answer, Exception)


def _is_empty(answer: Any) -> bool:
    found = leaves(answer)
    return bool(found) and not len(found[0])


def _users(data: Any) -> Mapping[Hashable, Any]:
    values: Any = data.values if isinstance(data, Each) else data
    if isinstance(values, list) and isinstance(data, Each):
        values = {str(number): rows for number, rows in enumerate(values)}
    if not isinstance(values, Mapping):
        raise InputError(
            f"the data are a {type(values).__name__}; expected mf.each({{user: rows}}): every user's rows by name."
        )
    if not values:
        raise InputError("there are no users in the data. Give mf.each({user: rows}) with at least one.")
    return values


def _shown(progress: str | bool) -> Callable[..., AbstractContextManager[Callable[[int], None]]]:
    """What shows the progress, told how many users have failed: a bar on a terminal, nothing elsewhere."""
    if progress not in ("auto", True, False):
        raise InputError(f'progress is {progress!r}, expected "auto", True or False.')

    @contextmanager
    def shown(replicas: Replicas, rows: int, reading: Reading) -> Iterator[Callable[[int], None]]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console()
        if not progress or (progress == "auto" and not console.is_interactive):
            yield lambda failed: None
            return
        columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task("", total=None)

            def show(failed: int) -> None:
                more = reading.rows()
                done = sum(replica.rows for replica in replicas.stats().replicas.values())
                text = f"{count(failed, 'user')} failed" if failed else ""
                bar.update(task, completed=done, total=None if more is None else rows + more, description=text)

            yield show

    return shown
