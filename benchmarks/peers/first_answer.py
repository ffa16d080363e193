"""From nothing to the first answer of a model in two processes: with modelfleet, or with torch.multiprocessing.

    python -m benchmarks.peers.first_answer modelfleet|spawn fresh|again [--quick]

fresh: every round is a new interpreter, its imports included. again: every round is a new pool in one program.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.peers import Round, compete

PROGRAM = "from benchmarks.peers.first_answer import ask; ask({who!r})"


def prepare(who: str, when: str, quick: bool) -> Callable[[], Round]:
    """What one round does."""
    if when == "again":
        ask(who)
        return lambda: Round(1, 0.0, ask(who))
    # Through a string, as a script would be: with `spawn`, every worker begins with its own imports anyway.
    return lambda: Round(1, 0.0, _timed([sys.executable, "-c", PROGRAM.format(who=who)]))


def ask(who: str) -> float:
    """Seconds until two processes have a model and one of them has answered; their end is not counted."""
    from benchmarks.crowds import IMAGE, network

    import numpy as np  # isort: skip  the imports belong to a fresh program

    row = np.zeros((1, *IMAGE), np.float32)
    begun = time.perf_counter()
    end = {"modelfleet": _replicas, "spawn": _spawned}[who](network(), row)
    seconds = time.perf_counter() - begun
    end()
    return seconds


def _replicas(net: Any, row: Any) -> Callable[[], None]:
    import modelfleet as mf

    replicas = mf.Replicas(net, devices="cpu:0,cpu:1")
    replicas.submit("ada", row).result()
    return replicas.close


def _spawned(net: Any, row: Any) -> Callable[[], None]:
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    rows, answers = context.Queue(), context.Queue()
    processes = [context.Process(target=_serve, args=(net, rows, answers), daemon=True) for _ in range(2)]
    for process in processes:
        process.start()
    rows.put(row)
    answers.get()

    def end() -> None:
        for process in processes:
            process.terminate()
            process.join()

    return end


def _serve(net: Any, rows: Any, answers: Any) -> None:
    import torch

    torch.set_num_threads(1)
    with torch.no_grad():
        while True:
            answers.put(net(torch.from_numpy(rows.get())).numpy())


def _timed(command: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


if __name__ == "__main__":
    compete(prepare)
