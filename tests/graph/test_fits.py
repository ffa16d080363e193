"""What a fit of a graph does beside the numbers: callbacks, checkpoints, plans, and leaving no traces."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from tests.graph.breaking import Press
from tests.graph.comparing import (
    HYBRID,
    RECIPE,
    TWO,
    assert_same_history,
    assert_same_weights,
    chain_of,
    fit,
    rows,
    stages,
    undivided,
    weights,
)
from torch import nn

import modelfleet as mf
from modelfleet.errors import InputError

mpl.use("agg")


class Recorder(mf.Callback):
    """Notes what it is called for, and what it sees."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.seen: list[tuple[int, int]] = []

    def on_fit_start(self, run: Any) -> None:
        self.calls.append("start")

    def on_step_end(self, run: Any) -> None:
        self.seen.append((run.epoch, run.step))

    def on_epoch_end(self, run: Any) -> None:
        self.calls.append(f"epoch {run.epoch} of {run.epochs}")

    def on_fit_end(self, run: Any) -> None:
        self.calls.append("end")


def test_callbacks_see_every_step_and_epoch() -> None:
    recorder = Recorder()
    fit(chain_of(), rows(), epochs=2, callbacks=[recorder])
    assert recorder.calls == ["start", "epoch 1 of 2", "epoch 2 of 2", "end"]
    assert recorder.seen == [(step // 5, step + 1) for step in range(10)]


@pytest.mark.parametrize("devices", [TWO, HYBRID])
def test_early_stopping_restores_what_it_does_in_a_fleet(devices: object) -> None:
    data, held_out = rows(), rows(20, seed=3)
    shared: dict[str, Any] = {"validation": held_out, "epochs": 30}
    whole = nn.Sequential(*stages())
    before = undivided(
        whole, data, recipe={"lr": 0.1}, callbacks=[mf.EarlyStopping(patience=2, restore_best=True)], **shared
    )
    chain = chain_of(None, devices, lr=0.1)
    after = fit(chain, data, callbacks=[mf.EarlyStopping(patience=2, restore_best=True)], **shared)
    assert 2 < len(after["chain"]["loss"]) < 30
    assert after.stopped["chain"] == before.stopped["0"]
    assert after.kept["chain"] == before.kept["0"]
    assert_same_history(after, before, 1e-9)
    assert_same_weights(weights(chain), weights(whole), tolerance=1e-9)


@pytest.mark.parametrize("strategy", ["threads", "processes"])
def test_ctrl_c_keeps_what_was_learnt(strategy: str) -> None:
    chain = chain_of(None, TWO)
    history = fit(chain, rows(), epochs=3, callbacks=[Press(7)], strategy=strategy)
    assert len(history["chain"]["loss"]) == 1
    wanted = chain_of(None, TWO)
    x, y = rows()
    fit(wanted, (x, y), epochs=3, callbacks=[StopAfter(7)])
    assert_same_weights(weights(chain), weights(wanted))


class StopAfter(mf.Callback):
    """Keeps the weights after a step, and writes them back at the end."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step:
            self.snapshot = run.snapshot("chain")

    def on_fit_end(self, run: Any) -> None:
        run.restore("chain", self.snapshot)


def test_a_callback_may_read_the_models_at_any_time() -> None:
    found: list[dict[str, torch.Tensor]] = []

    class Read(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            found.append(weights(run.sync("chain")))

    chain = chain_of(None, TWO)
    fit(chain, rows(), epochs=2, callbacks=[Read()])
    first = chain_of(None, TWO)
    fit(first, rows(), epochs=1)
    assert_same_weights(found[0], weights(first))
    assert_same_weights(found[1], weights(chain))


def test_predicting_within_a_fit_leaves_it_as_it_is() -> None:
    data = rows()

    class Predict(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            run.sync("chain").predict(data[0])

    chain, other = chain_of(None, TWO), chain_of(None, TWO)
    fit(chain, data, callbacks=[Predict()])
    fit(other, data)
    assert_same_weights(weights(chain), weights(other))


def test_fitting_twice_is_one_long_fit() -> None:
    long, short = chain_of(stages(dropout=0.3)), chain_of(stages(dropout=0.3))
    whole = nn.Sequential(*stages(dropout=0.3))
    fleet = mf.Fleet([whole], seed=5)
    fleet.compile(**RECIPE)
    fit(long, rows(), epochs=4)
    for _ in range(2):
        fit(short, rows(), epochs=2)
        fleet.fit(rows(), progress=False, epochs=2, batch_size=8)
    assert_same_weights(weights(short), weights(long))
    assert_same_weights(weights(short), weights(whole))


def test_compile_again_starts_the_optimizer_over() -> None:
    chain = chain_of()
    fit(chain, rows())
    other = chain_of([copy.deepcopy(chain[name]) for name in chain.names])
    chain.compile(**RECIPE)
    fit(chain, rows(), shuffle=False)
    fit(other, rows(), shuffle=False)
    assert_same_weights(weights(chain), weights(other))


# --- plans -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", ["1f1b", "zero-bubble"])
def test_plans_before_and_after_a_run(tmp_path: Path, pipeline: Any) -> None:
    chain = chain_of(None, HYBRID)
    assert chain.last_plan is None
    for plan in (chain.plan(), chain.plan(rows(), batch_size=8, pipeline=pipeline)):
        check_plan(plan, tmp_path)
        assert plan.measured is None
    fit(chain, rows(), pipeline=pipeline)
    assert chain.last_plan is not None
    assert chain.last_plan.measured is not None
    check_plan(chain.last_plan, tmp_path)
    kinds = {event.operation.kind for event in chain.last_plan.measured.events}
    assert {"forward", "send", "receive", "sum", "apply"} <= kinds


def check_plan(plan: Any, folder: Path) -> None:
    text = str(plan)
    assert all(word in text for word in ("3 nodes on 6 devices", "cpu:5", "threads", "0→1"))
    assert json.loads(json.dumps(plan.to_dict()))["devices"] == [f"cpu:{number}" for number in range(6)]
    plan.plot()
    plt.close("all")
    plan.chrome_trace(folder / "trace.json")
    assert json.loads((folder / "trace.json").read_text(encoding="utf-8"))


def test_the_plan_says_what_batch_norm_sees() -> None:
    first, second, third = stages()
    models = [first, nn.BatchNorm1d(7).double(), second, third]
    plan = chain_of(models, TWO).plan(rows(), batch_size=8)
    (note,) = plan.notes
    assert "'1'" in note
    assert "BatchNorm" in note
    (few,) = chain_of(models, TWO).plan(rows(), batch_size=8, micro_batches=1).notes
    assert "BatchNorm" not in few
    models[1].eval()
    frozen = nn.Sequential(nn.Identity(), models[1])
    assert chain_of([first, frozen, second, third], TWO).plan(rows(), batch_size=8).notes == ()


def test_the_plan_says_what_an_embedding_that_counts_its_rows_sees() -> None:
    models = [nn.Embedding(5, 6, scale_grad_by_freq=True, dtype=torch.float64), nn.Linear(6, 3).double()]
    data = torch.arange(40) % 5, rows()[1]
    (note,) = chain_of(models, TWO).plan(data, batch_size=8).notes
    assert "'0'" in note
    assert "set micro_batches=1" in note
    assert note not in chain_of(models, TWO).plan(data, batch_size=8, micro_batches=1).notes


def test_a_plan_changes_nothing() -> None:
    chain = chain_of(stages(dropout=0.5))
    before = weights(chain), torch.get_rng_state()
    chain.plan(rows(), batch_size=8)
    assert_same_weights(weights(chain), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(parameter.grad is None for name in chain.names for parameter in chain[name].parameters())


# --- traces ----------------------------------------------------------------------------------------------


def marks(model: nn.Module) -> list[object]:
    """All that a model has beside its numbers."""
    found: list[object] = []
    for name, module in model.named_modules():
        kept = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        tables = {
            key: len(value) for key, value in vars(module).items() if key.endswith("hooks") and value is not None
        }
        found.append((name, type(module), sorted(kept.items(), key=str), tables))
    found += [(n, id(p), p.requires_grad, p.grad, p.is_leaf) for n, p in model.named_parameters()]
    return found + [(name, id(buffer)) for name, buffer in model.named_buffers()]


@pytest.mark.parametrize("devices", [TWO, HYBRID])
@pytest.mark.parametrize("pipeline", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_of_ours_stays_in_models_data_and_generators(devices: object, pipeline: str, breaks: bool) -> None:
    models = [*stages(dropout=0.3)]
    fragile = Fragile()
    models[1] = nn.Sequential(models[1], fragile)
    next(models[0].parameters()).requires_grad_(False)
    models[2].eval()
    before = [marks(model) for model in models]
    x, y = rows()
    copies, threads = (x.clone(), y.clone()), torch.get_num_threads()
    torch.set_num_threads(3)
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    state = torch.get_rng_state(), numpy_state(), random.getstate()
    chain = chain_of(models, devices)
    options = {"pipeline": pipeline, "micro_batches": 4}
    if breaks:
        Fragile.breaks_at = 30
        try:
            with pytest.raises(InputError, match=r"'1'.*ZeroDivisionError: the user's own"):
                fit(chain, (x, y), **options)
        finally:
            Fragile.breaks_at = 10**9
    else:
        fit(chain, (x, y), validation=(x, y), **options)
        chain.predict(x)
        chain.evaluate((x, y))
    fragile.calls = 0
    assert [marks(model) for model in models] == before
    assert torch.equal(x, copies[0])
    assert torch.equal(y, copies[1])
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), state[0])
    assert numpy_state() == state[1]
    assert random.getstate() == state[2]
    assert torch.get_num_threads() == 3
    torch.set_num_threads(threads)


def numpy_state() -> list[int]:
    state: Any = np.random.get_state()
    return state[1].tolist()


class Fragile(nn.Module):
    """Raises at a call, once."""

    breaks_at = 10**9

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == Fragile.breaks_at:
            raise ZeroDivisionError("the user's own")
        return x


def test_data_of_numpy_and_loaders() -> None:
    x, y = rows(dtype=torch.float32)
    models = stages(dtype=torch.float32)
    arrays = chain_of(copy.deepcopy(models), TWO)
    fit(arrays, (x.numpy(), y.numpy()), shuffle=False)
    loader = chain_of(copy.deepcopy(models), TWO)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    fit(loader, batches, batch_size=None)
    assert_same_weights(weights(arrays), weights(loader))
    uneven = [(x[:3], y[:3]), (x[3:12], y[3:12]), (x[12:13], y[12:13])]
    fit(loader, uneven, batch_size=None)
    assert loader.predict(x).shape == (40, 3)
    assert loader.evaluate(batches).keys() == {"loss"}


class Breaks:
    """Batches of eight rows, the last of which can't be read."""

    def __init__(self, data: Any, whole: int) -> None:
        self.data, self.whole = data, whole

    def __iter__(self) -> Any:
        for start in range(0, 8 * self.whole, 8):
            yield tuple(part[start : start + 8] for part in self.data)
        raise OSError("the disk is gone")


@pytest.mark.parametrize("strategy", ["threads", "processes"])
def test_steps_before_batches_that_can_not_be_read_are_kept(strategy: Any) -> None:
    x, y = rows()
    chain, whole = chain_of(None, TWO), chain_of(None, TWO)
    with pytest.raises(OSError, match="the disk is gone"):
        fit(chain, Breaks((x, y), 3), batch_size=None, strategy=strategy)
    fit(whole, (x[:24], y[:24]), epochs=1, shuffle=False)
    assert_same_weights(weights(chain), weights(whole))
    for one in (chain, whole):  # with the state of its optimizers
        fit(one, (x[24:], y[24:]), epochs=1, shuffle=False)
    assert_same_weights(weights(chain), weights(whole))
    with pytest.raises(OSError, match="the disk is gone"):
        fit(chain, (x, y), validation=Breaks((x, y), 2), epochs=1, shuffle=False, strategy=strategy)
    fit(whole, (x, y), epochs=1, shuffle=False)
    assert_same_weights(weights(chain), weights(whole))
    with pytest.raises(OSError, match="the disk is gone"):
        chain.predict(Breaks((x, y), 3), strategy=strategy)
