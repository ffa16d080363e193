"""As `torch.nn.DataParallel` does it: every batch is cut in two, a replica in a thread takes each part.

DataParallel itself wants GPUs; this is its scatter, parallel apply and gather on two CPU threads.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import numpy as np
import torch

from benchmarks.crowds import Rows, answer, batches, check, crowd, gathered, network
from benchmarks.peers import Round, compete


def prepare(quick: bool) -> Callable[[], Round]:
    torch.set_num_threads(1)
    rows, net = crowd(quick), network()
    replicas = [net, deepcopy(net)]
    threads = ThreadPoolExecutor(2)

    def answers() -> Iterator[tuple[str, int, np.ndarray]]:
        for batch in batches(rows):
            parts = [part for part in np.array_split(batch.rows, 2) if len(part)]
            done = threads.map(answer, replicas, parts)
            yield batch.user, batch.start, np.concatenate(list(done))

    def map_round() -> Rows:
        return gathered(rows, answers())

    check(map_round(), rows)
    return lambda: Round(sum(map(len, map_round().values())), 0.0)


if __name__ == "__main__":
    compete(prepare)
