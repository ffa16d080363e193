"""Interleaved lanes: the lanes take turns, in one thread.

This sharing is not in `sharing/`, because workers run their lanes with it, too (`remote/worker.py`).
"""

from collections.abc import Iterator, Sequence

from modelfleet.runs.events import EpochsEnded, Event, RunOptions, StepsTaken, due, end_epochs, next_wave
from modelfleet.runs.lane_run import EpochReport, LaneRun, TooWideError


def interleaved(runs: Sequence[LaneRun], options: RunOptions) -> Iterator[Event]:
    """Take turns until all lanes are done. A lane of share 3 takes three turns while another takes one."""
    waiting: dict[int, tuple[LaneRun, EpochReport]] = {}
    ended: dict[int, LaneRun] = {}  # lanes that read one loader, and so read the validation data in step, too
    while (working := due(runs, options)) and not options.stopped():
        for run in working:
            for _ in range(1 if options.in_step else run.turns):
                if id(run) in waiting or id(run) in ended or not run.working or options.stopped():
                    break
                try:
                    steps = run.turn()
                except TooWideError:
                    options.halve(run)
                    break
                if steps:
                    yield StepsTaken(run, steps)
                elif options.in_step:
                    ended[id(run)] = run
                elif options.together:
                    waiting[id(run)] = end_epochs([run])[0]
                else:
                    yield EpochsEnded(end_epochs([run]))
        if ended and all(id(run) in ended for run in due(runs, options)):
            yield EpochsEnded(end_epochs(list(ended.values())))
            ended.clear()
        if waiting and all(id(run) in waiting for run in next_wave(runs)):
            yield EpochsEnded(list(waiting.values()))
            waiting.clear()
