"""64 MLPs that differ in a number (dropout, label smoothing, class weights), share it, or do without it."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import modelfleet as mf
from benchmarks.checking import check
from benchmarks.entrants import FLEET
from benchmarks.peers import Round, compete
from benchmarks.promises import SAME
from benchmarks.rows import MLP_64, Row, datasets

VALUES = (0.1, 0.2, 0.3, 0.5)


def net(widths: tuple[int, ...], dropout: float | None) -> nn.Module:
    """The MLP of the row, with or without dropout."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        layers += [] if dropout is None else [nn.Dropout(dropout)]
    return nn.Sequential(*layers[: -1 if dropout is None else -2])


def loss_of(what: str, value: float | None, classes: int) -> Callable[..., torch.Tensor]:
    """The loss of a member with this number."""
    if value is None or what == "dropout":
        return F.cross_entropy
    if what == "smoothing":
        return partial(F.cross_entropy, label_smoothing=value)
    return nn.CrossEntropyLoss(weight=torch.linspace(value, 1.5, classes))


def build(row: Row, what: str, values: list[float | None]) -> mf.Fleet:
    """A fleet whose members have these numbers."""
    dropouts: Any = mf.each(values) if what == "dropout" else None
    fleet = mf.Fleet.build(partial(net, row.widths), len(values), seed=0, dropout=dropouts)
    losses = {value: loss_of(what, value, row.classes) for value in values}
    differ = what != "dropout" and len(losses) > 1
    loss: Any = mf.each([losses[value] for value in values]) if differ else losses[values[0]]
    fleet.compile("adam", loss, lr=mf.each(row.rates().tolist()))
    return fleet


def prepare(what: str, who: str, quick: bool) -> Callable[[], Round]:
    row = MLP_64.quick() if quick else MLP_64
    data = datasets(row)[0]
    own: list[float | None] = [VALUES[member % len(VALUES)] for member in range(row.members)]
    values = own if who == FLEET else [VALUES[0] if who == SAME else None] * row.members
    fleet = build(row, what, values)

    def train(epochs: int) -> float:
        history = fleet.fit(data, epochs=epochs, batch_size=row.batch, progress=False)
        losses = [history[name]["loss"][-1] for name in fleet.names]
        return sum(losses) / len(losses)

    def differences() -> float:
        before, rates = build(row, what, values), row.rates().tolist()
        names = before.names[:: max(1, row.members // 5)]
        recipes = {
            name: {"optimizer": "adam", "loss": loss_of(what, value, row.classes), "lr": rate}
            for name, value, rate in zip(before.names, values, rates, strict=True)
        }
        initial, epochs = {name: before[name] for name in names}, dict.fromkeys(names, 2)
        return check(fleet, initial, dict.fromkeys(names, data), recipes=recipes, epochs=epochs, batch=row.batch)

    train(2)
    notes = {"largest difference to alone": differences()}
    train(row.epochs)
    return lambda: Round(row.members * row.steps * row.epochs, train(row.epochs), notes=notes)


if __name__ == "__main__":
    compete(prepare)
