"""Lanes in threads of this process: one for each lane of a device or, on several devices, one for each device."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue

from modelfleet.feeds import Batch
from modelfleet.runs.events import (
    EpochsEnded,
    Event,
    Reports,
    RunOptions,
    StepsTaken,
    due,
    end_epochs,
    next_wave,
)
from modelfleet.runs.lane_run import LaneRun, TooWideError
from modelfleet.sharing.thread_counts import divided_cores


def threads(runs: Sequence[LaneRun], options: RunOptions) -> Iterator[Event]:
    """Run lanes side by side. A lane that ends an epoch waits until the event has been handled.

    The lanes of one device have a thread each. With several devices each device has a thread. It takes its lanes
    one after the other, and then lanes that wait for another CPU; or in turns, if all lanes wait for each other.
    """
    with (
        divided_cores(run.lane for run in runs) as start_thread,
        ThreadPoolExecutor(max(1, len(runs)), "modelfleet-lane", start_thread) as pool,
        _given_up_by_ctrl_c(runs),
    ):
        yield from (_in_step if options.in_step or options.watched else _freely)(pool, runs, options)


@contextmanager
def _given_up_by_ctrl_c(runs: Sequence[LaneRun]) -> Iterator[None]:
    """Have no lane's thread wait for its loader any longer once Ctrl-C is a KeyboardInterrupt in this thread."""
    try:
        yield
    except KeyboardInterrupt:
        for run in runs:
            run.give_up_reading()
        raise


def _freely(pool: ThreadPoolExecutor, runs: Sequence[LaneRun], options: RunOptions) -> Iterator[Event]:
    finished: SimpleQueue[tuple[list[LaneRun], Reports, list[BaseException]]] = SimpleQueue()
    started: set[int] = set()

    def run_epoch(own: list[LaneRun]) -> None:
        """Run an epoch of some lanes, in turns."""
        reports: Reports = []
        errors: list[BaseException] = []
        training = list(own)
        try:
            with _stream_of(own):
                while training and not options.stopped():
                    for run in list(training):
                        try:
                            if all(run.turn() for _ in range(run.turns)):
                                continue
                            training.remove(run)
                            if not options.stopped():
                                reports += end_epochs([run])
                        except TooWideError as error:
                            training.remove(run)
                            errors.append(error)
        except BaseException as error:  # of any kind: without it, the loop below would wait forever
            errors.append(error)
        finished.put((own, reports, errors))

    def submit(own: list[LaneRun]) -> None:
        started.update(id(run) for run in own)
        for run in own:
            run.busy = True
        pool.submit(run_epoch, own)

    while any(run.working for run in runs) and not options.stopped():
        ended: Reports = []
        first = _first(runs, options)
        for own in first:
            submit(own)
        busy = len(first)
        while busy:
            own, reports, errors = finished.get()
            busy -= 1
            for run in own:
                run.busy = False
            for error in errors:
                if not isinstance(error, TooWideError):
                    raise error
                options.halve(error.run)
            if options.together:
                ended += reports
                continue
            if reports:
                yield EpochsEnded(reports)
            following = own if own[0].working else _next(own[0], runs, started)
            if following and not options.stopped():
                submit(following)
                busy += 1
        if ended:
            yield EpochsEnded(ended)


def _first(runs: Sequence[LaneRun], options: RunOptions) -> list[list[LaneRun]]:
    """Return the lanes to start now, each with those that it takes turns with."""
    by_device = _by_device(runs)
    if len(by_device) == 1:
        return [[run] for run in next_wave(runs)]
    waves = [wave for own in by_device.values() if (wave := next_wave(own))]
    return waves if options.together else [wave[:1] for wave in waves]


def _next(done: LaneRun, runs: Sequence[LaneRun], started: set[int]) -> list[LaneRun]:
    """Return the lane that a device takes next: one of its own, or one that waits for another logical CPU.

    On a single device all lanes have started already.
    """
    by_device = _by_device(runs)
    if len(by_device) == 1:
        return []
    waiting = [run for run in next_wave(by_device.pop(done.lane.device)) if id(run) not in started]
    if not waiting and done.lane.device.startswith("cpu"):
        others = [own for device, own in by_device.items() if device.startswith("cpu")]
        waiting = [run for own in others for run in next_wave(own) if id(run) not in started]
    return waiting[:1]


def _in_step(pool: ThreadPoolExecutor, runs: Sequence[LaneRun], options: RunOptions) -> Iterator[Event]:
    """Take a turn of every lane at a time. This thread reads all batches."""
    several_devices = len(_by_device(runs)) > 1
    while (working := due(runs, options)) and not options.stopped():
        training = list(working)
        while training and not options.stopped():
            batches = {id(run): batch for run in training if (batch := run.next_batch()) is not None}
            training = [run for run in training if id(run) in batches]
            if options.teach is not None and training:
                taught = options.teach([(run, batches[id(run)]) for run in training])
                batches = {id(run): batch for run, batch in zip(training, taught, strict=True)}
            steps: dict[int, int] = {}
            for wave in sorted({run.lane.spec.wave for run in training}):  # waves do not fit beside each other
                turn = [run for run in training if run.lane.spec.wave == wave]
                by_thread = list(_by_device(turn).values()) if several_devices else [[run] for run in turn]
                futures = [pool.submit(_step, [(run, batches[id(run)]) for run in own]) for own in by_thread]
                for future in futures:  # all of them, before a callback may look at a lane
                    steps.update(future.result())
            for run in training:
                yield StepsTaken(run, steps[id(run)])
        if not options.stopped():
            yield EpochsEnded(end_epochs(working))


def _step(turns: Sequence[tuple[LaneRun, Batch]]) -> dict[int, int]:
    with _stream_of([run for run, _ in turns]):
        return {id(run): run.step(batch) for run, batch in turns}


def _stream_of(runs: Sequence[LaneRun]) -> AbstractContextManager[object]:
    """Return the context for steps of lanes in one thread. Lanes that take turns share the device's stream."""
    return runs[0].lane.engine.stream() if len(runs) == 1 else nullcontext()


def _by_device(runs: Sequence[LaneRun]) -> dict[str, list[LaneRun]]:
    found: dict[str, list[LaneRun]] = {}
    for run in runs:
        found.setdefault(run.lane.device, []).append(run)
    return found
