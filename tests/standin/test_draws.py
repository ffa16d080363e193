"""Draws on an accelerator: few operations, because to launch one takes longer than to compute it."""

import pytest
import torch
from tests.standin.device import Told, listening
from tests.standin.models import X, Y, differing, fleet_on

import modelfleet as mf
from modelfleet.lanes.lane import Lane


def deep(rate: float = 0.3, width: int = 6) -> torch.nn.Module:
    """A network of `width` layers with dropout."""
    layers = [layer for _ in range(width) for layer in (torch.nn.Linear(4, 4), torch.nn.Dropout(rate))]
    return torch.nn.Sequential(*layers, torch.nn.Linear(4, 3))


def launches(fleet: mf.Fleet, monkeypatch: pytest.MonkeyPatch) -> int:
    """The operations of the third step of a fit."""
    steps, found = 0, 0
    train = Lane.train

    def counted(self: Lane, *args: object) -> None:
        nonlocal steps
        steps += 1
        train(self, *args)  # pyrefly: ignore

    def tell(told: Told) -> None:
        nonlocal found
        found += told.kind == "op" and steps == 3

    with monkeypatch.context() as patched, listening(tell):
        patched.setattr(Lane, "train", counted)
        fleet.fit((X, Y), batch_size=4, progress=False, strategy="fused")
    return found


@pytest.mark.parametrize("rate", [0.3, mf.each([0.1, 0.2, 0.3])], ids=["one rate", "own rates"])
def test_a_further_dropout_is_few_operations(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    several = launches(fleet_on("standin:0", deep, rate=rate, width=3), monkeypatch)
    more = launches(fleet_on("standin:0", deep, rate=rate, width=4), monkeypatch)
    plain = [launches(fleet_on("standin:0", deep, rate=0.0, width=width), monkeypatch) for width in (3, 4)]
    assert (more - several) - (plain[1] - plain[0]) < 10  # a draw by itself is more than a hundred
    assert several - plain[0] < 150


@pytest.mark.parametrize("rate", [0.3, mf.each([0.1, 0.2, 0.3])], ids=["one rate", "own rates"])
def test_several_dropouts_have_the_masks_of_the_cpu(rate: float) -> None:
    fleets = [fleet_on(device, deep, rate=rate, width=4) for device in ("cpu", "standin:0")]
    for fleet in fleets:
        fleet.fit((X, Y), batch_size=4, epochs=2, progress=False, strategy="fused")
    assert differing(*fleets) == []
