"""What a fit of a graph does beside the numbers: callbacks, checkpoints, plans, and leaving no traces."""

import copy
import json
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from tests.graph.comparing import (
    FIT,
    HYBRID,
    RECIPE,
    THREE,
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
from modelfleet.errors import InputError, StoreError

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


class Press(mf.Callback):
    """Presses Ctrl-C after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step:
            signal.raise_signal(signal.SIGINT)


class Break(mf.Callback):
    """Raises after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step:
            raise ZeroDivisionError("a bug of the user's")


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
    assert_same_weights(weights(chain), weights(whole), rtol=1e-9, atol=1e-9)


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
        fleet.fit(rows(), progress=False, **{**FIT, "epochs": 2})
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


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [4, 7, 10, 14])
@pytest.mark.parametrize("every", [{"every": 1}, {"every_steps": 3}], ids=["epochs", "steps"])
def test_a_run_that_broke_goes_on_elsewhere(tmp_path: Path, broken: int, every: dict[str, int]) -> None:
    data = rows()
    shared: dict[str, Any] = {"validation": rows(12, seed=1)}
    unbroken = chain_of(stages(dropout=0.3), metrics=["accuracy"], schedule="cosine")
    wanted = fit(unbroken, data, **shared)
    first = chain_of(stages(dropout=0.3), HYBRID, metrics=["accuracy"], schedule="cosine")
    with pytest.raises(ZeroDivisionError):
        fit(first, data, callbacks=[mf.Checkpoint(tmp_path / "run", **every), Break(broken)], **shared)
    second = chain_of(stages(dropout=0.3, seed=9), TWO, metrics=["accuracy"], schedule="cosine")
    found = fit(
        second, data, pipeline="gpipe", callbacks=[mf.Checkpoint(tmp_path / "run", **every), Break(99)], **shared
    )
    if broken > 5 or "every_steps" in every:  # else nothing had been saved
        assert_same_weights(weights(second), weights(unbroken))
        assert_same_history(found, wanted, 1e-10)
    again = chain_of(stages(dropout=0.3, seed=9), TWO, metrics=["accuracy"], schedule="cosine")
    done = fit(again, data, callbacks=[mf.Checkpoint(tmp_path / "run", **every), Break(0)], **shared)
    assert_same_weights(weights(again), weights(second))
    assert_same_history(done, found, 1e-12)


def test_early_stopping_goes_on_with_its_best_weights(tmp_path: Path) -> None:
    data = rows()
    held_out = data[0], (data[1] + 1) % 3  # the loss on them soon rises

    def run(folder: Path, step: int) -> mf.Chain:
        chain = chain_of(None, TWO, lr=0.1)
        callbacks = [
            mf.EarlyStopping(patience=4, restore_best=True),
            mf.Checkpoint(folder),
            Break(step),
        ]
        history = fit(chain, data, epochs=20, validation=held_out, callbacks=callbacks)
        best.append(history.kept["chain"])
        return chain

    best: list[int] = []
    wanted = run(tmp_path / "unbroken", 999)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "broken", 5 * best[0] + 8)  # after its best epoch
    assert_same_weights(weights(run(tmp_path / "broken", 999)), weights(wanted))


@pytest.mark.parametrize("stop", [Press, Break])
def test_the_same_call_continues_in_the_same_process(tmp_path: Path, stop: type[Press] | type[Break]) -> None:
    unbroken, chain = chain_of(stages(dropout=0.3)), chain_of(stages(dropout=0.3))
    for _ in range(2):  # the second fit has a checkpoint of its own
        fit(unbroken, rows())
        for step in (3, 12, 999):
            with suppress(ZeroDivisionError):
                fit(chain, rows(), callbacks=[mf.Checkpoint(tmp_path / "run", every_steps=2), stop(step)])
    assert_same_weights(weights(chain), weights(unbroken))


def test_a_fit_after_one_that_stopped_early_has_the_same_folder(tmp_path: Path) -> None:
    data = rows()
    held_out = data[0], (data[1] + 1) % 3
    chain = chain_of(lr=0.1)
    for _ in range(2):
        callbacks = [mf.EarlyStopping(patience=1), mf.Checkpoint(tmp_path / "run")]
        history = fit(chain, data, epochs=9, validation=held_out, callbacks=callbacks)
        assert 0 < len(history["chain"]["loss"]) < 9


def test_a_checkpoint_of_another_graph_is_refused_and_kept(tmp_path: Path) -> None:
    callback = mf.Checkpoint(tmp_path / "run")
    fit(chain_of(), rows(), epochs=1, callbacks=[callback])
    torch.manual_seed(0)
    others = [nn.Linear(4, 5).double(), nn.Linear(5, 6).double(), nn.Linear(6, 3).double()]
    with pytest.raises(StoreError, match="does not fit"):
        fit(chain_of(others), rows(), callbacks=[mf.Checkpoint(tmp_path / "run")])
    with pytest.raises(StoreError, match="seed"):
        fit(chain_of(seed=6), rows(), callbacks=[mf.Checkpoint(tmp_path / "run")])
    fit(chain_of(), rows(), epochs=2, callbacks=[mf.Checkpoint(tmp_path / "run")])


# --- plans -----------------------------------------------------------------------------------------------------------


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
    assert chain_of(models, TWO).plan(rows(), batch_size=8, micro_batches=1).notes == ()
    models[1].eval()
    frozen = nn.Sequential(nn.Identity(), models[1])
    assert chain_of([first, frozen, second, third], TWO).plan(rows(), batch_size=8).notes == ()


def test_a_plan_changes_nothing() -> None:
    chain = chain_of(stages(dropout=0.5))
    before = weights(chain), torch.get_rng_state()
    chain.plan(rows(), batch_size=8)
    assert_same_weights(weights(chain), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(parameter.grad is None for name in chain.names for parameter in chain[name].parameters())


# --- traces ----------------------------------------------------------------------------------------------------------


def marks(model: nn.Module) -> list[object]:
    """All that a model has beside its numbers."""
    found: list[object] = []
    for name, module in model.named_modules():
        kept = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        tables = {key: len(value) for key, value in vars(module).items() if key.endswith("hooks") and value is not None}
        found.append((name, type(module), sorted(kept.items(), key=str), tables))
    found += [(n, id(p), p.requires_grad, p.grad, p.is_leaf) for n, p in model.named_parameters()]
    return found + [(name, id(buffer)) for name, buffer in model.named_buffers()]


@pytest.mark.parametrize("devices", [TWO, HYBRID])
@pytest.mark.parametrize("pipeline", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_of_ours_stays_in_models_data_and_generators(devices: object, pipeline: str, breaks: bool) -> None:
    models = [*stages(dropout=0.3)]
    models[1] = nn.Sequential(models[1], Fragile())
    next(models[0].parameters()).requires_grad_(False)
    models[2].eval()
    before = [marks(model) for model in models]
    x, y = rows()
    copies, threads = (x.clone(), y.clone()), torch.get_num_threads()
    torch.set_num_threads(3)
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
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
    models[1][1].calls = 0
    assert [marks(model) for model in models] == before
    assert torch.equal(x, copies[0])
    assert torch.equal(y, copies[1])
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.random.get_state()[1].tolist() == state[1]  # noqa: NPY002
    assert random.getstate() == state[2]
    assert torch.get_num_threads() == 3
    torch.set_num_threads(threads)


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
