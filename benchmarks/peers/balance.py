"""Two replicas, one of them five times slower: what `mf.Replicas` takes, and what the ideal split would take.

The ideal is reckoned from what one replica of each speed does alone.
"""

import os
import time
from collections.abc import Callable

import torch

import modelfleet as mf
from benchmarks.contests import IDEAL
from benchmarks.crowds import BATCH, SLOW, TIMES, Rows, Slowed, check, count, network, uneven
from benchmarks.peers import Round, compete


def prepare(way: str, quick: bool) -> Callable[[], Round]:
    torch.set_num_threads(1)
    rows, net = uneven(quick), Slowed(network()).eval()
    return ideal(net, rows) if way == IDEAL else replicated(net, rows)


def replicated(net: Slowed, rows: Rows) -> Callable[[], Round]:
    """A round submits everybody's rows at once, the large users' first, and waits for all answers."""
    # Held for good: the harness ends this process.
    replicas = mf.Replicas(net, devices=f"cpu:0,{SLOW}", max_queue=10**6, batch_size=BATCH)

    def serve_round() -> Rows:
        futures = {user: replicas.submit(user, own) for user, own in rows.items()}
        return {user: future.result() for user, future in futures.items()}

    def timed_round() -> Round:
        before = replicas.stats()
        serve_round()
        return Round(count(rows), 0.0, notes=notes(before, replicas.stats()))

    check(serve_round(), rows)
    return timed_round


def notes(before: "mf.Stats", after: "mf.Stats") -> dict[str, float]:
    """What a round adds to the stats: how long small and large users waited, and what the slow replica did."""
    waits: dict[str, list[float]] = {"small": [], "large": []}
    for user, stats in after.users.items():
        earlier = before.users[user]
        total = stats.mean_wait * stats.requests - earlier.mean_wait * earlier.requests
        waits[str(user).rstrip("0123456789")].append(total / (stats.requests - earlier.requests))
    answered = {name: one.rows - before.replicas[name].rows for name, one in after.replicas.items()}
    return {
        "small users waited, mean s": sum(waits["small"]) / len(waits["small"]),
        "small users waited, longest s": max(waits["small"]),
        "large users waited, mean s": sum(waits["large"]) / len(waits["large"]),
        "the slow replica's part of the rows": answered[SLOW] / sum(answered.values()),
    }


def ideal(net: Slowed, rows: Rows) -> Callable[[], Round]:
    """A round measures the rate of a replica of each speed, alone, and reckons what both together could do."""
    large = next(iter(rows.values()))

    def rate(device: str, some: Rows) -> float:
        os.environ["MODELFLEET_DEVICE"] = device
        started = time.perf_counter()
        answers = mf.map(net, some, devices="cpu:0", batch_size=BATCH, progress=False)
        return sum(map(len, answers.values())) / (time.perf_counter() - started)

    def measure_round() -> Round:
        # As long as each other: so that neither falls on a quieter moment of the machine.
        fast = rate("cpu:0", {"large": large})
        slow = rate(SLOW, {"large": large[: max(BATCH, len(large) // TIMES)]})
        return Round(count(rows), 0.0, seconds=count(rows) / (fast + slow), notes={"times slower": fast / slow})

    measure_round()
    return measure_round


if __name__ == "__main__":
    compete(prepare)
