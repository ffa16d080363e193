"""In a steady step, nothing is copied between the host and the device, and the host waits for nothing."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import mlp
from tests.standin.device import Told, listening, where
from tests.standin.models import DATA, X, Y, differing, dropping, fleet_on
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import modelfleet as mf
from modelfleet.frameworks.torch.optimizers.rules import ALGORITHMS
from modelfleet.lanes.lane import Lane
from modelfleet.types import Data

TRAFFIC = ("h2d", "d2h", "p2p", "item", "sync", "pinned")
LAST = 18  # steps of an epoch, before its end


def traffic_of_steps(
    fleet: mf.Fleet, data: Any, monkeypatch: pytest.MonkeyPatch, *, epoch: int = 0, **options: Any
) -> list[str]:
    """What steps five and later of an epoch of a fit copy, or wait for: with the line of the library."""
    found: Counter[str] = Counter()
    steps, epochs = 0, 0
    train, values = Lane.train, Lane.epoch_values

    def counted(self: Lane, *args: Any) -> None:
        nonlocal steps
        steps += 1
        train(self, *args)

    def ended(self: Lane) -> Any:
        nonlocal steps, epochs
        steps, epochs = 0, epochs + 1
        return values(self)

    def tell(told: Told) -> None:
        if told.kind in TRAFFIC and 5 <= steps < LAST and epochs == epoch:
            found[f"{told.kind} {told.text} at {where()}"] += 1

    monkeypatch.setattr(Lane, "train", counted)
    monkeypatch.setattr(Lane, "epoch_values", ended)
    whole: dict[str, Any] = {"batch_size": 2, "strategy": "fused", "epochs": epoch + 1, **options}
    with listening(tell):
        fleet.fit(data, progress=False, **whole)
    assert epochs == epoch + 1
    return sorted(f"{number} × {text}" for text, number in found.items())


@pytest.mark.parametrize("build", list(DATA), ids=lambda build: build.__name__.lower())
def test_arrays(build: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    data = tuple(np.concatenate([part] * 2)[:40] for part in DATA[build])
    assert traffic_of_steps(fleet_on("standin:0", build), data, monkeypatch) == []


def test_own_data(monkeypatch: pytest.MonkeyPatch) -> None:
    own = mf.each({str(number): (X + number, Y) for number in range(3)})
    assert traffic_of_steps(fleet_on("standin:0"), own, monkeypatch) == []


def test_the_order_of_rows_and_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert traffic_of_steps(fleet_on("standin:0"), (X, Y), monkeypatch, shuffle=False) == []
    assert traffic_of_steps(fleet_on("standin:0"), (X, Y), monkeypatch, epoch=1) == []


def test_sample_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.linspace(0.5, 1.5, len(X)).astype(np.float32)
    assert traffic_of_steps(fleet_on("standin:0"), (X, Y, weights), monkeypatch) == []


@pytest.mark.parametrize("optimizer", sorted(ALGORITHMS))
def test_optimizers(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_on("standin:0", optimizer=optimizer, clip_norm=1.0)
    assert traffic_of_steps(fleet, (X, Y), monkeypatch) == []


def test_metrics_of_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    own = lambda output, target: (output.argmax(1) == target).float().mean()  # noqa: E731
    fleet = fleet_on("standin:0", metrics=["accuracy", "top_2", {"mine": own}])
    assert traffic_of_steps(fleet, (X, Y), monkeypatch, record_steps=True) == []


def test_metrics_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = np.eye(3, dtype=np.float32)[Y]
    fleet = fleet_on("standin:0", loss="mse", metrics=["mse", "mae", "r2"])
    assert traffic_of_steps(fleet, (X, targets), monkeypatch) == []


def test_dropout_at_own_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_on("standin:0", dropping, rate=mf.each([0.1, 0.2, 0.3]))
    assert traffic_of_steps(fleet, (X, Y), monkeypatch) == []


def test_other_optimizers_and_numbers_in_one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_on("standin:0", optimizer=mf.each(["adam", "sgd", "adam"]), lr=mf.each([0.1, 0.2, 0.3]))
    assert traffic_of_steps(fleet, (X, Y), monkeypatch) == []


def test_a_narrowed_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_on("standin:0", members=4)
    fleet.fit((X, Y), epochs=mf.each([1, 1, 1, 3]), batch_size=2, progress=False, strategy="fused")
    torch.accelerator.synchronize()
    assert traffic_of_steps(fleet, (X, Y), monkeypatch) == []


# --- schedules -------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Any] = {
    **{name: name for name in ("constant", "linear", "cosine", "step", "onecycle")},
    "warmup": mf.Schedule("cosine", warmup=7, final=0.1),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=40),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "StepLR": partial(lr_scheduler.StepLR, step_size=1),
    "ReduceLROnPlateau": partial(lr_scheduler.ReduceLROnPlateau, patience=0),
}


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_schedules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, recipe = SCHEDULES[name], {"optimizer": "sgd", "momentum": 0.9}
    there, here = (fleet_on(device, schedule=schedule, **recipe) for device in ("standin:0", "cpu"))
    assert traffic_of_steps(there, (X, Y), monkeypatch, epoch=1) == []
    here.fit((X, Y), batch_size=2, epochs=2, progress=False)
    assert differing(there, here) == []


def test_schedules_of_members_with_other_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (40, 31, 38)
    own = mf.each({str(number): (X[:count], Y[:count]) for number, count in enumerate(rows)})
    schedule = mf.each(["cosine", "linear", SCHEDULES["OneCycleLR"]])
    recipe: dict[str, Any] = {"schedule": schedule, "optimizer": "adam"}
    there, here = (fleet_on(device, **recipe) for device in ("standin:0", "cpu"))
    traffic_of_steps(there, own, monkeypatch, epoch=1)
    here.fit(own, batch_size=2, epochs=2, progress=False)
    assert differing(there, here) == []


# --- members with other numbers of rows ------------------------------------------------------------------------


def test_other_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    own = mf.each({str(number): (X[:count], Y[:count]) for number, count in enumerate((40, 31, 36))})
    fleet = fleet_on("standin:0")
    assert traffic_of_steps(fleet, own, monkeypatch, epoch=1) == []


def test_other_sizes_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    data = tuple(np.concatenate([part] * 3) for part in (X, Y))
    fleet = fleet_on("standin:0")
    assert traffic_of_steps(fleet, data, monkeypatch, batch_size=mf.each([2, 4, 6])) == []


# --- a lane of one -----------------------------------------------------------------------------------------------


def test_a_member_that_can_not_be_fused_waits_for_its_loss_and_its_gradients_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that is not finite is not taken, and only the host can leave out a step of `torch.optim`."""
    fleet = fleet_on("standin:0", members=1, optimizer="adam", schedule="cosine", metrics=["accuracy"])
    # Its steps come eight at a time where the numbers stay the same, and one at a time here.
    found = traffic_of_steps(fleet, (X, Y), monkeypatch, strategy="interleaved", epoch=1)
    assert [line.partition(":")[0] for line in found] == [
        f"{LAST - 5} × item  at frameworks/torch/plain/{file}.py" for file in ("engine", "optimizer")
    ]


