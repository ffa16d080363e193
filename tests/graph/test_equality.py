"""A chain has the numbers of the undivided model, on any devices and with any schedule."""

import pytest
import torch
from tests.graph.comparing import (
    HYBRID,
    THREE,
    TWO,
    assert_as_undivided,
    assert_same_weights,
    chain_of,
    fit,
    rows,
    stages,
    weights,
)
from torch import Tensor, nn

import modelfleet as mf

PIPELINES = ["1f1b", "gpipe", "interleaved", "zero-bubble"]


def deeper(*, dropout: float = 0.0) -> list[nn.Module]:
    """Five stages, so that two devices have several each."""
    torch.manual_seed(1)
    first, second, third = stages(dropout=dropout)
    more = [nn.Sequential(nn.Linear(7, 7), nn.GELU()).double(), nn.Sequential(nn.LayerNorm(7), nn.Tanh()).double()]
    return [first, *more, second, third]


@pytest.mark.parametrize("recompute", [False, True, ["0", "2"]])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_pipeline_has_the_numbers_of_the_undivided_model(pipeline: str, recompute: bool | list[str]) -> None:
    options = {"pipeline": pipeline, "recompute": recompute}
    assert_as_undivided(deeper(dropout=0.3), rows(), devices=TWO, options=options)


@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe", "zero-bubble"])
def test_rows_of_devices_share_the_micro_batches(pipeline: str) -> None:
    assert_as_undivided(stages(dropout=0.3), rows(), devices=HYBRID, options={"pipeline": pipeline})


@pytest.mark.parametrize("micro_batches", [1, 3, 5, 8])
def test_micro_batches_need_not_divide_the_batch(micro_batches: int) -> None:
    assert_as_undivided(stages(dropout=0.3), rows(), options={"micro_batches": micro_batches})


@pytest.mark.parametrize("count", [33, 41, 45])
@pytest.mark.parametrize("devices", [THREE, HYBRID])
def test_the_last_batch_may_be_short(count: int, devices: object) -> None:
    options = {"micro_batches": 4}
    assert_as_undivided(stages(dropout=0.3), rows(count), devices=devices, options=options)


def test_the_second_step_may_be_the_short_one() -> None:
    chain = assert_as_undivided(stages(), rows(10), options={"micro_batches": 4})
    assert chain.last_plan is not None
    assert chain.last_plan.measured is not None


def test_float32() -> None:
    models = stages(dropout=0.3, dtype=torch.float32)
    assert_as_undivided(models, rows(dtype=torch.float32), devices=HYBRID)


def test_bf16() -> None:
    models = stages(dropout=0.3, dtype=torch.float32)
    recipe = {"precision": "bf16", "optimizer": "sgd"}
    assert_as_undivided(models, rows(dtype=torch.float32), recipe=recipe, tolerance=2e-2)


def test_bf16_with_one_micro_batch_rounds_alike() -> None:
    models = stages(dropout=0.3, dtype=torch.float32)
    recipe = {"precision": "bf16", "optimizer": "sgd"}
    assert_as_undivided(models, rows(dtype=torch.float32), recipe=recipe, options={"micro_batches": 1})


@pytest.mark.parametrize("frozen", [[0], [1], [2], [0, 1], [0, 2]])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_frozen_stages(frozen: list[int], pipeline: str) -> None:
    models = stages(dropout=0.3)
    for index in frozen:
        models[index].requires_grad_(False)
    assert_as_undivided(models, rows(), devices=THREE, options={"pipeline": pipeline})


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_stage_may_be_frozen_in_part(pipeline: str) -> None:
    models = stages()
    next(models[0].parameters()).requires_grad_(False)
    next(models[2].parameters()).requires_grad_(False)
    assert_as_undivided(models, rows(), options={"pipeline": pipeline})


