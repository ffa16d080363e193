"""A mix of models, trained by one strategy, by strategy="auto", or one by one with their frameworks' own loops."""

import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import modelfleet as mf
from benchmarks.checking import check
from benchmarks.entrants import ALONE
from benchmarks.peers import Round, compete
from modelfleet.types import Strategy

BATCH, STEPS = 32, 40
FIRST_EPOCHS = 25  # of a first run: long enough for the planner to measure

Data = tuple[np.ndarray, np.ndarray]


class Recurrent(nn.Module):
    """An LSTM over eight steps of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 16, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The classes by the last state."""
        return self.head(self.lstm(x.view(-1, 8, 4))[0][:, -1])


def dense(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 16, 16)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 64, 10),
    )


def models(mix: str) -> dict[str, Any]:
    torch.manual_seed(0)
    if mix == "mlps":
        return {f"m{number}": dense(64 if number < 8 else 48) for number in range(12)}
    if mix == "convs":
        return {f"c{number}": convolutional() for number in range(4)}
    if mix == "unlike":
        return {"dense": dense(64), "convolutional": convolutional(), "recurrent": Recurrent()}
    from benchmarks.keras_nets import mlp, three

    if mix == "keras":
        return {name: model for name, (model, _, _) in three().items()}
    return {**{f"m{number}": dense(64) for number in range(8)}, "k0": mlp(1e-3), "k1": mlp(3e-3)}


def data_of(model: Any, name: str) -> Data:
    if name in ("convolutional", "regression", "dense") and not isinstance(model, nn.Module):
        from benchmarks.keras_nets import three

        x, y = three()[name][1]
        return x[: BATCH * STEPS], y[: BATCH * STEPS]
    random = np.random.default_rng(0)
    width = 256 if isinstance(model, nn.Module) and any(isinstance(m, nn.Conv2d) for m in model.modules()) else 32
    x = random.standard_normal((BATCH * STEPS, width), dtype=np.float32)
    return x, random.integers(0, 10, BATCH * STEPS)


def fresh_models(mix: str) -> dict[str, Any]:
    """The members of a mix, always with the same weights."""
    torch.manual_seed(0)
    if mix in ("keras", "mixed"):
        import keras

        keras.utils.set_random_seed(0)
    return models(mix)


def prepare(mix: str, strategy: Strategy, when: Literal["first", "again"], quick: bool) -> Callable[[], Round]:
    members = fresh_models(mix)
    data = {name: data_of(model, name) for name, model in members.items()}
    epochs = 1 if quick else FIRST_EPOCHS if when == "first" else 4
    if strategy == ALONE:
        train = one_by_one(members, data, epochs)
        if when == "again":
            train()
        return train
    own = [name for name, model in members.items() if isinstance(model, nn.Module)]
    if when == "first":
        return lambda: first_run(mix, members, own, data, strategy, epochs)
    fleet = build(members, own)

    def train_round() -> Round:
        history = fleet.fit(mf.each(data), epochs=epochs, batch_size=BATCH, strategy=strategy, progress=False)
        losses = [history[name]["loss"][-1] for name in fleet.names]
        return Round(STEPS * epochs * len(members), sum(losses) / len(losses))

    for _ in range(1 if quick else 3):
        train_round()
    return train_round


def build(members: dict[str, Any], own: list[str]) -> mf.Fleet:
    fleet = mf.Fleet(members)
    if own:
        fleet.compile("adam", "cross_entropy", lr=1e-3, members=own)
    return fleet


def first_run(
    mix: str, members: dict[str, Any], own: list[str], data: dict[str, Data], strategy: Strategy, epochs: int
) -> Round:
    """The fleet and its first `fit`. The first torch member and the first Keras model must come out as alone."""
    started = time.perf_counter()
    fleet = build(members, own)
    history = fleet.fit(mf.each(data), epochs=epochs, batch_size=BATCH, strategy=strategy, progress=False)
    seconds = time.perf_counter() - started
    losses = [history[name]["loss"][-1] for name in fleet.names]
    before = fresh_models(mix)
    others = [name for name in members if name not in own]
    initial = {name: before[name] for name in (*own[:1], *others[:1])}
    recipes = {name: {"optimizer": "adam", "loss": "cross_entropy", "lr": 1e-3} for name in own}
    worst = check(fleet, initial, data, recipes=recipes, epochs=dict.fromkeys(initial, epochs), batch=BATCH)
    notes = {"largest difference to alone": worst}
    return Round(STEPS * epochs * len(members), sum(losses) / len(losses), seconds, notes)


def one_by_one(members: dict[str, Any], data: dict[str, Data], epochs: int) -> Callable[[], Round]:
    optimizers = {
        name: torch.optim.Adam(model.parameters(), lr=1e-3)
        for name, model in members.items()
        if isinstance(model, nn.Module)
    }
    tensors = {name: tuple(map(torch.from_numpy, data[name])) for name in optimizers}

    def train(name: str, epochs: int) -> float:
        model = members[name]
        if name not in optimizers:
            history = model.fit(*data[name], epochs=epochs, batch_size=BATCH, verbose=0)
            return history.history["loss"][-1]
        x, y = tensors[name]
        total = torch.zeros(())
        for _ in range(epochs):
            total.zero_()
            for rows in torch.randperm(len(x)).split(BATCH):
                optimizers[name].zero_grad()
                loss = F.cross_entropy(model(x[rows]), y[rows])
                loss.backward()
                optimizers[name].step()
                total += loss.detach()
        return total.item() / STEPS

    def train_round() -> Round:
        losses = [train(name, epochs) for name in members]
        return Round(STEPS * epochs * len(members), sum(losses) / len(losses))

    return train_round


if __name__ == "__main__":
    compete(prepare)
