"""Transports of ranks that are processes."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

from modelfleet.frameworks.torch.nodes.groups import GroupTransport
from modelfleet.workers.rendezvous import Rendezvous


@pytest.mark.skipif(sys.platform != "linux", reason="/proc lists the threads")
def test_closed_groups_end_before_garbage_is_collected() -> None:
    """A store that ends later would write to a descriptor that may belong to another file by then."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            meeting = Rendezvous()
            transport = GroupTransport.join(
                meeting.address, 0, 1, 30.0, channels=[], sums=[(0,)], device=torch.device("cpu")
            )
            assert _gloo_threads() > 0
            total = torch.ones(2)
            transport.begin(0, [])
            transport.sum("the step", (0,), [total])
            transport.close()
            assert _gloo_threads() == 0
            assert total.tolist() == [1.0, 1.0]
    finally:
        gc.enable()


def _gloo_threads() -> int:
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            names.append(Path(f"/proc/self/task/{task}/comm").read_text())
        except OSError:  # it has just ended
            continue
    return sum("gloo" in name for name in names)
