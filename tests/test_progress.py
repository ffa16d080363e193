import io
import math
import re
import sys
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from modelfleet.errors import InputError
from modelfleet.failures import Failure
from modelfleet.history import History
from modelfleet.progress import Lines, LiveTable, Reporter, reporter

NAN = math.nan


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Screen:
    """A console whose output can be read, on a terminal or not."""

    def __init__(self, *, terminal: bool) -> None:
        self.file = io.StringIO()
        self.console = Console(
            file=self.file,
            width=160 if terminal else 60,
            force_terminal=terminal,
            force_interactive=terminal,
            color_system=None,
        )

    @property
    def text(self) -> str:
        """Everything that was written."""
        return plain(self.file.getvalue())

    def last(self) -> str:
        """What was drawn last: everything after the last line was erased."""
        return plain(self.file.getvalue().split("\x1b[2K")[-1])


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def report(
    show: Reporter,
    clock: Clock,
    losses: Mapping[str, Sequence[float]],
    *,
    seconds_per_step: float = 0.1,
    steps: int = 10,
    stopped_by: str | None = None,
    note: str | None = None,
) -> History:
    """Report a fit in which the members have these losses; NaN fails."""
    names = list(losses)
    history = History(names)
    epochs = max(map(len, losses.values()))
    show.start(names, epochs, steps, steps * len(names) * 8)
    for epoch in range(1, epochs + 1):
        for step in range(1, steps + 1):
            clock.now += seconds_per_step
            show.step(step, epoch, note)
        for name in names:
            if name not in history.failed:
                history.record(name, {"loss": losses[name][epoch - 1], "acc": 1 / (1 + losses[name][epoch - 1])})
                if math.isnan(losses[name][epoch - 1]):
                    history.fail(name, Failure(epoch, epoch * steps, "loss is NaN"))
        active = [name for name in names if name not in history.failed]
        show.epoch(epoch, history, active, steps * seconds_per_step)
    show.end(history, epochs * steps * seconds_per_step, stopped_by)
    return history


def test_auto_and_true_show_a_table_on_a_terminal_and_lines_elsewhere() -> None:
    for progress in ("auto", True):
        assert isinstance(reporter(progress, console=Screen(terminal=True).console), LiveTable)
        assert isinstance(reporter(progress, console=Screen(terminal=False).console), Lines)


def test_false_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    show = reporter(False)
    assert type(show) is Reporter
    report(show, Clock(), {"a": [1.0, NAN]})
    assert capsys.readouterr() == ("", "")


def test_lines_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    report(reporter(), Clock(), {"a": [1.0]})
    out, err = capsys.readouterr()
    assert out.startswith("epoch 1/1")
    assert err == ""


@pytest.mark.parametrize("progress", ["yes", None, 1])
def test_another_progress_is_refused(progress: str) -> None:
    with pytest.raises(InputError, match=r'progress is .* expected "auto", True or False'):
        reporter(progress)


def test_a_line_tells_speed_median_best_and_failures() -> None:
    screen, clock = Screen(terminal=False), Clock()
    report(reporter(console=screen.console, clock=clock), clock, {"a": [3.0], "b": [1.0], "c": [2.0], "d": [NAN]})
    line, done, failed = screen.text.splitlines()
    assert line == ("epoch 1/1  40 member-steps/s  loss 2 (best 1: 'b')  acc 0.3333 (best 0.5: 'b')  1 failed")
    assert done == "done in 1.0 s  4 members  1 epoch  1 failed"
    assert failed == "'d' failed in epoch 1, step 10: loss is NaN"


def test_the_last_epoch_has_the_speed_of_those_who_took_its_steps() -> None:
    screen, clock = Screen(terminal=False), Clock()
    show, history = reporter(console=screen.console, clock=clock), History(["a", "b"])
    show.start(["a", "b"], 1, 10, None)
    for step in range(1, 11):
        clock.now += 0.1
        show.step(step, 1)
    for name in ("a", "b"):
        history.record(name, {"loss": 1.0})
    show.epoch(1, history, [], 1.0)  # all are done
    show.end(history, 1.0)
    assert "epoch 1/1  20 member-steps/s" in screen.text