# --- loaders ---------------------------------------------------------------------------------------------------


class Batches:
    """Batches that can be read again and again."""

    def __init__(self, *parts: np.ndarray) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[tuple[np.ndarray, ...]]:
        for start in range(0, 40, 2):
            yield tuple(part[start : start + 2] for part in self.parts)


def into_the_same_memory() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches, each of which is written over the last."""
    x, y = torch.empty(2, X.shape[1]), torch.empty(2, dtype=torch.int64)
    for start in range(0, 40, 2):
        x.copy_(torch.from_numpy(X[start : start + 2]))
        y.copy_(torch.from_numpy(Y[start : start + 2]))
        yield x, y


def data_loader(**options: Any) -> DataLoader[Any]:
    rows = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return DataLoader(rows, batch_size=2, **options)


WEIGHTS = np.linspace(0.5, 1.5, len(X)).astype(np.float32)
LOADERS: dict[str, Callable[[], Data]] = {
    "DataLoader": lambda: data_loader(),
    "pinned": lambda: data_loader(pin_memory=True),
    "iterable": lambda: Batches(X, Y),
    "weighted": lambda: Batches(X, Y, WEIGHTS),
    "list": lambda: list(Batches(X, Y)),
    "function": lambda: into_the_same_memory,
    "own": lambda: mf.each({str(number): Batches(X + number, Y) for number in range(3)}),
    "own, of other lengths": lambda: mf.each({str(n): list(Batches(X, Y))[n:] for n in range(3)}),
}


@pytest.mark.parametrize("name", list(LOADERS))
def test_loaders(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy for each batch, for which nothing waits, from memory that was pinned before."""
    there, here = fleet_on("standin:0", metrics=["accuracy"]), fleet_on("cpu", metrics=["accuracy"])
    found = traffic_of_steps(there, LOADERS[name](), monkeypatch, batch_size=None)
    own = "pinned" if name == "pinned" else ""  # torch's DataLoader pins its own batches
    copies = [line for line in found if "async at frameworks/torch/uploading.py" in line]
    others = [line for line in found if line not in copies and not (own and own in line)]
    assert others == []
    assert sum(int(line.split()[0]) for line in copies) <= LAST
    assert copies
    here.fit(LOADERS[name](), progress=False)
    assert differing(there, here) == []


