"""Twenty seconds of chaos; `make chaos` has more."""

import time
from collections.abc import Callable

import pytest
from tests.replicas.chaos import HANGS, Chaos, gone, held

from modelfleet.workers.process import dismiss

pytestmark = pytest.mark.slow


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + HANGS
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def test_every_row_is_answered_once_and_nothing_is_left_whatever_happens_to_workers() -> None:
    dismiss()
    chaos = Chaos(seed=int(time.time()))
    chaos.run(3)  # whatever is loaded and kept once
    before = held()
    chaos.run(17)
    counts = chaos.counts
    assert counts["rows answered"] > 0
    assert counts["restarts"] > 0
    assert counts["SIGKILL"] + counts["SIGSEGV"] + counts["SIGSTOP"] > 0
    assert eventually(lambda: all(gone(process) for process in chaos.seen)), "a worker is left"
    for what in ("descriptors", "children", "shared memory", "threads"):
        assert eventually(lambda what=what: held()[what] <= before[what]), (what, before, held())
