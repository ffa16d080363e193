"""What the queue keeps books of: requests, slices of their rows, and batches of slices."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from modelfleet.errors import FleetError, InputError, RowsError
from modelfleet.joining import joined
from modelfleet.trees import leaves
from modelfleet.words import count, without_period

KNOWN = 1000  # different errors of a request that are compared with new ones
Status = Literal["open", "answered", "failed", "cancelled"]


@dataclass(eq=False)
class Request:
    """The rows that one user submitted at once, and what became of them."""

    user: Hashable
    data: Any = field(repr=False)
    rows: int
    submitted: float
    deadline: float | None = None
    priority: int = 0
    status: Status = "open"
    begun: float | None = None
    """When its first row was first taken."""
    latest: float | None = None
    """When rows of it were last answered."""
    pieces: dict[tuple[int, int], Any] = field(default_factory=dict, repr=False)
    """Answers by the rows they are for: (start, stop)."""
    errors: dict[int, Exception] = field(default_factory=dict)
    """What is wrong with a row, by row. Equal errors are one object."""
    error: Exception | None = None
    """Why it failed, when it failed."""
    updated: bool = False
    """Whether the replicas were given another model while it was under way: some rows may be by either."""
    form: Any = field(default=None, repr=False)
    """What its rows look like, as `rows.form` has found it."""

    # Every row without an outcome waits or runs. Those from `cursor` on have never been taken.
    cursor: int = 0
    waiting: int = 0
    running: int = 0

    _known: dict[tuple[type, str], Exception] = field(default_factory=dict, repr=False)

    def fail(self, row: int, error: Exception) -> None:
        """Note the error of a row."""
        key = type(error), str(error)
        if len(self._known) < KNOWN:
            error = self._known.setdefault(key, error)
        self.errors[row] = self._known.get(key, error)

    def forget(self) -> None:
        """Let go of the rows and of the answers: somebody may keep a future for ever."""
        self.data = None
        self.pieces, self.errors, self._known = {}, {}, {}

    @property
    def kept(self) -> tuple[int, ...]:
        """The rows that were answered."""
        return tuple(row for start, stop in sorted(self.pieces) for row in range(start, stop))

    def joined(self) -> Any:
        """The answers that are there, joined in the order of the rows; None if there are none."""
        pieces = [self.pieces[rows] for rows in sorted(self.pieces)]
        if len(pieces) <= 1:
            return pieces[0] if pieces else None
        try:
            return joined(pieces, _is_plain_list)
        except (ValueError, TypeError) as error:
            remedy = (
                "The replicas were given a new model while the request was under way, and some rows were answered "
                "by each: submit it again."
                if self.updated
                else "Let the model give one array (row, …), or one tree of them, with the same keys and the same "
                "shape per row in every batch."
            )
            raise InputError(
                f"the answers for {count(self.rows, 'row')} of user {self.user!r} came in {len(pieces)} batches "
                f"that can't be joined ({error}). {remedy}"
            ) from error

    def failure(self) -> FleetError:
        """The error of a request of which some rows failed."""
        shown = [f"row {row} ({type(e).__name__}: {e})" for row, e in sorted(self.errors.items())[:3]]
        more = f" and {len(self.errors) - 3:,} more" if len(self.errors) > 3 else ""
        message = (
            f"{len(self.errors):,} of {count(self.rows, 'row')} of user {self.user!r} failed: "
            f"{', '.join(shown)}{more}. Fix or remove these rows (all of them are in .rows) and submit them "
            f"again; the answers of the others are in .answers, their numbers in .kept."
        )
        if isinstance(self.data, list | tuple) and len(self.errors) == self.rows:
            message += (
                f" The model was given a {type(self.data).__name__} of {len(self.data)} as that many inputs. If "
                f"these are batches, give iter(them) to mf.map, or submit them one by one."
            )
        try:
            answers = self.joined()
        except InputError as error:
            return error
        except Exception as error:  # memory, say: whoever waits is told, whatever it is
            message, answers = (
                f"{message} These could not be joined: {type(error).__name__}: {without_period(error)}.",
                None,
            )
        failure = RowsError(message, dict(sorted(self.errors.items())), answers, self.kept)
        failure.__cause__ = failure.rows[min(self.errors)]
        return failure


@dataclass(frozen=True, eq=False)
class Slice:
    """The rows from `start` to before `stop` of a request."""

    request: Request
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.stop - self.start


@dataclass(eq=False)
class Batch:
    """Slices that go through the model together. `strikes`: the deaths of replicas these rows are charged with."""

    slices: tuple[Slice, ...]
    strikes: int = 0
    replica: str | None = None
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = sum(piece.rows for piece in self.slices)


def still_open(slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """The slices whose request still waits for its answer."""
    return tuple(piece for piece in slices if piece.request.status == "open")


def cut(slices: Iterable[Slice], rows: int) -> tuple[tuple[Slice, ...], tuple[Slice, ...]]:
    """The first `rows` rows, and the rest; a slice may be cut in two."""
    first: list[Slice] = []
    rest: list[Slice] = []
    for piece in slices:
        middle = piece.start + min(rows, piece.rows)
        rows -= middle - piece.start
        if middle > piece.start:
            first.append(Slice(piece.request, piece.start, middle))
        if middle < piece.stop:
            rest.append(Slice(piece.request, middle, piece.stop))
    return tuple(first), tuple(rest)


def between(slices: Iterable[Slice], start: int, stop: int) -> tuple[Slice, ...]:
    """The rows of a batch from position `start` to before `stop`."""
    return cut(cut(slices, stop)[0], start)[1]


def _is_plain_list(tree: Any) -> bool:
    # A list without arrays is itself one answer per row, not a container of outputs.
    return isinstance(tree, list) and not any(hasattr(leaf, "shape") for leaf in leaves(tree))