def test_lines_are_the_first_the_last_and_one_in_two_seconds() -> None:
    screen, clock = Screen(terminal=False), Clock()
    report(reporter(console=screen.console, clock=clock), clock, {"a": [1.0] * 10}, seconds_per_step=0.09)
    epochs = re.findall(r"^epoch (\d+)/10", screen.text, re.MULTILINE)
    assert epochs == ["1", "4", "7", "10"]  # an epoch takes 0.9 s


def test_the_last_epoch_of_a_fit_that_was_cut_short_gets_its_line() -> None:
    screen, clock = Screen(terminal=False), Clock()
    show, history = reporter(console=screen.console, clock=clock), History(["a"])
    show.start(["a"], 100, None, None)
    for epoch in (1, 2):
        show.step(1, epoch)
        history.record("a", {"loss": 1.0 / epoch})
        show.epoch(epoch, history, ["a"], 0.5)
    show.step(1, 3)
    show.end(history, 75.0, "Ctrl-C")
    lines = screen.text.splitlines()
    assert lines[:2] == ["epoch 1/100  loss 1", "epoch 2/100  loss 0.5"]
    assert lines[2] == "stopped by Ctrl-C after 1 min 15 s  1 member  2 epochs"


def test_a_metric_of_unknown_direction_has_no_best() -> None:
    screen, clock = Screen(terminal=False), Clock()
    show, history = reporter(console=screen.console, clock=clock), History(["a", "b"])
    show.start(["a", "b"], 1, 1, None)
    history.record("a", {"depth": 1.0})
    history.record("b", {"depth": 2.0})
    show.epoch(1, history, ["a", "b"], 1.0)
    assert screen.text == "epoch 1/1  depth 1.5\n"


def test_the_table_shows_the_best_members_speed_and_time_left() -> None:
    screen, clock = Screen(terminal=True), Clock()
    show = reporter(console=screen.console, clock=clock)
    names = [f"m{index}" for index in range(8)]
    history = History(names)
    show.start(names, 10, 10, 640)
    for step in range(1, 11):
        clock.now += 0.5
        show.step(step, 1)
    for index, name in enumerate(names):
        history.record(name, {"loss": 8.0 - index, "acc": index / 10})
    history.stopped["m0"] = 1
    show.epoch(1, history, names[1:], 5.0)
    clock.now += 0.5
    show.step(1, 2, "compiling in the background")
    drawn = screen.last()
    show.end(history, 5.5)
    title, bar, head, *rows = drawn.splitlines()
    assert bar.split() == ["━━━━", "11%"]  # 11 of 100 steps, 40 columns wide
    assert title == "epoch 2/10  step 1/10  14 member-steps/s  112 rows/s  44 s left"
    assert head.split() == ["best", "members", "loss", "acc"]
    assert [row.split() for row in rows[:5]] == [
        ["'m7'", "1", "0.7"],
        ["'m6'", "2", "0.6"],
        ["'m5'", "3", "0.5"],
        ["'m4'", "4", "0.4"],
        ["'m3'", "5", "0.3"],
    ]
    assert rows[5:] == ["7 training  1 stopped early", "compiling in the background"]


def test_the_bar_goes_by_epochs_while_their_length_is_unknown() -> None:
    screen, clock = Screen(terminal=True), Clock()
    show = reporter(console=screen.console, clock=clock)
    show.start(["a"], 4, None, None)
    clock.now += 1
    show.step(7, 3)
    bar = screen.last().splitlines()[1]
    show.end(History(["a"]), 1.0)
    assert bar.split() == ["━" * 20, "50%"]
    assert "━" not in screen.last()  # a finished fit needs no bar


