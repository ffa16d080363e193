"""Progress of a fit: one live table on a terminal, plain lines elsewhere, or nothing."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Protocol

from modelfleet.errors import InputError
from modelfleet.history import History, direction
from modelfleet.words import count, duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table

_WINDOW = 10.0  # seconds over which the speed is averaged: compiled code may take over at any time
_DRAW_EVERY = 0.25
_PRINT_EVERY = 2.0
_SHARE = 0.02  # of the time may go into drawing
_MOST_MEMBERS, _MOST_FAILURES, _MOST_METRICS = 5, 3, 6


class Reporter(Protocol):
    """What a fit tells about its progress. Epochs count from 1; whatever happens, `end` is called."""

    def start(
        self, names: Sequence[str], epochs: int, steps_per_epoch: int | None, rows_per_epoch: int | None
    ) -> None:
        """A fit starts. The rows are those of all members together; None: not known."""
        ...

    def step(self, done: int, epoch: int, note: str | None = None) -> None:
        """So many steps of this epoch are done; the note says what else is going on."""
        ...

    def epoch(self, epoch: int, history: History, active: Sequence[str], seconds: float) -> None:
        """An epoch is done and recorded, and took so long; `active` still train."""
        ...

    def end(self, history: History, seconds: float, stopped_by: str | None = None) -> None:
        """The fit is over, and took so long; `stopped_by` says what cut it short."""
        ...


def reporter(
    progress: str | bool = "auto",
    *,
    console: "Console | None" = None,
    clock: Callable[[], float] = time.monotonic,
) -> Reporter:
    """The reporter that a fit's `progress` asks for: "auto" or True shows it, False keeps silent."""
    if progress is False:
        return Silent()
    if progress is not True and progress != "auto":
        raise InputError(f'progress is {progress!r}, expected "auto", True or False.')
    if console is None:
        from rich.console import Console

        console = Console()
    # In a notebook without ipywidgets, rich can't redraw, and warns.
    live = find_spec("ipywidgets") is not None if console.is_jupyter else console.is_interactive
    return LiveTable(console, clock) if live else Lines(console, clock)


class Silent:
    """Says nothing."""

    def start(
        self, names: Sequence[str], epochs: int, steps_per_epoch: int | None, rows_per_epoch: int | None
    ) -> None:
        """Say nothing."""

    def step(self, done: int, epoch: int, note: str | None = None) -> None:
        """Say nothing."""

    def epoch(self, epoch: int, history: History, active: Sequence[str], seconds: float) -> None:
        """Say nothing."""

    def end(self, history: History, seconds: float, stopped_by: str | None = None) -> None:
        """Say nothing."""


