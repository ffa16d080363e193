"""`multiprocessing.Pool` with two processes of one thread: each trains the next member, one after the other."""

from collections.abc import Callable
from multiprocessing import get_context

import torch
from torch import Tensor

from benchmarks.peers import Round, compete
from benchmarks.variants import Variant, by_hand, dataset, steps

_data: list[Tensor] = []  # a worker's own; filled once in its process


def take_up(quick: bool) -> None:
    """Keep the data in this worker."""
    torch.set_num_threads(1)
    _data.extend(map(torch.from_numpy, dataset(quick)))


def train(number: int, quick: bool) -> float:
    """Build a member in a worker, and train it for an epoch; its loss."""
    x, y = _data
    return Variant(number, quick).train_epoch(x, y)


def prepare(quick: bool) -> Callable[[], Round]:
    pool = get_context("spawn").Pool(2, initializer=take_up, initargs=(quick,))
    members = by_hand(quick)

    def train_round() -> Round:
        losses = pool.starmap(train, [(number, quick) for number in members], chunksize=1)
        return Round(len(members) * steps(quick), sum(losses) / len(losses))

    train_round()
    return train_round


if __name__ == "__main__":
    compete(prepare)
