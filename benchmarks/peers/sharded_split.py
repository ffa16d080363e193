"""As `torch.nn.DataParallel` does it: every batch of a member is cut in two, and a thread takes each part.

DataParallel itself wants GPUs; this is its scatter, parallel apply and gather on two CPU threads; as there, one
backward pass gives the gradient of the whole batch.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from benchmarks.peers import Round, compete
from benchmarks.variants import Variant, by_hand, dataset, steps


class Split(nn.Module):
    """A model whose batches are computed in two halves at once."""

    def __init__(self, model: nn.Module, threads: ThreadPoolExecutor) -> None:
        super().__init__()
        self.model = model
        self._threads = threads

    def forward(self, x: Tensor) -> Tensor:
        """What the model gives."""
        return torch.cat(list(self._threads.map(self.model, x.chunk(2))))


def prepare(quick: bool) -> Callable[[], Round]:
    torch.set_num_threads(1)
    x, y = map(torch.from_numpy, dataset(quick))
    threads = ThreadPoolExecutor(2)
    members = [Variant(number, quick) for number in by_hand(quick)]
    for member in members:
        member.model = Split(member.model, threads)

    def train_round() -> Round:
        losses = [member.train_epoch(x, y) for member in members]
        return Round(len(members) * steps(quick), sum(losses) / len(losses))

    train_round()
    return train_round


if __name__ == "__main__":
    compete(prepare)