class _Speaking:
    """What the table and the lines share: where the fit is, how fast it goes, and that showing can't hurt."""

    def __init__(self, console: "Console", clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._broken = False

    def start(
        self, names: Sequence[str], epochs: int, steps_per_epoch: int | None, rows_per_epoch: int | None
    ) -> None:
        """Remember what there is to do."""
        self._members = self._training = self._stepping = len(names)
        self._epochs = epochs
        self._steps_per_epoch = steps_per_epoch
        self._rows_per_epoch = rows_per_epoch
        self._history = History(names)
        self._finished = self._done = 0
        self._note: str | None = None
        self._started = self._clock()
        self._due = -math.inf
        self._marks: deque[tuple[float, int]] = deque()
        self._speed: float | None = None  # steps per second

    def step(self, done: int, epoch: int, note: str | None = None) -> None:
        """Remember it, and show it if it is time."""
        self._done = done
        self._stepping = self._training
        self._finished = epoch - 1
        self._note = note
        now = self._clock()
        if now >= self._due:
            self._measure(now)
            self._due = now + _DRAW_EVERY
            self._refresh()

    def epoch(self, epoch: int, history: History, active: Sequence[str], seconds: float) -> None:
        """Remember it, and show it if it is time."""
        self._measure(self._clock())
        if self._steps_per_epoch is None:
            self._steps_per_epoch = self._done
            self._marks.clear()  # they counted without knowing an epoch's length
        self._finished, self._done = epoch, 0
        self._history = history
        self._stepping, self._training = self._training, len(active)  # the rate is of those who took the steps

    def _refresh(self) -> None:
        """Show the state between two epochs."""

    def _position(self) -> int:
        return self._finished * (self._steps_per_epoch or 0) + self._done

    def _measure(self, now: float) -> None:
        position = self._position()
        if not self._marks and self._speed is None:
            # A resumed fit starts anywhere: whichever the first step is, it began when the fit did.
            self._marks.append((self._started, max(position - 1, 0)))
        self._marks.append((now, position))
        while len(self._marks) > 2 and self._marks[1][0] <= now - _WINDOW:
            self._marks.popleft()
        since, before = self._marks[0]
        if now > since and position > before:
            self._speed = (position - before) / (now - since)

    def _attempt(self, show: Callable[[], object]) -> None:
        """Show something. A closed pipe or a bug in here ends the progress, never the training."""
        if not self._broken:
            try:
                show()
            except (Exception, SystemExit):  # rich exits the program at a closed pipe
                self._broken = True

    def _text(self, text: object, most: int = 100) -> str:
        """Any text on one line, short, and as the console's encoding can show it."""
        line = "".join(c if c.isprintable() else " " for c in str(text))
        line = line if len(line) <= most else f"{line[: most - 3]}..."
        return line.encode(self._console.encoding, "backslashreplace").decode(self._console.encoding)

    def _name(self, name: str) -> str:
        return self._text(repr(name), 40)

    def _rates(self) -> list[str]:
        """Member-steps and rows per second, as far as they are known."""
        if self._speed is None:
            return []
        rates = [f"{_number(self._speed * self._stepping)} member-steps/s"]
        if self._rows_per_epoch and self._steps_per_epoch:
            rows = self._rows_per_epoch / self._steps_per_epoch * self._stepping / self._members
            rates.append(f"{_number(self._speed * rows)} rows/s")
        return rates

    def _losses(self) -> list[str]:
        """How many members were stopped, and how many failed, if any."""
        losses = {"stopped early": len(self._history.stopped), "failed": len(self._history.failed)}
        return [f"{number:,} {what}" for what, number in losses.items() if number]

    def _failures(self) -> list[str]:
        """A line for each of the first members that failed, and one for the number of the others."""
        failed = list(self._history.failed.items())
        lines = [f"{self._name(name)} failed in {self._text(why)}" for name, why in failed[:_MOST_FAILURES]]
        more = len(failed) - _MOST_FAILURES
        return [*lines, f"+ {more:,} more"] if more > 0 else lines

    def _ending(self, seconds: float, stopped_by: str | None) -> str:
        """One line for how the fit ended."""
        how = f"stopped by {self._text(stopped_by)} after" if stopped_by else "done in"
        what = [f"{how} {duration(seconds)}", count(self._members, "member")]
        what.append(count(self._history.epochs, "epoch"))
        return "  ".join([*what, *self._losses()])


class Lines(_Speaking):
    """A line per epoch, but at most one in two seconds; always for the first and the last."""

    _printed = 0
    _line_due = -math.inf

    def epoch(self, epoch: int, history: History, active: Sequence[str], seconds: float) -> None:
        """Print the epoch's line, if it is time."""
        super().epoch(epoch, history, active, seconds)
        now = self._clock()
        if now >= self._line_due:
            self._line_due = now + _PRINT_EVERY
            self._attempt(self._print_epoch)

    def end(self, history: History, seconds: float, stopped_by: str | None = None) -> None:
        """Print the last epoch's line if it is still due, how the fit ended, and who failed."""
        self._history = history
        if self._finished > self._printed:
            self._attempt(self._print_epoch)
        self._attempt(lambda: self._print(self._ending(seconds, stopped_by), *self._failures()))

    def _print_epoch(self) -> None:
        self._printed = self._finished
        parts = [
            f"epoch {self._finished}/{self._epochs}",
            *self._rates()[:1],
            *self._metrics(),
            *self._losses(),
        ]
        if self._note:
            parts.append(f"({self._text(self._note)})")
        self._print("  ".join(parts))

    def _metrics(self) -> list[str]:
        """Each metric's median over the members, and its best."""
        shown: list[str] = []
        for metric in self._history.metrics[:_MOST_METRICS]:
            latest = self._history.latest(metric)
            if not latest:
                continue
            text = f"{self._text(metric, 40)} {median(latest.values()):.4g}"
            with suppress(InputError):  # it may not be known what is better
                pick = min if direction(metric) == "min" else max
                name = pick(latest, key=latest.__getitem__)
                text += f" (best {latest[name]:.4g}: {self._name(name)})" if self._members > 1 else ""
            shown.append(text)
        return shown

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


class LiveTable(_Speaking):
    """A table of the best members, redrawn in place."""

    _live: "Live | None" = None
    _table: "Table | None" = None  # of the last epoch, once it is drawn
    _ended: tuple[float, str | None] | None = None

    def start(
        self, names: Sequence[str], epochs: int, steps_per_epoch: int | None, rows_per_epoch: int | None
    ) -> None:
        """Show the table."""
        super().start(names, epochs, steps_per_epoch, rows_per_epoch)
        self._attempt(self._open)

    def epoch(self, epoch: int, history: History, active: Sequence[str], seconds: float) -> None:
        """Redraw with the new metrics, if it is time."""
        super().epoch(epoch, history, active, seconds)
        self._table = None
        if self._clock() >= self._due:
            self._refresh()

    def end(self, history: History, seconds: float, stopped_by: str | None = None) -> None:
        """Draw the table for the last time and leave it on the screen."""
        self._history, self._table, self._note = history, None, None
        self._ended = seconds, stopped_by
        self._refresh()
        self._close()

    def _open(self) -> None:
        from rich.live import Live

        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def _close(self) -> None:
        """Give the terminal back, whatever state it is in."""
        if self._live is not None:
            with suppress(Exception, SystemExit):
                self._live.stop()
            self._live = None

    def _refresh(self) -> None:
        before = self._clock()
        self._attempt(self._draw)
        after = self._clock()
        self._due = after + max(_DRAW_EVERY, (after - before) / _SHARE)
        if self._broken:
            self._due = math.inf
            self._close()

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(self._screen(), refresh=True)

    def _screen(self) -> "RenderableType":
        from rich.console import Group
        from rich.text import Text

        if self._table is None:
            self._table = self._best()
        parts: list[RenderableType] = [Text(self._title(), style="bold"), self._table]
        if self._ended is None:
            parts.append(Text("  ".join([f"{self._training:,} training", *self._losses()]), style="dim"))
        parts += [Text(line, style="red") for line in self._failures()]
        if self._note:
            parts.append(Text(self._text(self._note), style="dim italic"))
        return Group(*parts)

    def _title(self) -> str:
        if self._ended is not None:
            return self._ending(*self._ended)
        parts = [f"epoch {min(self._finished + 1, self._epochs)}/{self._epochs}"]
        if self._steps_per_epoch:
            parts.append(f"step {self._done:,}/{self._steps_per_epoch:,}")
        parts += self._rates()
        if self._steps_per_epoch and self._speed:
            left = max(self._epochs * self._steps_per_epoch - self._position(), 0)
            parts.append(f"{duration(left / self._speed)} left")
        return "  ".join(parts)

    def _best(self) -> "Table":
        """The best members and their latest metrics."""
        from rich.table import Table
        from rich.text import Text

        history = self._history
        latest = {metric: history.latest(metric) for metric in history.metrics[:_MOST_METRICS]}
        try:
            names = [name for name, _ in history.ranking()]
            head = "best members"
        except InputError:  # no loss is recorded (yet): nobody knows what is better
            names = [name for name in history if name not in history.failed] if latest else []
            head = "members"
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=bool(names))
        table.add_column(head, no_wrap=True)
        for metric in latest:
            table.add_column(Text(self._text(metric, 24)), justify="right", no_wrap=True)
        for name in names[:_MOST_MEMBERS]:
            values = (f"{numbers.get(name, math.nan):.4g}" for numbers in latest.values())
            table.add_row(*map(Text, (self._name(name), *values)))
        return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
