"""A device that runs out of memory: lanes are halved, and all members finish with the weights of an ample one."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tests.helpers import toy
from tests.standin.device import limited
from tests.standin.models import differing, fitted, wide

import modelfleet as mf
from modelfleet.devices import Device
from modelfleet.frameworks.torch import devices
from modelfleet.planning import measurements

ONE = torch.device("standin", 0)
DATA = toy(64)
# Bytes of a tensor: a hidden layer of 8 members on a batch takes 32 kB, and of 4 members 16 kB. So only 4 fit. The
# parameters of 8 members, in one buffer, take 16.5 kB.
SMALL = 20_000


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("MODELFLEET_CACHE", str(tmp_path))


@pytest.fixture
def small() -> Iterator[ExitStack]:
    """Makes the first device small when a test wants it, until the test ends."""
    with ExitStack() as stack:
        yield stack


def fit_eight(device: str, **options: Any) -> mf.Fleet:
    return fitted(device, DATA, {"batch_size": 16, "epochs": 3, **options}, build=wide, members=8)


@pytest.fixture(scope="module")
def expected() -> mf.Fleet:
    return fit_eight("standin:1", strategy="fused")  # which nobody limits


class Shrink(mf.Callback):
    """Makes the device smaller after some steps, as another process would that takes memory."""

    def __init__(self, stack: ExitStack, steps: int) -> None:
        self.stack, self.left = stack, steps

    def on_step_end(self, run: Any) -> None:
        self.left -= 1
        if not self.left:
            self.stack.enter_context(limited(0, largest=SMALL))


def widths(fleet: mf.Fleet) -> list[int]:
    return [len(lane.members) for lane in fleet.plan(DATA, batch_size=16).lanes]


def test_at_the_first_step(small: ExitStack, expected: mf.Fleet) -> None:
    small.enter_context(limited(0, largest=SMALL))
    there = fit_eight("standin:0", strategy="fused")
    assert differing(there, expected) == []
    assert widths(there) == [4, 4], "the width that fits is remembered"


@pytest.mark.parametrize("steps", [1, 2, 5, 8])
def test_in_the_middle(steps: int, small: ExitStack, expected: mf.Fleet) -> None:
    there = fit_eight("standin:0", strategy="fused", callbacks=[Shrink(small, steps)])
    assert differing(there, expected) == []
    assert widths(there) == [4, 4]


def test_in_a_trial_of_the_planner(small: ExitStack, expected: mf.Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "SHORT_RUN", 1)
    small.enter_context(limited(0, largest=SMALL))
    there = fit_eight("standin:0")
    assert differing(there, expected) == []


def test_halving_needs_no_memory_beside_the_halves(small: ExitStack) -> None:
    """The failed step's tensors and the old lane's state are gone before the halves are built."""
    gc.collect()
    small.enter_context(limited(0, total=torch.accelerator.memory_allocated(0) + 220_000))
    there = fit_eight("standin:0", strategy="fused", batch_size=64)
    assert max(len(lane.members) for lane in there.plan(DATA, batch_size=64).lanes) < 8
    assert differing(there, fit_eight("standin:1", strategy="fused", batch_size=64)) == []


def test_memory_that_torch_keeps_counts_as_free() -> None:
    torch.accelerator.empty_cache()
    before = devices.memory(ONE)
    held = torch.empty(1 << 20, dtype=torch.uint8, device=ONE)
    during = devices.memory(ONE)
    del held
    assert before is not None
    assert during is not None
    assert during.free == before.free - (1 << 20)
    assert torch.accelerator.memory_reserved(ONE) >= 1 << 20
    assert devices.memory(devices.native(Device("standin", 0))) == before
