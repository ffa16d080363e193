"""torch, one member after the other, with `torch.compile` and the fused Adam.

Forward and loss are compiled once; every member's module comes in as an argument and reuses that code.
"""

from collections.abc import Callable

import torch

from benchmarks.peers import Round, serve
from benchmarks.peers.torch_loop import loss_and_output, train_all, trainees
from benchmarks.rows import Row


def prepare(row: Row) -> Callable[[], Round]:
    members = trainees(row, range(row.alone), fused=True)
    compiled = torch.compile(loss_and_output)
    train_all(row, members, compiled)
    return lambda: train_all(row, members, compiled)


if __name__ == "__main__":
    serve(prepare)
