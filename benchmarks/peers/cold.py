"""Cold start: from data in hand to 20 steps done, in a fresh process with nothing cached.

    python -m benchmarks.peers.cold torch|fleet [--quick]

Prints one line of JSON: the seconds from the data on, and the seconds with the imports.
"""

import json
import sys
import time

START = time.perf_counter()

# torch imports its compiler with the first optimizer that is made, or the first step that is traced: nearly two
# seconds in either peer. It is an import like the others, so both have it before the clock starts.
import torch._dynamo  # noqa: E402, F401


def train_torch(quick: bool) -> float:
    """Seconds that the plain loop takes for all members."""
    from benchmarks.peers.torch_loop import train_all, trainees
    from benchmarks.rows import COLD

    row = COLD.quick() if quick else COLD
    start = time.perf_counter()
    train_all(row, trainees(row, range(row.members)))
    return time.perf_counter() - start


def train_fleet(quick: bool) -> float:
    """Seconds that a fleet takes to be built, compiled and fitted."""
    from benchmarks.peers.fleet import build
    from benchmarks.rows import COLD, datasets

    row = COLD.quick() if quick else COLD
    start = time.perf_counter()
    build(row).fit(datasets(row)[0], epochs=row.epochs, batch_size=row.batch, progress=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    train = {"torch": train_torch, "fleet": train_fleet}[sys.argv[1]]
    seconds = train("--quick" in sys.argv)
    print(json.dumps({"seconds": seconds, "with_imports": time.perf_counter() - START}), flush=True)
