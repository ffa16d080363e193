"""Progress of a fit: one live table on a terminal, plain lines elsewhere, or nothing."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING

from modelfleet.directions import direction
from modelfleet.errors import InputError
from modelfleet.formatting import count, duration
from modelfleet.history import History

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table

_SPEED_WINDOW = 10.0  # seconds over which the speed is averaged: compiled code may take over at any time
_DRAW_EVERY = 0.25  # seconds
_PRINT_EVERY = 2.0  # seconds
_DRAWING_SHARE = 0.02  # of the time, at most
_MAX_MEMBERS, _MAX_FAILURES, _MAX_METRICS = 5, 3, 6  # in the table
_BAR_WIDTH = 40  # columns


class Reporter:
    """Base class for showing the progress of one fit. It shows nothing itself. Epochs count from 1.

    `status` may be called first, then `start`, the steps and epochs, and `end`. `close` is always called last.
    """

    def status(self, text: str) -> None:
        """Show what the fit is busy with until the next step, such as "tracing", "measuring" or "compiling"."""

    def start(
        self, names: Sequence[str], epochs: int, steps_per_epoch: int | None, rows_per_epoch: int | None
    ) -> None:
        """Begin a fit. The rows are the sum over all members. None means unknown."""

    def step(self, done: int, epoch: int, note: str | None = None) -> None:
        """Show that `done` steps of this epoch are done, with a note on what else is going on."""

    def epoch(self, epoch: int, history: History, active: Sequence[str], seconds: float) -> None:
        """Show that an epoch is done and recorded. The members in `active` continue."""

    def end(self, history: History, seconds: float, stopped_by: str | None = None) -> None:
        """Show that the fit is over. `stopped_by` says what cut it short."""

    def close(self) -> None:
        """Give the terminal back, whether or not the fit has started or ended. A second call does nothing."""


def reporter(
    progress: str | bool = "auto",
    *,
    console: "Console | None" = None,
    clock: Callable[[], float] = time.monotonic,
) -> Reporter:
    """Return the reporter for a fit's `progress` argument.

    Args:
        progress: "auto" or True shows the progress, False nothing.
        console: Where to show it; by default stdout.
        clock: Returns the time in seconds.

    Raises:
        InputError: If `progress` is anything else.
    """
    if progress is False:
        return Reporter()
    if progress is not True and progress != "auto":
        raise InputError(f'progress is {progress!r}, expected "auto", True or False.')
    if console is None:
        from rich.console import Console

        console = Console()
    # In a notebook without ipywidgets, rich can't redraw, and warns.
    live = find_spec("ipywidgets") is not None if console.is_jupyter else console.is_interactive
    return LiveTable(console, clock) if live else Lines(console, clock)


class _Tracking(Reporter):
    """Base of the table and the lines: knows where the fit is and how fast it goes.

    A failure to show something ends the progress, never the training.
    """

    def __init__(self, console: "Console", clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._broken = False
        self._status: str | None = None
        self._note: str | None = None
        self._next_draw = -math.inf

    def status(self, text: str) -> None:
        """Remember it, and show it."""
        self._status = text
        self._refresh()

    def start(
        self, names: Sequence[str], epochs: int, steps_per_epoch: int | None, rows_per_epoch: int | None
    ) -> None:
        """Remember what there is to do."""
        self._members = self._training = self._stepping = len(names)
        self._epochs = epochs
        self._steps_per_epoch = steps_per_epoch
        self._rows_per_epoch = rows_per_epoch
        self._history = History(names)
        self._finished_epochs = self._done = 0
        self._started = self._clock()
        self._next_draw = -math.inf
        self._samples: deque[tuple[float, int]] = deque()  # times, and the steps done by then
        self._speed: float | None = None  # steps per second

    def step(self, done: int, epoch: int, note: str | None = None) -> None:
        """Remember it, and show it if it is time."""
        self._done = done
        self._stepping = self._training
        self._finished_epochs = epoch - 1
        self._note, self._status = note, None
        now = self._clock()
        if now >= self._next_draw:
            self._measure(now)
            self._next_draw = now + _DRAW_EVERY
            self._refresh()

    def epoch(self, epoch: int, history: History, active: Sequence[str], seconds: float) -> None:
        """Remember it."""
        self._measure(self._clock())
        if self._steps_per_epoch is None:
            self._steps_per_epoch = self._done
            self._samples.clear()  # taken without knowing an epoch's length
        self._finished_epochs, self._done = epoch, 0
        self._history = history
        self._stepping, self._training = self._training, len(active)  # the rate counts those that took the steps

    def _refresh(self) -> None:
        """Show the state between two epochs."""

    def _steps_done(self) -> int:
        return self._finished_epochs * (self._steps_per_epoch or 0) + self._done

    def _measure(self, now: float) -> None:
        done = self._steps_done()
        if not self._samples and self._speed is None:
            # A resumed fit starts anywhere: whichever the first step is, it began when the fit did.
            self._samples.append((self._started, max(done - 1, 0)))
        self._samples.append((now, done))
        while len(self._samples) > 2 and self._samples[1][0] <= now - _SPEED_WINDOW:
            self._samples.popleft()
        since, before = self._samples[0]
        if now > since and done > before:
            self._speed = (done - before) / (now - since)

    def _attempt(self, show: Callable[[], object]) -> None:
        """Show something. A closed pipe or a bug in here ends the progress, never the training."""
        if not self._broken:
            try:
                show()
            except (Exception, SystemExit):  # rich exits the program at a closed pipe
                self._broken = True

    def _one_line(self, text: object, longest: int = 100) -> str:
        """Return any text on one line, shortened, and as the console's encoding can show it."""
        line = "".join(c if c.isprintable() else " " for c in str(text))
        line = line if len(line) <= longest else f"{line[: longest - 3]}..."
        return line.encode(self._console.encoding, "backslashreplace").decode(self._console.encoding)

    def _name(self, name: str) -> str:
        return self._one_line(repr(name), 40)

    def _rates(self) -> list[str]:
        """Return member-steps and rows per second, as far as they are known."""
        if self._speed is None:
            return []
        rates = [f"{_number(self._speed * self._stepping)} member-steps/s"]
        if self._rows_per_epoch and self._steps_per_epoch:
            rows = self._rows_per_epoch / self._steps_per_epoch * self._stepping / self._members
            rates.append(f"{_number(self._speed * rows)} rows/s")
        return rates

    def _outcomes(self) -> list[str]:
        """Return how many members were stopped, and how many failed, if any."""
        outcomes = {"stopped early": len(self._history.stopped), "failed": len(self._history.failed)}
        return [f"{number:,} {what}" for what, number in outcomes.items() if number]

    def _failures(self) -> list[str]:
        """Return a line for each of the first members that failed, and one with the number of the others."""
        failed = list(self._history.failed.items())
        lines = [f"{self._name(name)} failed in {self._one_line(why)}" for name, why in failed[:_MAX_FAILURES]]
        more = len(failed) - _MAX_FAILURES
        return [*lines, f"+ {more:,} more"] if more > 0 else lines

    def _ending(self, seconds: float, stopped_by: str | None) -> str:
        how = f"stopped by {self._one_line(stopped_by)} after" if stopped_by else "done in"
        what = [f"{how} {duration(seconds)}", count(self._members, "member")]
        what.append(count(self._history.epochs, "epoch"))
        return "  ".join([*what, *self._outcomes()])


