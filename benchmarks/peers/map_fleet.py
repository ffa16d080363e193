"""modelfleet: `mf.map` over the users, on one device or on two."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

import modelfleet as mf
from benchmarks.crowds import BATCH, check, crowd, network
from benchmarks.peers import Round, compete


def prepare(devices: str, quick: bool) -> Callable[[], Round]:
    torch.set_num_threads(1)
    net, rows = network(), crowd(quick)
    data = mf.each(rows)

    def map_round() -> Mapping[Any, np.ndarray]:
        return mf.map(net, data, devices=devices, batch_size=BATCH, progress=False)

    check(map_round(), rows)
    return lambda: Round(sum(map(len, map_round().values())), 0.0)


if __name__ == "__main__":
    compete(prepare)
