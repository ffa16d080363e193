"""Lanes in threads: one for each, within this process."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from modelfleet.sharing.shifts import Ended, Moment, Report, Shift, Stepped, TooWideError, Way, next_wave


def threads(shifts: Sequence[Shift], way: Way) -> Iterator[Moment]:
    """Every lane runs its epochs in a thread of its own; whoever ends one is heard before it goes on."""
    with ThreadPoolExecutor(max(1, len(shifts)), "modelfleet-lane") as pool:
        yield from (_in_step if way.side_by_side or way.watched else _freely)(pool, shifts, way)


def _freely(pool: ThreadPoolExecutor, shifts: Sequence[Shift], way: Way) -> Iterator[Moment]:
    told: SimpleQueue[tuple[Shift, Report | None, BaseException | None]] = SimpleQueue()

    def epoch(shift: Shift) -> None:
        try:
            with shift.lane.engine.stream():
                while not way.stopped() and shift.turn():
                    pass
                told.put((shift, None if way.stopped() else shift.end_epoch(), None))
        except BaseException as error:  # whatever it is, the listener would wait for ever if it were not told
            told.put((shift, None, error))

    while (working := next_wave(shifts)) and not way.stopped():
        for shift in working:
            pool.submit(epoch, shift)
        busy, ended = len(working), []
        while busy:
            shift, report, error = told.get()
            busy -= 1
            if isinstance(error, TooWideError):
                way.halve(shift)
                continue
            if error is not None:
                raise error
            if report is None:
                continue
            if way.together:
                ended.append((shift, report))
                continue
            yield Ended([(shift, report)])
            if shift.working and not way.stopped():
                pool.submit(epoch, shift)
                busy += 1
        if ended:
            yield Ended(ended)


def _in_step(pool: ThreadPoolExecutor, shifts: Sequence[Shift], way: Way) -> Iterator[Moment]:
    """A turn of every lane at a time, their batches read by this thread."""
    while (working := next_wave(shifts)) and not way.stopped():
        training = list(working)
        while training and not way.stopped():
            batches = [(shift, shift.next_batch()) for shift in training]
            training = [shift for shift, batch in batches if batch is not None]
            taken = [
                pool.submit(_within, shift, shift.step, batch) for shift, batch in batches if batch is not None
            ]
            steps = [turn.result() for turn in taken]  # all of them, before anybody looks at a lane
            for shift, count in zip(training, steps, strict=True):
                yield Stepped(shift, count)
        if not way.stopped():
            yield Ended([(shift, shift.end_epoch()) for shift in working])


def _within(shift: Shift, what: Callable[..., Any], *args: Any) -> Any:
    with shift.lane.engine.stream():
        return what(*args)