class Lines(_Tracking):
    """Prints a line for the first epoch, the last one, and at most one every two seconds between them."""

    _printed_epochs = 0
    _next_line = -math.inf

    def epoch(self, epoch: int, history: History, active: Sequence[str], seconds: float) -> None:
        """Print the epoch's line, if it is time."""
        super().epoch(epoch, history, active, seconds)
        now = self._clock()
        if now >= self._next_line:
            self._next_line = now + _PRINT_EVERY
            self._attempt(self._print_epoch)

    def end(self, history: History, seconds: float, stopped_by: str | None = None) -> None:
        """Print the last epoch's line if that has not happened, how the fit ended, and which members failed."""
        self._history = history
        if self._finished_epochs > self._printed_epochs:
            self._attempt(self._print_epoch)
        self._attempt(lambda: self._print(self._ending(seconds, stopped_by), *self._failures()))

    def _print_epoch(self) -> None:
        self._printed_epochs = self._finished_epochs
        parts = [
            f"epoch {self._finished_epochs}/{self._epochs}",
            *self._rates()[:1],
            *self._metrics(),
            *self._outcomes(),
        ]
        if self._note:
            parts.append(f"({self._one_line(self._note)})")
        self._print("  ".join(parts))

    def _metrics(self) -> list[str]:
        """Return each metric's median over the members, and its best value."""
        shown: list[str] = []
        for metric in self._history.metrics[:_MAX_METRICS]:
            latest = self._history.latest(metric)
            if not latest:
                continue
            text = f"{self._one_line(metric, 40)} {median(latest.values()):.4g}"
            with suppress(InputError):  # the metric's name may not say which values are better
                pick = min if direction(metric) == "min" else max
                name = pick(latest, key=latest.__getitem__)
                text += f" (best {latest[name]:.4g}: {self._name(name)})" if self._members > 1 else ""
            shown.append(text)
        return shown

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


