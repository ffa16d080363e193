"""Interleaved lanes: a turn of each after the other, in one thread."""

from collections.abc import Iterator, Sequence

from modelfleet.sharing.shifts import (
    Ended,
    Moment,
    Report,
    Shift,
    Stepped,
    TooWideError,
    Way,
    due,
    end_epochs,
    next_wave,
)


def interleaved(shifts: Sequence[Shift], way: Way) -> Iterator[Moment]:
    """Turn by turn, until everybody is done. A lane of share 3 takes three turns while another takes one."""
    waiting: dict[int, tuple[Shift, Report]] = {}
    ended: dict[int, Shift] = {}  # of lanes that read one loader, and so look at the validation data together, too
    while (working := due(shifts, way)) and not way.stopped():
        for shift in working:
            for _ in range(1 if way.side_by_side else shift.share):
                if id(shift) in waiting or id(shift) in ended or not shift.working or way.stopped():
                    break
                try:
                    steps = shift.turn()
                except TooWideError:
                    way.halve(shift)
                    break
                if steps:
                    yield Stepped(shift, steps)
                elif way.side_by_side:
                    ended[id(shift)] = shift
                elif way.together:
                    waiting[id(shift)] = shift, shift.end_epoch()
                else:
                    yield Ended([(shift, shift.end_epoch())])
        if ended and all(id(shift) in ended for shift in due(shifts, way)):
            yield Ended(end_epochs(list(ended.values())))
            ended.clear()
        if waiting and all(id(shift) in waiting for shift in next_wave(shifts)):
            yield Ended(list(waiting.values()))
            waiting.clear()
