"""Interleaved lanes: the lanes take turns, in one thread.

This sharing is not in `sharing/`, because workers run their lanes with it, too (`remote/worker.py`).
"""

from collections.abc import Iterator, Sequence

from modelfleet.runs.events import EpochsEnded, Event, RunOptions, StepsTaken, Teach, due, end_epochs
from modelfleet.runs.lane_run import LaneRun, TooWideError


def interleaved(runs: Sequence[LaneRun], options: RunOptions) -> Iterator[Event]:
    """Take turns until all lanes are done. A lane of share 3 takes three turns while another takes one."""
    if options.teach is not None:
        yield from _taught(runs, options, options.teach)
        return
    ended: dict[int, LaneRun] = {}  # lanes that wait for the others at the end of their epoch
    while (working := due(runs, options)) and not options.stopped():
        for run in working:
            for _ in range(1 if options.in_step else run.turns):
                if id(run) in ended or not run.working or options.stopped():
                    break
                try:
                    steps = run.turn()
                except TooWideError:
                    options.halve(run)
                    break
                if steps:
                    yield StepsTaken(run, steps)
                elif options.in_step or options.together:
                    # Its epoch ends with that of the others: a checkpoint until then must have the whole epoch.
                    ended[id(run)] = run
                else:
                    yield EpochsEnded(end_epochs([run]))
        if ended and all(id(run) in ended for run in due(runs, options)):
            runs_ended = list(ended.values())
            # Lanes that read one loader read the validation data in step, too.
            groups = [runs_ended] if options.in_step else [[run] for run in runs_ended]
            yield EpochsEnded([report for group in groups for report in end_epochs(group)])
            ended.clear()


def _taught(runs: Sequence[LaneRun], options: RunOptions, teach: Teach) -> Iterator[Event]:
    """Take turns of one step until all lanes are done. All lanes read their batches before any takes the step."""
    while (training := due(runs, options)) and not options.stopped():
        working = list(training)
        while training and not options.stopped():
            turn = [(run, batch) for run in training if (batch := run.next_batch()) is not None]
            training = [run for run, _ in turn]
            batches = teach(turn) if turn else []
            for run, batch in zip(training, batches, strict=True):
                yield StepsTaken(run, run.step(batch))
        if not options.stopped():
            yield EpochsEnded(end_epochs(working))
