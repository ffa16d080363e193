"""What people who did not know the code met in chains: each was a wrong number, or an error that did not help."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf
from modelfleet.errors import InputError, StoreError, StrategyError

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(0, 3, (48,), generator=torch.Generator().manual_seed(1))


def stages(seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(6, 8), nn.ReLU()).double(), nn.Linear(8, 3).double()]


def chain(models: list[nn.Module], devices: str = "cpu:0,cpu:1", **recipe: object) -> mf.Chain:
    made = mf.Chain(models, devices=devices)
    made.compile("adam", recipe.pop("loss", "cross_entropy"), **{"lr": 1e-2, **recipe})  # pyrefly: ignore
    return made


def test_a_stage_in_evaluation_mode_stays_in_it() -> None:
    torch.manual_seed(0)
    frozen = (
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).double().requires_grad_(False).eval()
    )
    head = nn.Linear(8, 3).double()
    before = copy.deepcopy(frozen.state_dict())
    alone = nn.Sequential(copy.deepcopy(frozen), copy.deepcopy(head))
    alone[0].eval()
    history = chain([frozen, head]).fit((X, Y), batch_size=16, epochs=2, progress=False)
    fleet = mf.Fleet([alone])
    fleet.compile("adam", "cross_entropy", lr=1e-2)
    expected = fleet.fit((X, Y), batch_size=16, epochs=2, progress=False)
    assert history["chain"]["loss"] == pytest.approx(expected["0"]["loss"], rel=1e-10)
    assert all(torch.equal(before[name], tensor) for name, tensor in frozen.state_dict().items())
    assert not frozen.training


@pytest.mark.parametrize(
    "loss",
    [
        partial(F.cross_entropy, weight=torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)),
        partial(F.cross_entropy, reduction="sum"),
    ],
)
def test_a_loss_that_is_no_mean_over_rows_is_refused_in_micro_batches(loss: partial) -> None:
    made = chain(stages(), loss=loss)
    with pytest.raises(InputError, match=r"not the mean of its rows' losses.*micro_batches=1"):
        made.fit((X, Y), batch_size=16, progress=False)
    made.fit((X, Y), batch_size=16, micro_batches=1, progress=False)


@pytest.mark.parametrize(
    ("recipe", "arguments", "what"),
    [
        ({"lr": 0.5}, {}, "hyperparameters"),
        ({"loss": nn.MultiMarginLoss()}, {}, "optimizer and loss"),
        ({"clip_norm": 1.0}, {}, "clip_norm"),
        ({}, {"batch_size": 8}, "data"),
        ({}, {"epochs": 5}, "epochs"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused(
    tmp_path: Path, recipe: dict[str, object], arguments: dict[str, int], what: str
) -> None:
    kept = {"callbacks": [mf.Checkpoint(tmp_path / "run")], "progress": False}
    given = {"batch_size": 16, "epochs": 2}
    chain(stages()).fit((X, Y), **given, **kept)  # pyrefly: ignore
    weights = stages()
    with pytest.raises(StoreError, match=f"its {what}.* was"):
        chain(weights, **recipe).fit((X, Y), **{**given, **arguments}, **kept)  # pyrefly: ignore
    assert all(torch.equal(a, b) for a, b in zip(weights[1].parameters(), stages()[1].parameters(), strict=True))


def test_a_run_continues_in_another_cut(tmp_path: Path) -> None:
    class Broken(mf.Callback):
        def on_epoch_end(self, run: mf.callbacks.Run) -> None:
            if run.epoch == 2:
                raise RuntimeError("enough")

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), nn.Linear(6, 3)
        ).double()

    def fit(model: nn.Module, cuts: int, *callbacks: mf.Callback) -> list[float]:
        made = mf.Chain(mf.split(model, cuts, X[:8]), devices=",".join(f"cpu:{rank}" for rank in range(cuts)))
        made.compile("adam", "cross_entropy", lr=1e-2)
        return made.fit((X, Y), epochs=4, batch_size=16, callbacks=callbacks, progress=False)["chain"]["loss"]

    with pytest.raises(RuntimeError, match="enough"):
        fit(net(), 2, mf.Checkpoint(tmp_path / "run"), Broken())
    continued, unbroken = net(), net()
    losses = fit(continued, 3, mf.Checkpoint(tmp_path / "run"), mf.Callback())
    assert losses == pytest.approx(fit(unbroken, 2), rel=1e-10)
    for one, other in zip(continued.parameters(), unbroken.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_plans_of_equal_arguments_are_equal() -> None:
    made = chain(stages())
    assert made.plan((X, Y), batch_size=16) == made.plan((X, Y), batch_size=16)
    assert made.plan((X, Y), batch_size=16) != made.plan((X, Y), batch_size=8)
    assert " ms" not in str(made.plan(batch_size=16))  # nothing was measured


def test_other_libraries_arguments_are_explained() -> None:
    with pytest.raises(InputError, match="validation_data"):
        chain(stages()).fit((X, Y), validation_data=(X, Y))  # pyrefly: ignore


class Counting(nn.Module):
    """Counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8).double()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


@pytest.mark.slow
def test_state_in_python_is_refused_in_processes() -> None:
    made = chain([Counting(), stages()[1]])
    with pytest.raises(StrategyError, match=r"node '0' keeps state in Python: after a step, calls is"):
        made.fit((X, Y), batch_size=16, strategy="processes", progress=False)