def test_the_table_says_what_the_fit_is_busy_with_until_the_first_step() -> None:
    screen, clock = Screen(terminal=True), Clock()
    show = reporter(console=screen.console, clock=clock)
    show.status("measuring")
    assert screen.last().splitlines() == ["measuring ..."]
    show.status("[bold]tracing\nthe step")
    assert screen.last().splitlines() == ["[bold]tracing the step ..."]
    show.start(["a"], 1, 10, None)
    show.status("compiling")
    assert screen.last().splitlines()[-1] == "compiling ..."
    assert screen.last().splitlines()[0].startswith("epoch 1/1")
    clock.now += 1
    show.step(1, 1)
    assert "compiling" not in screen.last()
    show.end(History(["a"]), 1.0)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_fit_that_never_starts_leaves_nothing_on_the_screen(terminal: bool) -> None:
    screen, before = Screen(terminal=terminal), sys.stdout
    show = reporter(console=screen.console, clock=Clock())
    show.status("tracing")
    show.close()
    show.close()
    assert sys.stdout is before
    assert screen.last().strip() == ""


def test_a_closed_table_leaves_what_a_finished_fit_has_shown() -> None:
    screen, clock = Screen(terminal=True), Clock()
    show = reporter(console=screen.console, clock=clock)
    report(show, clock, {"a": [1.0]})
    show.close()
    assert "done in" in screen.last()


def test_lines_say_nothing_of_the_start_up() -> None:
    screen = Screen(terminal=False)
    reporter(console=screen.console, clock=Clock()).status("tracing")
    assert screen.text == ""


def test_the_table_names_the_first_failures_and_counts_the_others() -> None:
    screen, clock = Screen(terminal=True), Clock()
    losses = {"good": [1.0, 0.5], **{f"bad{index}": [1.0, NAN] for index in range(6)}}
    report(reporter(console=screen.console, clock=clock), clock, losses, stopped_by="SIGTERM")
    final = screen.text[screen.text.rindex("stopped by SIGTERM") :].splitlines()
    assert final[0] == "stopped by SIGTERM after 2.0 s  7 members  2 epochs  6 failed"
    assert final[2].split() == ["'good'", "0.5", "0.6667"]
    assert final[3:7] == [
        *(f"'bad{index}' failed in epoch 2, step 20: loss is NaN" for index in range(3)),
        "+ 3 more",
    ]


def test_the_table_is_drawn_at_most_four_times_a_second() -> None:
    screen, clock = Screen(terminal=True), Clock()
    show = reporter(console=screen.console, clock=clock)
    show.start(["a"], 1, 1000, None)
    before = screen.text.count("epoch 1/1")
    for step in range(1, 1001):
        clock.now += 0.001
        show.step(step, 1)
    drawn = screen.text.count("epoch 1/1") - before
    show.end(History(["a"]), 1.0)
    assert drawn == 4


def test_a_slow_terminal_is_drawn_to_less_often() -> None:
    class SlowFile(io.StringIO):
        def write(self, text: str) -> int:
            clock.now += 0.1
            return super().write(text)

    clock, file = Clock(), SlowFile()
    console = Console(file=file, force_terminal=True, force_interactive=True, color_system=None)
    show = reporter(console=console, clock=clock)
    show.start(["a"], 1, 1000, None)
    began = clock.now
    while clock.now < began + 60:
        clock.now += 0.01
        show.step(1, 1)
    drawn = file.getvalue().count("epoch 1/1")
    show.end(History(["a"]), 60.0)
    assert 2 <= drawn <= 14  # at most one in fifty parts of the time, not 240 times


def test_a_resumed_fit_counts_only_what_it_did_itself() -> None:
    screen, clock = Screen(terminal=True), Clock()
    show = reporter(console=screen.console, clock=clock)
    show.start(["a", "b"], 10, 100, None)
    clock.now += 1
    show.step(51, 8)
    drawn = screen.last()
    show.end(History(["a", "b"]), 1.0)
    assert drawn.splitlines()[0] == "epoch 8/10  step 51/100  2 member-steps/s  4 min 09 s left"


