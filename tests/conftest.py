"""What all tests have in common."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from modelfleet.planning import measurements

# No test goes by what an earlier run has measured, and none leaves its own in the user's cache.
os.environ["MODELFLEET_CACHE"] = ""

# A busy machine has slow steps, and for those torch would compile: the numbers round otherwise, and time goes by.
os.environ["MODELFLEET_COMPILE"] = "never"

# "auto" measures what is faster, and on a busy machine that is now the one and now the other.
measurements.SHORT_RUN = sys.maxsize

# A program in the background of a shell ignores Ctrl-C, and so would every program that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `tests.helpers` can be imported however pytest is started.
sys.path.insert(0, str(Path(__file__).parent.parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every process begins with its share of what takes long, so that none is left alone with it at the end.

    Work stealing gives each process an equal run of the tests, and lets those that are done take from its end all
    but the test that runs and the next one: so a quick one follows each that is slow.
    """
    quick = [item for item in items if not item.get_closest_marker("slow")]
    groups: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            shared = {"cluster", "places"} & {*getattr(item, "fixturenames", ())}  # one cluster for a file's tests
            groups.setdefault(item.path if shared else item, []).append(item)
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    shares: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for number, group in enumerate(groups.values()):
        shares[number % processes] += [*group, *quick[:1]]
        del quick[:1]
    total = len(items)
    items.clear()
    for number, share in enumerate(shares):
        size = total * (number + 1) // processes - total * number // processes
        rest = max(0, size - len(share))
        items += [*share, *quick[:rest]]
        del quick[:rest]
    items += quick


def pytest_collection_finish() -> None:
    """Spare the collector the frameworks' modules: it would go through them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
