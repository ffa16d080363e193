"""Lanes in threads of this process: one for each lane of a device, or, on several devices, one for each device."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

from modelfleet.feeds import Batch, Feed
from modelfleet.lanes import Lane, Work, in_step
from modelfleet.sharing.cores import cores
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

T = TypeVar("T")


def threads(shifts: Sequence[Shift], way: Way) -> Iterator[Moment]:
    """Run lanes side by side; whoever ends an epoch is heard before it goes on.

    The lanes of one device have a thread each. Of several devices each has a thread, and takes its lanes one after
    the other, and then those that wait for another CPU; or in turns, where all lanes are to go together.
    """
    with (
        cores(shift.lane for shift in shifts) as begin,
        ThreadPoolExecutor(max(1, len(shifts)), "modelfleet-lane", begin) as pool,
    ):
        yield from (_in_step if way.side_by_side or way.watched else _freely)(pool, shifts, way)


def _freely(pool: ThreadPoolExecutor, shifts: Sequence[Shift], way: Way) -> Iterator[Moment]:
    told: SimpleQueue[tuple[list[Shift], list[tuple[Shift, Report]], list[BaseException]]] = SimpleQueue()

    def epoch(own: list[Shift]) -> None:
        """An epoch of some lanes, in turns."""
        reports: list[tuple[Shift, Report]] = []
        errors: list[BaseException] = []
        training = list(own)
        try:
            while training and not way.stopped():
                for shift in list(training):
                    try:
                        with shift.lane.engine.stream():
                            if all(shift.turn() for _ in range(shift.share)):
                                continue
                            training.remove(shift)
                            if not way.stopped():
                                reports.append((shift, shift.end_epoch()))
                    except TooWideError as error:
                        training.remove(shift)
                        errors.append(error)
        except BaseException as error:  # whatever it is, the listener would wait for ever if it were not told
            errors.append(error)
        told.put((own, reports, errors))

    begun: set[int] = set()

    def submit(own: list[Shift]) -> None:
        begun.update(id(shift) for shift in own)
        for shift in own:
            shift.busy = True
        pool.submit(epoch, own)

    while any(shift.working for shift in shifts) and not way.stopped():
        ended: list[tuple[Shift, Report]] = []
        due = _due(shifts, way)
        for own in due:
            submit(own)
        busy = len(due)
        while busy:
            own, reports, errors = told.get()
            busy -= 1
            for shift in own:
                shift.busy = False
            for error in errors:
                if not isinstance(error, TooWideError):
                    raise error
                way.halve(error.shift)
            if way.together:
                ended += reports
                continue
            if reports:
                yield Ended(reports)
            following = own if own[0].working else _next(own[0], shifts, begun)
            if following and not way.stopped():
                submit(following)
                busy += 1
        if ended:
            yield Ended(ended)


def _due(shifts: Sequence[Shift], way: Way) -> list[list[Shift]]:
    """The lanes that go now, each with those that it takes turns with."""
    by_device = _by_device(shifts)
    if len(by_device) == 1:
        return [[shift] for shift in next_wave(shifts)]
    waves = [wave for own in by_device.values() if (wave := next_wave(own))]
    return waves if way.together else [wave[:1] for wave in waves]


def _next(shift: Shift, shifts: Sequence[Shift], begun: set[int]) -> list[Shift]:
    """The lane that a device takes when it is done with one: of its own, or, as all CPU devices are the one CPU,
    one that waits for another of these. On the only device all have begun."""
    by_device = _by_device(shifts)
    if len(by_device) == 1:
        return []
    waiting = [own for own in next_wave(by_device.pop(shift.lane.device)) if id(own) not in begun]
    if not waiting and shift.lane.device.startswith("cpu"):
        others = [own for device, own in by_device.items() if device.startswith("cpu")]
        waiting = [one for own in others for one in next_wave(own) if id(one) not in begun]
    return waiting[:1]


def _in_step(pool: ThreadPoolExecutor, shifts: Sequence[Shift], way: Way) -> Iterator[Moment]:
    """A turn of every lane at a time, their batches read by this thread."""
    scattered = len(_by_device(shifts)) > 1
    while (working := due(shifts, way)) and not way.stopped():
        training = list(working)
        while training and not way.stopped():
            batches = {id(shift): batch for shift in training if (batch := shift.next_batch()) is not None}
            training = [shift for shift in training if id(shift) in batches]
            steps: dict[int, int] = {}
            for wave in sorted({shift.lane.part.wave for shift in training}):  # they do not fit beside each other
                turn = [shift for shift in training if shift.lane.part.wave == wave]
                hands = list(_by_device(turn).values()) if scattered else [[shift] for shift in turn]
                taken = [pool.submit(_turns, [(shift, batches[id(shift)]) for shift in own]) for own in hands]
                for turns in taken:  # all of them, before anybody looks at a lane
                    steps.update(turns.result())
            for shift in training:
                yield Stepped(shift, steps[id(shift)])
        if not way.stopped():
            yield Ended(end_epochs(working))


def _turns(own: Sequence[tuple[Shift, Batch]]) -> dict[int, int]:
    counts = {}
    for shift, batch in own:
        with shift.lane.engine.stream():
            counts[id(shift)] = shift.step(batch)
    return counts


def everywhere(
    fed: Sequence[tuple[Lane, Feed]], what: Callable[[Lane, Feed], Work[T]], *, side_by_side: bool = False
) -> list[T]:
    """What some work gives for every lane, in their order: the lanes of each device in a thread of its own.

    `side_by_side`: not in threads but batch by batch, for the lanes read one loader.
    """
    by_device: dict[str, list[int]] = {}
    for number, (lane, _) in enumerate(fed):
        by_device.setdefault(lane.device, []).append(number)
    if side_by_side:
        return in_step([what(lane, feed) for lane, feed in fed])
    if len(by_device) == 1 or held_in_common([lane for lane, _ in fed]) is not None:
        return [in_step([what(lane, feed)])[0] for lane, feed in fed]
    found: dict[int, Any] = {}

    def run(numbers: list[int]) -> None:
        for number in numbers:
            lane, feed = fed[number]
            with lane.engine.stream():
                found[number] = in_step([what(lane, feed)])[0]

    with (
        cores(lane for lane, _ in fed) as begin,
        ThreadPoolExecutor(len(by_device), "modelfleet-device", begin) as pool,
    ):
        for running in [pool.submit(run, numbers) for numbers in by_device.values()]:
            running.result()
    return [found[number] for number in range(len(fed))]


def held_in_common(lanes: Sequence[Lane]) -> tuple[str, str, str] | None:
    """Two members, of two lanes, whose steps run the Python of one object, and its name: not for two threads.

    A step sets the mode of its model's modules and puts it back; another member may be running one of them.
    """
    owners: dict[int, list[tuple[int, str, bool]]] = {}
    for number, lane in enumerate(lanes):
        runs_python = not lane.engine.fused or lane.engine.untraced is not None
        for name, one in lane.engine.objects():
            known = owners.setdefault(id(one), [])
            for other, member, theirs in known:
                if other != number and (runs_python or theirs):
                    return member, lane.names[0], name
            known.append((number, lane.names[0], runs_python))
    return None


def _by_device(shifts: Sequence[Shift]) -> dict[str, list[Shift]]:
    found: dict[str, list[Shift]] = {}
    for shift in shifts:
        found.setdefault(shift.lane.device, []).append(shift)
    return found
