"""BatchNorm sees the rows of a micro-batch: one of them is the undivided model, several are a loop by hand."""

import copy
from typing import Any

import pytest
import torch
from tests.graph.comparing import TWO, assert_same_weights, chain_of, fit, undivided, weights
from torch import Tensor, nn
from torch.nn import functional as F

IMAGES = torch.randn(40, 1, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CLASSES = torch.arange(40) % 3
HAND: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9}


class Residual(nn.Module):
    """A block of a small ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.inner(x), inplace=True)


def resnet() -> list[nn.Module]:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return [stage.double() for stage in (stem, Residual(4), nn.Sequential(Residual(4), nn.MaxPool2d(2)), head)]


@pytest.mark.parametrize("pipeline", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("recompute", [False, True])
def test_one_micro_batch_is_the_undivided_model(pipeline: str, recompute: bool) -> None:
    models = resnet()
    whole = nn.Sequential(*copy.deepcopy(models))
    chain = chain_of(models, TWO)
    undivided(whole, (IMAGES, CLASSES))
    fit(chain, (IMAGES, CLASSES), micro_batches=1, pipeline=pipeline, recompute=recompute)
    assert_same_weights(weights(chain), weights(whole))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe", "interleaved", "zero-bubble"])
def test_micro_batches_are_a_loop_over_micro_batches(pipeline: str, recompute: bool) -> None:
    models = resnet()
    whole = nn.Sequential(*copy.deepcopy(models))
    chain = chain_of(models, TWO, **HAND)
    options = {"micro_batches": 3, "pipeline": pipeline, "recompute": recompute}
    fit(chain, (IMAGES, CLASSES), shuffle=False, **options)
    optimizer = torch.optim.SGD(whole.parameters(), 0.05, momentum=0.9)
    for step in range(20):
        rows = range(8 * (step % 5), 8 * (step % 5) + 8)
        optimizer.zero_grad()
        for part in (rows[:2], rows[2:5], rows[5:]):
            output = whole(IMAGES[list(part)])
            (F.cross_entropy(output, CLASSES[list(part)], reduction="sum") / 8).backward()
        optimizer.step()
    assert_same_weights(weights(chain), weights(whole))


def test_short_batches_keep_two_rows_for_a_norm() -> None:
    models = resnet()
    models[1] = nn.Sequential(models[1], nn.Flatten(), nn.BatchNorm1d(144).double(), nn.Unflatten(1, (4, 6, 6)))
    chain = chain_of(models, TWO)
    fit(chain, (IMAGES[:37], CLASSES[:37]), batch_size=16, epochs=1)


def test_buffers_are_those_before_a_step_that_is_not_finite() -> None:
    models = resnet()
    images = IMAGES.clone()
    images[8:] = float("nan")
    chain = chain_of(models, TWO)
    with pytest.raises(Exception, match="step 2"):
        fit(chain, (images, CLASSES), shuffle=False, micro_batches=2)
    good = chain_of(resnet(), TWO)
    fit(good, (IMAGES[:8], CLASSES[:8]), shuffle=False, epochs=1, micro_batches=2)
    assert_same_weights(weights(chain), weights(good))


def test_a_frozen_norm_is_that_of_the_undivided_model() -> None:
    models = resnet()
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    whole = nn.Sequential(*copy.deepcopy(models))
    chain = chain_of(models, TWO)
    undivided(whole, (IMAGES, CLASSES))
    fit(chain, (IMAGES, CLASSES))
    assert_same_weights(weights(chain), weights(whole))
    assert chain.last_plan is not None
    assert chain.last_plan.notes == ()
