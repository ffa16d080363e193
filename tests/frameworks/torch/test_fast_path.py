"""torch's fast path for transformer layers in evaluation: with padding, members have the numbers that it gives."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf
from modelfleet.frameworks.torch.fused.fast_path import has_other_numbers

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # torch's own use

MEMBERS = 3
RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(16, 6, 8, generator=RANDOM)
PADDING = torch.arange(6)[None] >= torch.randint(1, 7, (16, 1), generator=RANDOM)
Y = torch.arange(16) % 3
HIDDEN = torch.ones(6, 6, dtype=torch.bool).triu(1)


class Encoder(nn.Module):
    """A classifier of sequences, which may be padded, by the mean over all positions."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))


class Causal(Encoder):
    """The same with a mask that hides later positions."""

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x, mask=HIDDEN, is_causal=False).mean(1))


def fleet_of(make: type[nn.Module] = Encoder) -> mf.Fleet:
    fleet = mf.Fleet.build(make, MEMBERS, seed=1)
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    return fleet


def alone(fleet: mf.Fleet, data: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        return {name: fleet[name].eval()(**data) for name in fleet.names}


PADDED = {"x": X, "padding": PADDING}


@pytest.fixture
def operations() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def close(found: Any, expected: dict[str, Tensor]) -> None:
    for name, own in expected.items():
        np.testing.assert_allclose(found[name], own, rtol=1e-4, atol=1e-5)


def test_padded_members_predict_as_alone() -> None:
    fleet = fleet_of()
    expected = alone(fleet, PADDED)
    for strategy in ("auto", "interleaved", "threads"):
        close(fleet.predict(PADDED, strategy=strategy), expected)
    with pytest.raises(mf.StrategyError, match="fast path for transformer layers gives masked positions other"):
        fleet.predict(PADDED, strategy="fused")


@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
def test_the_validation_of_padded_members_is_as_alone(strategy: Any) -> None:
    fleet = fleet_of()
    data = PADDED, Y
    history = fleet.fit(data, validation=data, epochs=2, batch_size=8, progress=False, strategy=strategy)
    scores = fleet.evaluate(data)
    for name, output in alone(fleet, PADDED).items():
        expected = F.cross_entropy(output, Y).item()
        assert history[name]["val_loss"][-1] == pytest.approx(expected, rel=1e-5)
        assert scores[name]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("make", "data"), [(Encoder, {"x": X}), (Causal, {"x": X})])
def test_members_whose_numbers_are_the_same_either_way_are_fused(
    make: type[nn.Module], data: dict[str, Tensor]
) -> None:
    fleet = fleet_of(make)
    close(fleet.predict(data, strategy="fused"), alone(fleet, data))


def test_without_the_fast_path_padded_members_are_fused(operations: None) -> None:
    fleet = fleet_of()
    close(fleet.predict(PADDED, strategy="fused"), alone(fleet, PADDED))


def test_a_call_that_raises_is_left_to_the_trial_after_it() -> None:
    def raises() -> None:
        raise ValueError("no such batch")

    assert not has_other_numbers(Encoder().eval(), raises)
