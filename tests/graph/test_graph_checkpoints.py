"""A fit of a graph that was interrupted goes on from its checkpoint, on whatever devices there are."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.graph.breaking import Break, Press
from tests.graph.comparing import (
    HYBRID,
    TWO,
    assert_same_history,
    assert_same_weights,
    chain_of,
    fit,
    rows,
    stages,
    weights,
)
from torch import nn

import modelfleet as mf
from modelfleet.errors import StoreError


@pytest.mark.parametrize("broken", [4, 7, 10, 14])
@pytest.mark.parametrize("every", [{"every": 1}, {"every_steps": 3}], ids=["epochs", "steps"])
def test_a_run_that_broke_goes_on_elsewhere(tmp_path: Path, broken: int, every: dict[str, Any]) -> None:
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
        fit(chain_of(others), rows(), epochs=1, callbacks=[mf.Checkpoint(tmp_path / "run")])
    with pytest.raises(StoreError, match="seed"):
        fit(chain_of(seed=6), rows(), epochs=1, callbacks=[mf.Checkpoint(tmp_path / "run")])
    with pytest.raises(StoreError, match="its epochs was 1, here it is 2"):
        fit(chain_of(), rows(), epochs=2, callbacks=[mf.Checkpoint(tmp_path / "run")])
    fit(chain_of(), rows(), epochs=1, callbacks=[mf.Checkpoint(tmp_path / "run")])
