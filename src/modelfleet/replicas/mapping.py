"""`map` and `imap`: a model over the data of many users, offline."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence

from modelfleet.each import Each
from modelfleet.errors import FleetError, InputError
from modelfleet.feeds import is_loader
from modelfleet.replicas.options import Balance, Isolation
from modelfleet.replicas.pool import Replicas
from modelfleet.replicas.progress_bar import Progress, ProgressBar, progress_bar
from modelfleet.replicas.reading import Reading, outcome
from modelfleet.replicas.row_limit import MAX_BATCHES
from modelfleet.replicas.rows import rows_of
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Data, Model, Precision, Tree

PROGRESS_INTERVAL = 0.5  # seconds
SECONDS_AT_ONCE = 0.1  # of work that a replica is given at once: offline, no user waits for a single row
# In units of the rows that all replicas can be given at once:
STREAM_ROWS_AHEAD = 2  # rows of streams that are read ahead
ARRAY_ROWS_AHEAD = 4  # rows of arrays that wait in the queue at least, while there are more
MAX_UNCLAIMED = 4  # rows that are answered before the caller takes their answers from `imap`

Answer = tuple[Hashable, Tree, int, bool]
"""User, the answers or an error, the number of rows, and True for the user's last."""


class Answers(dict[Hashable, Tree]):
    """Answers by user, in the order of the data. Users that failed are in `failed` instead.

    Attributes:
        failed: The error of each user that failed. A `RowsError` has the answers of the rows that did not fail.

    Example:
        answers = mf.map(model, users)
        for user, error in answers.failed.items():
            print(user, error)
    """

    def __init__(self) -> None:
        super().__init__()
        self.failed: dict[Hashable, Exception] = {}

    def __missing__(self, user: Hashable) -> Tree:
        if user in self.failed:
            raise FleetError(f"user {user!r} has no answers: {self.failed[user]}") from self.failed[user]
        raise KeyError(user)


def map(
    model: Model,
    data: Data,
    *,
    devices: str | Sequence[str] = "auto",
    batch_size: int = 32,
    balance: Balance = "least-busy",
    isolation: Isolation = "rows",
    precision: Precision = "float32",
    timeout: float = 120.0,
    start_timeout: float = 300.0,
    progress: Progress = "auto",
) -> Answers:
    """Return a model's answers to every user's rows, computed on all devices at once.

    Args:
        model: As for `Replicas`.
        data: `mf.each({user: rows})`, or a plain mapping. Rows are an array `(row, …)` or a tree of arrays; or a
            stream of batches: a `DataLoader` or any iterable of batches, a `tf.data.Dataset`, or a function that
            returns an iterator. Streams are read as their rows are needed. The y of an (x, y) batch is ignored.
        devices: As for `Replicas`.
        batch_size: As for `Replicas`.
        balance: As for `Replicas`.
        isolation: As for `Replicas`.
        precision: As for `Replicas`.
        timeout: As for `Replicas`.
        start_timeout: As for `Replicas`.
        progress: True shows a progress bar, "auto" shows it on a terminal only.

    Returns:
        The answers by user. Users whose data failed are in its `failed`; the others are not affected.

    Raises:
        InputError: If the data or an option can't be used.
        FleetError: If no replica can be started.

    Example:
        answers = mf.map(model, mf.each({"ada": x1, "bob": x2}), devices="cuda:0,cuda:1")
    """
    users = _users(data)
    found: dict[Hashable, Tree] = {}
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
    model: Model,
    data: Data,
    *,
    devices: str | Sequence[str] = "auto",
    batch_size: int = 32,
    balance: Balance = "least-busy",
    isolation: Isolation = "rows",
    precision: Precision = "float32",
    timeout: float = 120.0,
    start_timeout: float = 300.0,
    progress: Progress = "auto",
    partial: bool = False,
) -> Iterator[tuple[Hashable, Tree]]:
    """Yield a model's answers to every user's rows, as they are computed.

    Memory holds only a few rows of the users' streams at a time, and the answers of the users whose streams are
    being read. Only a few answers are computed ahead, so if you take them slowly, the replicas slow down, too.

    Args:
        model: As for `Replicas`.
        data: As for `map`.
        devices: As for `Replicas`.
        batch_size: As for `Replicas`.
        balance: As for `Replicas`.
        isolation: As for `Replicas`.
        precision: As for `Replicas`.
        timeout: As for `Replicas`.
        start_timeout: As for `Replicas`.
        progress: As for `map`.
        partial: Yield the answers of a stream batch by batch, in its order, so that endless streams have answers,
            too. An error numbers the failed rows of its batch from the first row of the stream. The last item of
            every user is (user, None), even for arrays. If a stream raises, the error comes just before that.

    Returns:
        An iterator of (user, array), or (user, error) for a user that failed.

    Raises:
        InputError: If the data or an option can't be used.
        FleetError: If no replica can be started.

    Example:
        for user, answer in mf.imap(model, {"ada": x1, "bob": x2}):
            print(user, answer if isinstance(answer, Exception) else answer.shape)
    """
    users = _users(data)
    shown = progress_bar(progress)
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
    for driver in replicas._drivers:
        driver.batch_count.seconds_at_once = SECONDS_AT_ONCE
    room = len(replicas._drivers) * batch_size * MAX_BATCHES
    return _AnswerStream(replicas, _answers(replicas, users, shown, room, partial))


