"""Ray actors by hand: two, the network by the object store, two batches on the way to each."""

import os
from collections.abc import Callable, Iterator
from secrets import token_hex
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.crowds import Rows, answer, batches, check, crowd, gathered, network
from benchmarks.peers import Round, compete

AHEAD = 2  # batches on the way to an actor: one being answered, one waiting


class Replica:
    """What an actor does."""

    def __init__(self, net: nn.Module) -> None:
        torch.set_num_threads(1)
        self._net = net

    def answer(self, rows: np.ndarray) -> np.ndarray:
        """Answer a batch. What comes from the object store is read-only, which torch would warn of."""
        return answer(self._net, rows.copy())


def own_cluster() -> Any:
    """Ray, on a cluster of two CPUs that nobody else finds."""
    # With a folder of its own, and a token, which Ray would else write into the home folder.
    os.environ |= {"RAY_AUTH_TOKEN": token_hex(), "RAY_TMPDIR": mkdtemp(prefix="ray")}
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    return ray


def prepare(quick: bool) -> Callable[[], Round]:
    ray = own_cluster()
    rows, net = crowd(quick), ray.put(network())
    actor: Any = ray.remote(num_cpus=1)(Replica)
    actors = [actor.remote(net) for _ in range(2)]

    def answers() -> Iterator[tuple[str, int, np.ndarray]]:
        waiting = batches(rows)
        sent: dict[Any, tuple[Any, str, int]] = {}

        def send(to: Any) -> None:
            batch = next(waiting, None)
            if batch is not None:
                sent[to.answer.remote(batch.rows)] = to, batch.user, batch.start

        for one in actors * AHEAD:
            send(one)
        while sent:
            for done in ray.wait(list(sent))[0]:
                free, user, start = sent.pop(done)
                send(free)
                yield user, start, ray.get(done)

    def map_round() -> Rows:
        return gathered(rows, answers())

    check(map_round(), rows)
    return lambda: Round(sum(map(len, map_round().values())), 0.0)


if __name__ == "__main__":
    compete(prepare)
