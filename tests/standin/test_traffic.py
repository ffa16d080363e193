"""In a steady step, nothing is copied between the host and the device, and the host waits for nothing."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.standin.device import Told, listening, where
from tests.standin.models import DATA, X, Y, dropping, fleet_on
from torch import nn

import modelfleet as mf
from modelfleet.lanes.lane import Lane

TRAFFIC = ("h2d", "d2h", "p2p", "item", "sync", "pinned")


def traffic_of_steps(fleet: mf.Fleet, data: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    """What steps five and later of a fit's first epoch copy, or wait for: with the line of the library."""
    found: Counter[str] = Counter()
    steps = 0
    train = Lane.train

    def counted(self: Lane, *args: Any) -> None:
        nonlocal steps
        steps += 1
        train(self, *args)

    def tell(told: Told) -> None:
        if told.kind in TRAFFIC and 5 <= steps < LAST:
            found[f"{told.kind} {told.text} at {where()}"] += 1

    monkeypatch.setattr(Lane, "train", counted)
    with listening(tell):
        fleet.fit(data, progress=False, batch_size=2, strategy="fused", **options)
    assert steps >= LAST
    return sorted(found)


LAST = 18  # steps of an epoch, before its end


@pytest.mark.parametrize("build", list(DATA), ids=lambda build: build.__name__.lower())
def test_arrays(build: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    data = tuple(np.concatenate([part] * 2)[:40] for part in DATA[build])
    assert traffic_of_steps(fleet_on("standin:0", build), data, monkeypatch) == []


def test_own_data(monkeypatch: pytest.MonkeyPatch) -> None:
    own = mf.each({str(number): (X + number, Y) for number in range(3)})
    assert traffic_of_steps(fleet_on("standin:0"), own, monkeypatch) == []


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop", "lion"])
def test_optimizers(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert traffic_of_steps(fleet_on("standin:0", optimizer=optimizer, clip_norm=1.0), (X, Y), monkeypatch) == []


def test_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_on("standin:0", metrics=["accuracy"])
    assert traffic_of_steps(fleet, (X, Y), monkeypatch, record_steps=True) == []


def test_dropout_at_own_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_on("standin:0", dropping, rate=mf.each([0.1, 0.2, 0.3]))
    assert traffic_of_steps(fleet, (X, Y), monkeypatch) == []


def test_other_optimizers_and_numbers_in_one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_on("standin:0", optimizer=mf.each(["adam", "sgd", "adam"]), lr=mf.each([0.1, 0.2, 0.3]))
    assert traffic_of_steps(fleet, (X, Y), monkeypatch) == []


def test_a_narrowed_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_on("standin:0", members=4)
    fleet.fit((X, Y), epochs=mf.each([1, 1, 1, 3]), batch_size=2, progress=False, strategy="fused")
    torch.accelerator.synchronize()
    assert traffic_of_steps(fleet, (X, Y), monkeypatch) == []