class _AnswerStream(Iterator[tuple[Hashable, Tree]]):
    """Iterator of `imap`. Dropping it closes the replicas."""

    def __init__(self, replicas: Replicas, answers: Generator[tuple[Hashable, Tree], None, None]) -> None:
        self._replicas, self._answers = replicas, answers

    def __next__(self) -> tuple[Hashable, Tree]:
        self._replicas._state.refuse_inherited()
        return next(self._answers)

    def close(self) -> None:
        """Close the replicas."""
        if self._replicas._state.inherited:
            return
        self._answers.close()
        self._replicas.close(wait=False)

    def __del__(self) -> None:
        self.close()


class _Unclaimed:
    """Answers that the caller has not taken. While there are many of them, the replicas take no more rows."""

    def __init__(self, replicas: Replicas, max_rows: int) -> None:
        self._state, self._max_rows = replicas._state, max_rows
        self._answers: deque[Answer] = deque()
        self._added = threading.Condition()
        self._rows = 0
        self._state.is_paused = lambda: self._rows >= max_rows

    def put(self, user: Hashable, answer: Tree, rows: int, last: bool) -> None:
        """Add an answer."""
        with self._added:
            self._answers.append((user, answer, rows, last))
            self._rows += rows
            self._added.notify()

    def get(self, seconds: float | None = None) -> Answer | None:
        """Return the next answer; None if there is none within `seconds`."""
        with self._added:
            if not self._added.wait_for(lambda: bool(self._answers), seconds):
                return None
            found = self._answers.popleft()
            paused = self._rows >= self._max_rows
            self._rows -= found[2]
        if paused:
            self._state.wake()
        return found


class _ArraySubmitter:
    """Submits users with arrays a few at a time, those with the fewest rows first, so that answers come early."""

    def __init__(self, replicas: Replicas, max_rows: int, report: Callable[[Hashable, Tree, int], None]) -> None:
        self._state, self._max_rows, self._report = replicas._state, max_rows, report
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Hashable, Tree, int]] = deque()
        self.rows = 0
        """Number of rows of all users."""

    def add(self, user: Hashable, data: Tree) -> None:
        """Add a user's arrays."""
        found, rows = rows_of(data, user)
        self._waiting.append((user, found, rows))
        self.rows += rows

    def start(self) -> None:
        """Submit the first users, and others as the replicas take rows."""
        self._waiting = deque(sorted(self._waiting, key=lambda one: one[2]))
        self._state.on_rows_taken = self.submit_more
        self.submit_more()

    def submit_more(self) -> None:
        """Submit users until enough rows wait."""
        with self._lock:
            while self._waiting and self._state.rows_ahead() < self._max_rows:
                user, data, rows = self._waiting.popleft()
                try:
                    future = self._state.submit(user, data, rows)
                except FleetError as error:
                    self._report(user, error, 0)
                else:
                    future.add_done_callback(
                        lambda ended, user=user, rows=rows: self._report(user, outcome(ended), rows)
                    )


