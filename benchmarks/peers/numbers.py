"""64 MLPs that differ in a number (dropout, label smoothing, class weights), share it, or do without it."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import modelfleet as mf
from benchmarks.checking import EXACT, check
from benchmarks.entrants import FLEET
from benchmarks.peers import Round, compete
from benchmarks.promises import SAME
from benchmarks.rows import MLP_64, Row, datasets

VALUES = (0.1, 0.2, 0.3, 0.5)


def net(widths: tuple[int, ...], exact: bool, dropout: float | None) -> nn.Module:
    """The MLP of the row, with or without dropout, in float64 if it is to be exact."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        layers += [] if dropout is None else [nn.Dropout(dropout)]
    made = nn.Sequential(*layers[: -1 if dropout is None else -2])
    return made.double() if exact else made


def loss_of(what: str, value: float | None, classes: int, exact: bool) -> Callable[..., torch.Tensor]:
    """The loss of a member with this number."""
    if value is None or what == "dropout":
        return F.cross_entropy
    if what == "smoothing":
        return partial(F.cross_entropy, label_smoothing=value)
    return nn.CrossEntropyLoss(weight=torch.linspace(value, 1.5, classes, dtype=torch.float64 if exact else None))


def build(row: Row, what: str, values: list[float | None], *, exact: bool = False) -> mf.Fleet:
    """A fleet whose members have these numbers."""
    dropouts: Any = mf.each(values) if what == "dropout" else None
    fleet = mf.Fleet.build(partial(net, row.widths, exact), len(values), seed=0, dropout=dropouts)
    losses = {value: loss_of(what, value, row.classes, exact) for value in values}
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
        """Compare some members of a fleet in float64. In float32, Adam follows the rounding of tiny gradients."""
        exact, before = (build(row, what, values, exact=True) for _ in range(2))
        rows = torch.from_numpy(data[0]).double(), torch.from_numpy(data[1])
        exact.fit(rows, epochs=2, batch_size=row.batch, progress=False)
        names, rates = before.names[:: max(1, row.members // 5)], row.rates().tolist()
        recipes = {
            name: {"optimizer": "adam", "loss": loss_of(what, value, row.classes, True), "lr": rate}
            for name, value, rate in zip(before.names, values, rates, strict=True)
        }
        initial, epochs = {name: before[name] for name in names}, dict.fromkeys(names, 2)
        own = dict.fromkeys(names, rows)
        return check(exact, initial, own, recipes=recipes, epochs=epochs, batch=row.batch, tolerance=EXACT)

    train(2)
    notes = {"largest difference to alone": differences()}
    train(row.epochs)
    return lambda: Round(row.members * row.steps * row.epochs, train(row.epochs), notes=notes)


if __name__ == "__main__":
    compete(prepare)
