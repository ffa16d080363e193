"""Values of the queue: requests, spans of their rows, and batches of spans."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from modelfleet.errors import FleetError, InputError, RowsError
from modelfleet.formatting import count, without_period
from modelfleet.joining import joined
from modelfleet.trees import leaves
from modelfleet.types import Tree

MAX_DISTINCT_ERRORS = 1000  # of a request, that new errors are compared with
Status = Literal["open", "answered", "failed", "cancelled"]
Layout = tuple[object, tuple[object, ...]]
"""Structure of a tree of rows, and dtype and shape of a row at each leaf."""


@dataclass(eq=False)
class Request:
    """Rows that one user submitted at once, and the outcome of each."""

    user: Hashable
    data: Tree = field(repr=False)
    rows: int
    submitted: float
    deadline: float | None = None
    priority: int = 0
    status: Status = "open"
    first_taken: float | None = None
    """Time at which a replica first took a row."""
    last_answered: float | None = None
    """Time at which rows were last answered."""
    answers: dict[tuple[int, int], Tree] = field(default_factory=dict, repr=False)
    """Answers by the rows that they are for: (start, stop)."""
    errors: dict[int, Exception] = field(default_factory=dict)
    """Errors by row. Equal errors are one object."""
    error: Exception | None = None
    """Error of the request, if it failed."""
    updated: bool = False
    """True if the model was replaced meanwhile: some rows may be answered by the old one, some by the new one."""
    layout: Layout | None = field(default=None, repr=False)
    """Set by `rows.layout_of`."""

    # Every row without an outcome is waiting or running. Rows from `next_row` on have never been taken.
    next_row: int = 0
    waiting: int = 0
    running: int = 0

    _distinct: dict[tuple[type, str], Exception] = field(default_factory=dict, repr=False)

    def fail(self, row: int, error: Exception) -> None:
        """Record the error of a row."""
        key = type(error), str(error)
        if len(self._distinct) < MAX_DISTINCT_ERRORS:
            error = self._distinct.setdefault(key, error)
        self.errors[row] = self._distinct.get(key, error)

    def forget(self) -> None:
        """Drop the rows and the answers: the user may keep the future for a long time."""
        self.data = None
        self.answers, self.errors, self._distinct = {}, {}, {}

    @property
    def kept(self) -> tuple[int, ...]:
        """Numbers of the rows that were answered."""
        return tuple(row for start, stop in sorted(self.answers) for row in range(start, stop))

    def joined(self) -> Tree:
        """Return the answers so far, joined in the order of the rows; None if there are none."""
        parts = [self.answers[rows] for rows in sorted(self.answers)]
        if len(parts) <= 1:
            return parts[0] if parts else None
        try:
            return joined(parts, _is_plain_list)
        except (ValueError, TypeError) as error:
            remedy = (
                "The model was replaced while the request was under way, and some rows were answered by each "
                "model: submit the request again."
                if self.updated
                else "Let the model give one array (row, …), or one tree of them, with the same keys and the same "
                "shape per row in every batch."
            )
            raise InputError(
                f"the answers for {count(self.rows, 'row')} of user {self.user!r} came in {len(parts)} batches "
                f"that can't be joined ({error}). {remedy}"
            ) from error

    def failure(self) -> FleetError:
        """Return the error of a request of which some rows failed."""
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
        except Exception as error:  # such as MemoryError: the future needs a result in any case
            message, answers = (
                f"{message} These could not be joined: {type(error).__name__}: {without_period(error)}.",
                None,
            )
        failure = RowsError(message, dict(sorted(self.errors.items())), answers, self.kept)
        failure.__cause__ = failure.rows[min(self.errors)]
        return failure


@dataclass(frozen=True, eq=False)
class RowSpan:
    """Rows `start` to `stop` - 1 of a request."""

    request: Request
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


@dataclass(eq=False)
class RowBatch:
    """Spans that go through the model together. `deaths`: deaths of replicas that these rows are charged with."""

    spans: tuple[RowSpan, ...]
    deaths: int = 0
    replica: str | None = None
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = sum(span.rows for span in self.spans)


@dataclass
class Counts:
    """Numbers of requests by outcome, and of rows that wait or run."""

    submitted: int = 0
    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    waiting: int = 0
    """Open requests with waiting rows: not taken yet, or to be tried again."""
    waiting_rows: int = 0
    running_rows: int = 0

    @property
    def open(self) -> int:
        """Number of requests without an outcome."""
        return self.submitted - self.answered - self.failed - self.cancelled


def open_spans(spans: Iterable[RowSpan]) -> tuple[RowSpan, ...]:
    """Return the spans of open requests."""
    return tuple(span for span in spans if span.request.status == "open")


def split_rows(spans: Iterable[RowSpan], rows: int) -> tuple[tuple[RowSpan, ...], tuple[RowSpan, ...]]:
    """Return the first `rows` rows, and the rest. A span may be cut in two."""
    first: list[RowSpan] = []
    rest: list[RowSpan] = []
    for span in spans:
        middle = span.start + min(rows, span.rows)
        rows -= middle - span.start
        if middle > span.start:
            first.append(RowSpan(span.request, span.start, middle))
        if middle < span.stop:
            rest.append(RowSpan(span.request, middle, span.stop))
    return tuple(first), tuple(rest)


def spans_between(spans: Iterable[RowSpan], start: int, stop: int) -> tuple[RowSpan, ...]:
    """Return the rows at positions `start` to `stop` - 1 of a batch."""
    return split_rows(split_rows(spans, stop)[0], start)[1]


def record_errors(batch: RowBatch, errors: Mapping[int, Exception]) -> dict[Request, int]:
    """Record the errors of a batch's rows, given by position. Return how many rows of each open request failed."""
    failed: dict[Request, int] = {}
    position = 0
    for span in batch.spans if errors else ():
        rows = [row for row in range(span.rows) if position + row in errors]
        if rows and span.request.status == "open":
            for row in rows:
                span.request.fail(span.start + row, errors[position + row])
            failed[span.request] = failed.get(span.request, 0) + len(rows)
        position += span.rows
    return failed


def record_deadly(spans: Iterable[RowSpan], reason: str) -> None:
    """Record that replicas died on all of these rows, the last one for a reason."""
    for span in spans:
        rows = f"row {span.start}" if span.rows == 1 else f"rows {span.start} to {span.stop - 1}"
        error = FleetError(
            f"replicas died repeatedly on {rows} of user {span.request.user!r}, the last one because: {reason}. "
            f"It is not tried again."
        )
        for row in range(span.start, span.stop):
            span.request.fail(row, error)


def _is_plain_list(tree: Tree) -> bool:
    # A list without arrays is itself one answer per row, not a container of outputs.
    return isinstance(tree, list) and not any(hasattr(leaf, "shape") for leaf in leaves(tree))