def _answers(
    replicas: Replicas, users: Mapping[Hashable, Data], shown: ProgressBar, room: int, partial: bool
) -> Generator[tuple[Hashable, Tree], None, None]:
    unclaimed = _Unclaimed(replicas, MAX_UNCLAIMED * room)
    reading: Reading | None = None
    framework = replicas._framework

    def report(user: Hashable, answer: Tree, rows: int) -> None:
        """Add the outcome of a user with arrays."""
        unclaimed.put(user, answer, rows, last=not partial)
        if partial:
            unclaimed.put(user, None, 0, last=True)

    arrays = _ArraySubmitter(replicas, ARRAY_ROWS_AHEAD * room, report)
    streams: dict[Hashable, Data] = {}
    iterators: dict[int, Hashable] = {}  # the user of each
    left, failed, answered = len(users), 0, False
    try:
        for user, data in users.items():
            try:
                # Iterators are allowed here, because data are read only once.
                if isinstance(data, Iterator):
                    _check_own_iterator(iterators.setdefault(id(data), user), user)
                    streams[user] = data
                elif is_loader(data, framework.arrays, f"the data of user {user!r}"):
                    streams[user] = data
                else:
                    arrays.add(user, data)
            except FleetError as error:
                report(user, error, 0)
        arrays.start()
        reading = Reading(
            replicas._state,
            streams,
            max_rows=STREAM_ROWS_AHEAD * room,
            inputs=framework.inputs,
            report=unclaimed.put,
            partial=partial,
        )
        with shown(replicas, arrays.rows, reading) as show:
            while left:
                show(failed)
                found = unclaimed.get(PROGRESS_INTERVAL)
                if found is None:
                    continue
                user, answer, rows, last = found
                left -= last
                failed += isinstance(answer, Exception)
                answered = answered or not _is_no_answer(answer)
                if replicas.failure is not None and not answered:
                    rest = _drain(unclaimed, left)
                    if all(_is_no_answer(other[1]) for other in rest):  # not a user's fault
                        raise replicas.failure
                    answered = True
                    for other in rest if partial else sorted(rest, key=lambda other: _is_no_answer(other[1])):
                        unclaimed.put(*other)  # users with answers first
                if user in streams:
                    reading.claimed(user, rows, last)
                del found
                yield user, answer
            show(failed)
    finally:
        if reading is not None and not replicas._state.inherited:
            reading.close()
        replicas.close(wait=not left)


def _check_own_iterator(first: Hashable, user: Hashable) -> None:
    if first != user:
        raise InputError(
            f"users {first!r} and {user!r} have the same iterator as their data, and each batch of it would go to "
            f"one of them by chance. Give each its own iterator, or a function that returns one."
        )


def _drain(unclaimed: _Unclaimed, left: int) -> list[Answer]:
    """Return all answers of the `left` users that have not ended, when no replica is left to answer more."""
    rest: list[Answer] = []
    while left:
        found = unclaimed.get()
        assert found is not None
        rest.append(found)
        left -= found[3]
    return rest


def _is_no_answer(answer: Tree) -> bool:
    return answer is None or isinstance(answer, Exception)


def _is_empty(answer: Tree) -> bool:
    found = leaves(answer)
    return bool(found) and not len(found[0])


def _users(data: Data) -> Mapping[Hashable, Data]:
    if isinstance(data, Each):
        data = data.values
        if isinstance(data, list):
            data = {str(number): rows for number, rows in enumerate(data)}
    if not isinstance(data, Mapping):
        raise InputError(
            f"the data are a {type(data).__name__}; expected mf.each({{user: rows}}). Give every "
            f"user's rows by name."
        )
    if not data:
        raise InputError("there are no users in the data. Give mf.each({user: rows}) with at least one.")
    return data