@pytest.mark.parametrize(
    ("strategy", "pipeline"),
    [("threads", "1f1b"), ("threads", "zero-bubble"), pytest.param("processes", "1f1b", marks=pytest.mark.slow)],
)
def test_validation_metrics_and_sample_weights(strategy: str, pipeline: str) -> None:
    x, y = rows()
    given = torch.rand(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_as_undivided(
        stages(dropout=0.3),
        (x, y, given),
        devices=HYBRID if strategy == "threads" else TWO,
        recipe={"metrics": ["accuracy"], "clip_norm": 0.1, "schedule": "cosine", "weight_decay": 0.1},
        options={"strategy": strategy, "pipeline": pipeline},
        shared={"validation": rows(21, seed=1)},
    )


@pytest.mark.parametrize("devices", [TWO, HYBRID])
def test_the_norm_that_is_clipped_is_that_of_all_stages(devices: object) -> None:
    assert_as_undivided(
        stages(), rows(), devices=devices, recipe={"optimizer": "sgd", "lr": 1.0, "clip_norm": 0.05}
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "rmsprop", "adagrad", "lion", torch.optim.NAdam])
def test_every_optimizer(optimizer: object) -> None:
    extra = {"momentum": 0.9} if optimizer == "sgd" else {}
    assert_as_undivided(stages(), rows(), recipe={"optimizer": optimizer, "weight_decay": 0.01, **extra})


@pytest.mark.parametrize(
    "loss",
    [
        "mse",
        "l1",
        "huber",
        lambda output, target: ((output - target) ** 2).mean(),
        nn.MSELoss(),
        nn.SmoothL1Loss(),
    ],
    ids=["mse", "l1", "huber", "function", "MSELoss", "SmoothL1Loss"],
)
def test_losses_of_numbers(loss: object) -> None:
    x, _ = rows()
    assert_as_undivided(stages(), (x, x[:, :3].clone()), recipe={"loss": loss}, options={"micro_batches": 3})


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
    ids=["weight", "ignore_index", "label_smoothing", "sum"],
)
def test_losses_whose_count_is_not_that_of_the_rows(loss: nn.Module) -> None:
    assert_as_undivided(stages(), rows(), recipe={"loss": loss}, options={"micro_batches": 3})


def test_a_loss_that_draws_does_so_as_in_the_undivided_model_and_not_in_micro_batches() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(nn.functional.dropout(output, 0.3), target)

    assert_as_undivided(stages(dropout=0.3), rows(), recipe={"loss": loss}, options={"micro_batches": 1})
    with pytest.raises(mf.InputError, match=r"or it draws random numbers.*set micro_batches=1"):
        fit(chain_of(stages(), loss=loss), rows())


def test_validation_of_stages_that_cost_unequally() -> None:
    torch.manual_seed(0)
    heavy = nn.Sequential(nn.Linear(4, 2000), *(nn.Linear(2000, 2000) for _ in range(1)), nn.Linear(2000, 7))
    models = [heavy.double(), *stages()[1:], nn.Identity()]
    shared = {"validation": rows(16, seed=1), "epochs": 1}
    assert_as_undivided(models, rows(16), devices=TWO, shared=shared)


def test_validation_with_interleaved_stages() -> None:
    options = {"pipeline": "interleaved"}
    assert_as_undivided(deeper(), rows(), devices=TWO, options=options, shared={"validation": rows(21, seed=1)})


def test_a_rate_per_stage() -> None:
    x, y = rows()
    models = stages()
    whole = nn.Sequential(*stages())
    groups = [
        {"params": part.parameters(), "lr": rate} for part, rate in zip(whole, (0.1, 0.01, 0.5), strict=True)
    ]
    optimizer = torch.optim.SGD(groups)
    chain = chain_of(models, optimizer="sgd", lr=mf.each([0.1, 0.01, 0.5]))
    fit(chain, (x, y), batch_size=40, epochs=20, shuffle=False)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(whole(x), y).backward()
        optimizer.step()
    assert_same_weights(weights(chain), weights(whole))


def test_an_optimizer_per_stage() -> None:
    x, y = rows()
    models = stages()
    whole = nn.Sequential(*stages())
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(whole[0].parameters(), 0.1),
        torch.optim.AdamW(whole[1].parameters(), 0.01),
        torch.optim.RMSprop(whole[2].parameters(), 0.01),
    ]
    chain = chain_of(models, optimizer=mf.each(["sgd", "adamw", "rmsprop"]), lr=mf.each([0.1, 0.01, 0.01]))
    fit(chain, (x, y), batch_size=40, epochs=20, shuffle=False)
    for _ in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(whole(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_same_weights(weights(chain), weights(whole))
