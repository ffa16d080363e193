"""Members of unequal widths whose numbers a callback changes, so that they can't be stepped by one program."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modelfleet as mf
from modelfleet.callbacks import Run

WIDTHS = [5, 8, 7, 8, 6, 5]
RATES = [0.0, 0.1, 0.5, 0.3, 0.25, 0.4]
OPTIMIZERS = ["adam", "sgd", "sgd", "adamw", "rmsprop", "adam"]
LOSSES = [nn.CrossEntropyLoss(label_smoothing=place / 10) for place in range(6)]


def make(width: int, rate: float) -> nn.Module:
    layers = nn.Linear(6, width), nn.Tanh(), nn.LayerNorm(width), nn.Dropout(rate), nn.Linear(width, 4)
    return nn.Sequential(*layers).double()


class OwnEps(mf.Callback):
    """Gives every member a LayerNorm.eps of its own after the first epoch, and the usual one after the third."""

    def on_epoch_end(self, run: Run) -> None:
        for place, name in enumerate(run.fleet.names):
            run.fleet[name][2].eps = 1e-5 if run.epoch == 3 else 1e-3 * (place + 1)


def trained(strategy: Any, **recipe: Any) -> tuple[mf.Fleet, mf.History]:
    generator = np.random.default_rng(0)
    x, y = torch.tensor(generator.normal(size=(40, 6))), torch.tensor(generator.integers(0, 4, 40))
    fleet = mf.Fleet.build(make, 6, seed=0, width=mf.each(WIDTHS), rate=mf.each(RATES))
    fleet.compile(**recipe, lr=0.01)
    options: dict[str, Any] = {"epochs": 4, "batch_size": 16, "validation": (x, y), "progress": False}
    return fleet, fleet.fit((x, y), strategy=strategy, callbacks=[OwnEps()], **options)


@pytest.mark.parametrize("clip_norm", [None, 0.1], ids=["", "clipped"])
@pytest.mark.parametrize("optimizer", ["adam", mf.each(OPTIMIZERS)], ids=["one optimizer", "several"])
@pytest.mark.parametrize("loss", ["cross_entropy", mf.each(LOSSES)], ids=["one loss", "several losses"])
def test_members_that_get_an_eps_of_their_own_go_on_as_alone(loss: Any, optimizer: Any, clip_norm: Any) -> None:
    recipe = {"optimizer": optimizer, "loss": loss, "clip_norm": clip_norm}
    (fused, history), (apart, expected) = (trained(how, **recipe) for how in ("fused", "interleaved"))
    assert not history.failed
    for name in fused.names:
        for metric, values in history[name].items():
            np.testing.assert_allclose(values, expected[name][metric], rtol=0, atol=1e-10)
        for key, tensor in fused[name].state_dict().items():
            torch.testing.assert_close(tensor, apart[name].state_dict()[key], rtol=0, atol=1e-10)