def test_an_epoch_of_unknown_length_is_learned_from_the_first() -> None:
    screen, clock = Screen(terminal=True), Clock()
    show, history = reporter(console=screen.console, clock=clock), History(["a"])
    show.start(["a"], 7, None, None)
    for step in range(1, 5):
        clock.now += 1
        show.step(step, 5)
    assert "left" not in screen.text
    history.record("a", {"loss": 1.0})
    show.epoch(5, history, ["a"], 4.0)
    for step in range(1, 3):
        clock.now += 1
        show.step(step, 6)
    drawn = screen.last()
    show.end(history, 6.0)
    assert drawn.splitlines()[0] == "epoch 6/7  step 2/4  1 member-steps/s  6.0 s left"


@pytest.mark.parametrize("terminal", [True, False])
@settings(max_examples=25, deadline=None)
@given(names=st.lists(st.text(min_size=1), min_size=1, max_size=4, unique=True))
def test_odd_names_are_shown_on_one_line_each(terminal: bool, names: list[str]) -> None:
    odd = ["[/red]", "[bold]x", "\x1b[2J", "new\nline", ":smile:", "\ud800", *names]
    screen, clock = Screen(terminal=terminal), Clock()
    show = reporter(console=screen.console, clock=clock)
    report(show, clock, {name: [float(i), NAN] for i, name in enumerate(dict.fromkeys(odd))}, note="[/odd]\nnote")
    assert "'[/red]'" in screen.text
    assert "'[bold]x' failed in epoch 2" in screen.text
    assert "'\\x1b[2J' failed" in screen.text
    assert f"+ {len(set(odd)) - 3} more" in screen.text
    assert "[/odd] note" in screen.text
    assert "done in 2.0 s" in screen.text


def test_infinite_and_missing_numbers_are_shown() -> None:
    screen, clock = Screen(terminal=True), Clock()
    report(reporter(console=screen.console, clock=clock), clock, {"a": [math.inf], "b": [NAN], "c": [-0.5]})
    assert re.search(r"'a' +inf", screen.last())


def test_a_console_that_knows_only_ascii_shows_escapes() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    clock = Clock()
    report(reporter(console=Console(file=file, width=160), clock=clock), clock, {"zürich": [1.0], "b": [2.0]})
    file.seek(0)
    assert "(best 1: 'z\\xfcrich')" in file.read()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("error", [BrokenPipeError, ValueError])
def test_a_console_that_breaks_never_breaks_the_training(
    terminal: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            if self.writes > 2:
                raise error
            return len(text)

    # At a broken pipe, rich points the real stdout's descriptor elsewhere: that is the test runner's.
    monkeypatch.setattr("rich.console.os.dup2", lambda *_: None)
    before, file, clock = sys.stdout, Broken(), Clock()
    console = Console(file=file, force_terminal=terminal, force_interactive=terminal)
    history = report(reporter(console=console, clock=clock), clock, {"a": [1.0] * 30})
    assert history.epochs == 30
    assert file.writes > 2
    assert file.writes < 10  # it gave up
    assert sys.stdout is before


def test_a_table_that_breaks_gives_the_terminal_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, before = Screen(terminal=True), sys.stdout
    show = reporter(console=screen.console, clock=Clock())
    show.start(["a"], 1, 1, None)
    assert sys.stdout is not before
    monkeypatch.setattr(LiveTable, "_title", None)  # calling it raises
    show.step(1, 1)
    assert sys.stdout is before
    show.end(History(["a"]), 1.0)


def test_the_live_table_gives_the_terminal_back() -> None:
    screen, clock, before = Screen(terminal=True), Clock(), sys.stdout
    report(reporter(console=screen.console, clock=clock), clock, {"a": [1.0]})
    assert sys.stdout is before
    assert screen.file.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again