# --- around the steps ------------------------------------------------------------------------------------------


class Watch(mf.Callback):
    """Is told of every step, and looks at nothing on the device."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, run: Any) -> None:
        self.steps += 1


def test_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    found = traffic_of_steps(
        fleet_on("standin:0"),
        (X, Y),
        monkeypatch,
        validation=(X, Y),
        callbacks=[watch, mf.EarlyStopping(patience=3)],
        epoch=1,
    )
    assert watch.steps == 40
    assert found == []


def copies_of(run: Callable[[], object]) -> list[str]:
    """The copies to the host, and what the host waits for."""
    found: list[str] = []

    def tell(told: Told) -> None:
        if told.kind in ("d2h", "item", "sync"):
            found.append(f"{told.kind} {told.text} at {where()}")

    with listening(tell):
        run()
    return found


def test_the_end_of_an_epoch_is_read_in_a_few_copies() -> None:
    """However many members, metrics and steps there are."""
    lengths = []
    for members, metrics in ((2, []), (6, ["accuracy", "top_2"])):
        fleet = fleet_on("standin:0", members=members, metrics=metrics)
        options: dict[str, Any] = {"batch_size": 2, "progress": False, "strategy": "fused", "validation": (X, Y)}
        fleet.fit((X, Y), **options)
        run = partial(fleet.fit, (X, Y), record_steps=True, **options)
        short = len(copies_of(partial(run, epochs=1)))
        lengths.append(len(copies_of(partial(run, epochs=2))) - short)
    assert lengths[0] == lengths[1] <= 4  # the sums, the losses of the steps, the sums of validation, failures


def test_weights_and_predictions_are_read_for_all_members_at_once() -> None:
    found = []
    for members in (2, 6):
        fleet = fleet_on("standin:0", members=members)
        fleet.fit((X, Y), batch_size=8, progress=False, strategy="fused")
        by_fit = copies_of(partial(fleet.fit, (X, Y), batch_size=8, progress=False, strategy="fused"))
        by_predicting = copies_of(partial(fleet.predict, X, batch_size=20))
        found.append([len([line for line in own if line.startswith("d2h")]) for own in (by_fit, by_predicting)])
    assert found[0] == found[1]
    assert found[0][1] == 2, "one for each batch"


def uploads(run: Callable[[], object], size: int) -> list[str]:
    """The copies to the device of so many rows and more."""
    found: list[str] = []

    def tell(told: Told) -> None:
        if told.kind == "h2d" and told.text.startswith(f"[{size}"):
            found.append(f"{told.text} at {where()}")

    with listening(tell):
        run()
    return found


UNLIKE = mf.each([4, 6, 8, 10])  # hidden widths: a lane each


@pytest.mark.parametrize("strategy", ["interleaved", "threads", "auto"])
@pytest.mark.parametrize("devices", ["standin:0", "standin:0,standin:1"])
def test_a_data_set_is_uploaded_once_to_each_device(strategy: Any, devices: str) -> None:
    x, y = np.concatenate([X] * 3)[:101], np.concatenate([Y] * 3)[:101]
    fleet = fleet_on(devices, mlp, members=4, width=UNLIKE)
    each = 2 * len(devices.split(","))  # x and y
    fit = partial(fleet.fit, (x, y), validation=(x, y), batch_size=32, progress=False, strategy=strategy)
    assert len(uploads(fit, 101)) == each
    assert len(uploads(lambda: fleet.evaluate((x, y)), 101)) == each


def test_groups_that_can_not_share_a_lane_share_their_data() -> None:
    x, y = np.concatenate([X] * 3)[:101].astype(np.float64), np.concatenate([Y] * 3)[:101]
    fleet = fleet_on("standin:0", mlp, members=4, loss=mf.each(["cross_entropy", "mse", "cross_entropy", "mse"]))
    one_hot = np.eye(3)[y]
    fit = partial(fleet.fit, (x, one_hot), batch_size=32, progress=False)
    assert len(uploads(fit, 101)) == 2


def test_labels_are_checked_before_they_are_sent() -> None:
    wrong = list(Batches(X, Y))
    wrong[12] = (wrong[12][0], np.array([0, 99]))
    fleet = fleet_on("standin:0")
    with pytest.raises(mf.InputError, match="99"):
        fleet.fit(wrong, progress=False)
