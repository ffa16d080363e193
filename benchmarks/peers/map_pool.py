"""`multiprocessing.Pool` with two processes of one thread: batches dealt as the processes become free."""

from collections.abc import Callable
from multiprocessing import get_context

import numpy as np
import torch
from torch import nn

from benchmarks.crowds import Batch, Rows, answer, batches, check, crowd, gathered, network
from benchmarks.peers import Round, compete

_nets: list[nn.Module] = []  # a worker's own; filled once in its process


def take_up(net: nn.Module) -> None:
    """Keep the network in this worker."""
    torch.set_num_threads(1)
    _nets.append(net)


def serve(batch: Batch) -> tuple[str, int, np.ndarray]:
    """Answer a batch in a worker."""
    return batch.user, batch.start, answer(_nets[0], batch.rows)


def prepare(quick: bool) -> Callable[[], Round]:
    rows = crowd(quick)
    pool = get_context("spawn").Pool(2, initializer=take_up, initargs=(network(),))

    def map_round() -> Rows:
        return gathered(rows, pool.imap_unordered(serve, batches(rows)))

    check(map_round(), rows)
    return lambda: Round(sum(map(len, map_round().values())), 0.0)


if __name__ == "__main__":
    compete(prepare)