class LiveTable(_Tracking):
    """Shows a bar and a table of the best members, redrawn in place."""

    _live: "Live | None" = None
    _table: "Table | None" = None  # of the last epoch, once it is drawn
    _has_started = False
    _ended: tuple[float, str | None] | None = None

    def status(self, text: str) -> None:
        """Show what the fit is busy with, under the table once there is one."""
        self._attempt(self._open)
        super().status(text)

    def start(
        self, names: Sequence[str], epochs: int, steps_per_epoch: int | None, rows_per_epoch: int | None
    ) -> None:
        """Show the table."""
        super().start(names, epochs, steps_per_epoch, rows_per_epoch)
        self._has_started = True
        self._attempt(self._open)

    def epoch(self, epoch: int, history: History, active: Sequence[str], seconds: float) -> None:
        """Redraw with the new metrics, if it is time."""
        super().epoch(epoch, history, active, seconds)
        self._table = None
        if self._clock() >= self._next_draw:
            self._refresh()

    def end(self, history: History, seconds: float, stopped_by: str | None = None) -> None:
        """Draw the table for the last time and leave it on the screen."""
        self._history, self._table, self._note, self._status = history, None, None, None
        self._ended = seconds, stopped_by
        self._refresh()
        self.close()

    def close(self) -> None:
        """Give the terminal back, whatever state it is in. If the fit did not end, its table is erased."""
        if self._live is not None:
            with suppress(Exception, SystemExit):
                self._live.transient = self._ended is None and not self._broken
                self._live.stop()
            self._live = None

    def _open(self) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()

    def _refresh(self) -> None:
        before = self._clock()
        self._attempt(self._draw)
        after = self._clock()
        self._next_draw = after + max(_DRAW_EVERY, (after - before) / _DRAWING_SHARE)
        if self._broken:
            self._next_draw = math.inf
            self.close()

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(self._screen(), refresh=True)

    def _screen(self) -> "RenderableType":
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = []
        if self._has_started:
            if self._table is None:
                self._table = self._best_members()
            parts += [Text(self._title(), style="bold"), self._table]
            if self._ended is None:
                parts.insert(1, self._bar())
                parts.append(Text("  ".join([f"{self._training:,} training", *self._outcomes()]), style="dim"))
            parts += [Text(line, style="red") for line in self._failures()]
        busy_with = f"{self._status} ..." if self._status else self._note
        if busy_with:
            parts.append(Text(self._one_line(busy_with), style="dim italic"))
        return Group(*parts)

    def _title(self) -> str:
        if self._ended is not None:
            return self._ending(*self._ended)
        parts = [f"epoch {min(self._finished_epochs + 1, self._epochs)}/{self._epochs}"]
        if self._steps_per_epoch:
            parts.append(f"step {self._done:,}/{self._steps_per_epoch:,}")
        parts += self._rates()
        if self._steps_per_epoch and self._speed:
            left = max(self._epochs * self._steps_per_epoch - self._steps_done(), 0)
            parts.append(f"{duration(left / self._speed)} left")
        return "  ".join(parts)

    def _bar(self) -> "RenderableType":
        """Return a bar of the whole fit, by its epochs as long as an epoch's number of steps is unknown."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        done, total = self._finished_epochs, max(1, self._epochs)
        if self._steps_per_epoch:
            done, total = self._steps_done(), total * self._steps_per_epoch
        done = min(done, total)
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_row(ProgressBar(total=total, completed=done, width=_BAR_WIDTH), f"{100 * done // total}%")
        return grid

    def _best_members(self) -> "Table":
        """Return a table of the best members and their latest metrics."""
        from rich.table import Table
        from rich.text import Text

        history = self._history
        latest = {metric: history.latest(metric) for metric in history.metrics[:_MAX_METRICS]}
        try:
            names = [name for name, _ in history.ranking()]
            title = "best members"
        except InputError:  # no loss is recorded (yet), so which members are best is unknown
            names = [name for name in history if name not in history.failed] if latest else []
            title = "members"
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=bool(names))
        table.add_column(title, no_wrap=True)
        for metric in latest:
            table.add_column(Text(self._one_line(metric, 24)), justify="right", no_wrap=True)
        for name in names[:_MAX_MEMBERS]:
            values = (f"{numbers.get(name, math.nan):.4g}" for numbers in latest.values())
            table.add_row(*map(Text, (self._name(name), *values)))
        return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
