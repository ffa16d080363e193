"""torch in two processes with one thread each: the members are split between them."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from benchmarks.peers import Round, serve
from benchmarks.peers.torch_loop import Trainee, train_all, trainees
from benchmarks.rows import Row

_share: list[Trainee] = []  # what a worker trains; filled once in its own process


def fill_share(row: Row, members: range) -> None:
    """Build this worker's members."""
    torch.set_num_threads(1)
    _share.extend(trainees(row, members))


def train_share(row: Row) -> Round:
    """One epoch of this worker's members."""
    return train_all(row, _share)


def prepare(row: Row) -> Callable[[], Round]:
    half = row.alone // 2
    # Two executors of one process each: so each trains its own share, whoever is free first.
    workers = [
        ProcessPoolExecutor(1, get_context("spawn"), initializer=fill_share, initargs=(row, members))
        for members in (range(half), range(half, row.alone))
    ]

    def train_round() -> Round:
        shares = [share.result() for share in [worker.submit(train_share, row) for worker in workers]]
        return Round(
            sum(share.member_steps for share in shares), sum(share.loss for share in shares) / len(shares)
        )

    train_round()
    return train_round


if __name__ == "__main__":
    serve(prepare)
