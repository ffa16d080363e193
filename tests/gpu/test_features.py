"""What a fleet can do, it does on an accelerator with the numbers of the CPU: much of it indexes what is there."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.gpu.device import GPU
from tests.helpers import toy
from tests.standin.models import (
    IMAGES,
    LABELS,
    TOKENS,
    Recurrent,
    X,
    Y,
    close,
    convolution,
    dropping,
    fitted,
    fleet_on,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import modelfleet as mf

pytestmark = GPU

WIDTHS: dict[str, Any] = {"build": dropping, "width": mf.each([6, 7, 9])}
OPTIONS: dict[str, Any] = {"epochs": 3, "batch_size": 8, "strategy": "fused", "progress": False}
Feature = Callable[[str], mf.Fleet]
FEATURES: dict[str, Feature] = {}


def feature(run: Feature) -> Feature:
    FEATURES[run.__name__] = run
    return run


def fit(fleet: mf.Fleet, data: Any = (X, Y), **options: Any) -> mf.Fleet:
    """The fleet after a fit in which nothing has failed."""
    history = fleet.fit(data, **{**OPTIONS, **options})
    assert not history.failed
    return fleet


@feature
def unequal_widths_in_one_lane(device: str) -> mf.Fleet:
    fleet = fit(fleet_on(device, **WIDTHS))
    assert len(fleet.plan((X, Y), strategy="fused").lanes) == 1
    return fleet


@feature
def recurrent_layers_of_unequal_lengths(device: str) -> mf.Fleet:
    batches = [
        (TOKENS[start : start + 8, : 3 + number], LABELS[start : start + 8])
        for number, start in enumerate((0, 8, 16))
    ]
    return fit(fleet_on(device, Recurrent), batches, batch_size=None)


@feature
def own_data_of_unequal_lengths(device: str) -> mf.Fleet:
    return fit(fleet_on(device, dropping), mf.each([toy(rows, rows) for rows in (11, 24, 17)]))


@feature
def weights_of_rows(device: str) -> mf.Fleet:
    return fit(fleet_on(device), sample_weight=np.linspace(0, 2, len(X)), validation_split=0.2)


@feature
def stopping_early_with_the_best_weights(device: str) -> mf.Fleet:
    stop = mf.EarlyStopping("val_loss", patience=1, restore_best=True)
    return fit(fleet_on(device, lr=mf.each([0.1, 3.0, 0.2])), validation=(X, Y), callbacks=[stop], epochs=6)


@feature
def optimizers_and_schedules(device: str) -> mf.Fleet:
    fleet = fleet_on(
        device,
        optimizer=mf.each(["adam", "sgd", "lion"]),
        lr=mf.each([0.1, 0.05, 0.01]),
        schedule="cosine",
        clip_norm=0.5,
    )
    return fit(fleet, record_steps=True)


@feature
def numbers_of_their_own(device: str) -> mf.Fleet:
    def build(slope: float) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(slope), nn.Dropout(slope), nn.Linear(6, 3))

    losses = mf.each([nn.CrossEntropyLoss(label_smoothing=own) for own in (0.0, 0.1, 0.2)])
    fleet = mf.Fleet.build(build, 3, seed=3, devices=device, slope=mf.each([0.1, 0.2, 0.3]))
    fleet.compile("adam", losses, lr=0.05)
    return fit(fleet)


@feature
def an_objective(device: str) -> mf.Fleet:
    def objective(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        scale = torch.tensor([1.0, 2.0, 3.0]).to(x)
        return nn.functional.cross_entropy(model(x) * scale, y) + 0.01 * model(x).square().mean()

    return fit(fleet_on(device, dropping, loss=None, objective=objective))


@feature
def loaders(device: str) -> mf.Fleet:
    torch.manual_seed(0)
    data = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    fleet = fit(fleet_on(device), DataLoader(data, batch_size=8, shuffle=True), batch_size=None)
    return fit(fleet, mf.each([DataLoader(data, batch_size=own) for own in (8, 10, 8)]), batch_size=None)


@feature
def averaging(device: str) -> mf.Fleet:
    return fit(
        fleet_on(device, convolution),
        (IMAGES, LABELS),
        exchange=mf.Average(1),
    )


@feature
def gossip(device: str) -> mf.Fleet:
    return fit(fleet_on(device, dropping), exchange=mf.Gossip(every_steps=2))


@feature
def population_based_training(device: str) -> mf.Fleet:
    fleet = fleet_on(device, members=4, lr=mf.each([0.1, 0.001, 0.2, 0.3]))
    return fit(fleet, validation=(X, Y), exchange=mf.Exploit(every=1, fraction=0.5))


@feature
def distillation(device: str) -> mf.Fleet:
    return fit(fleet_on(device, dropping), exchange=mf.Distill())


@feature
def members_that_come_and_go(device: str) -> mf.Fleet:
    fleet = fit(fleet_on(device, dropping))
    fleet.clone("1", as_="copy")
    fleet.drop("0")
    return fit(fit(fleet), epochs=mf.each([1, 2, 3]))


@feature
def a_verb_within_a_fit(device: str) -> mf.Fleet:
    class Ask(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            run.fleet.predict(X[:5])
            run.fleet.evaluate((X, Y))

    return fit(fleet_on(device, dropping), callbacks=[Ask()])


@feature
def another_strategy_after_the_first(device: str) -> mf.Fleet:
    fleet = fit(fleet_on(device, dropping, optimizer="adam"))
    for strategy in ("interleaved", "threads", "fused"):
        fit(fleet, strategy=strategy, epochs=1)
    return fleet


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_has_the_numbers_of_the_cpu(name: str, one: str) -> None:
    close(FEATURES[name](one), FEATURES[name]("cpu"))


def test_an_ensemble_answers_as_on_the_cpu(one: str) -> None:
    both = [mf.Ensemble(fitted(device, (X, Y), {}, members=4)) for device in (one, "cpu")]
    for first, second in zip(*(own.predict(X, std=True) for own in both), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-5)
    assert both[0].evaluate((X, Y)) == pytest.approx(both[1].evaluate((X, Y)), rel=1e-4)


def test_a_fleet_behind_an_encoder_trains_as_on_the_cpu(one: str) -> None:
    found = []
    for device in ("cpu", one):
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        heads = mf.Fleet.build(lambda: nn.Linear(6, 3), 3, seed=1)
        chain = mf.Chain({"encoder": encoder, "heads": heads}, devices=device)
        chain.compile("adamw", "cross_entropy", lr=0.01)
        chain.fit((X, Y), epochs=2, batch_size=8, progress=False)
        found.append([*encoder.parameters(), *(p for name in heads.names for p in heads[name].parameters())])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own.cpu(), other.cpu(), rtol=1e-4, atol=1e-5)
