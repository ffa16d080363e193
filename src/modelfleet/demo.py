"""`modelfleet demo`: 64 variants of a network on one device, and a few of them one by one to compare."""

import time
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

import modelfleet as mf
from modelfleet.errors import InputError, MissingExtraError
from modelfleet.frameworks import adapter
from modelfleet.frameworks.contexts import computing
from modelfleet.history import History
from modelfleet.members import member_seed
from modelfleet.shuffles import permutations
from modelfleet.testing import largest_difference

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Above 0.005 AdamW oscillates on these digits, which amplifies rounding, alone or in a fleet.
RATES = tuple(float(rate) for rate in np.geomspace(1e-4, 5e-3, 8))
DECAYS = (0.0, 0.001, 0.01, 0.1)
SEEDS = (0, 1)
BATCH_SIZE = 32
SEED = 0
_BEST = 5  # members listed at the end

Data = tuple[np.ndarray, np.ndarray]
"""Inputs and targets."""


@dataclass(frozen=True)
class Variant:
    """Hyperparameters and seed of one member."""

    lr: float
    weight_decay: float
    seed: int

    @property
    def name(self) -> str:
        """Return the member's name."""
        return f"lr{self.lr:.2g} wd{self.weight_decay:g} s{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """Results of the demo."""

    fleet_seconds: float
    """Time of all members together, from building them to the end of the fit."""
    alone_seconds: float
    """Time of one member trained alone, averaged over the sample."""
    members: int
    difference: float
    """Largest relative difference of any weight, over the members of the sample."""
    steps: int
    """Steps that every member took."""

    @property
    def speedup(self) -> float:
        """Factor by which all members would have taken longer one by one."""
        return self.members * self.alone_seconds / self.fleet_seconds


def run(
    *,
    epochs: int = 20,
    alone: int = 4,
    picture: Path = Path("modelfleet-demo.png"),
    console: "Console | None" = None,
) -> Outcome:
    """Train the fleet, train `alone` of its members one by one, and show how the two compare."""
    variants = [Variant(*values) for values in product(RATES, DECAYS, SEEDS)]
    if epochs < 1 or not 1 <= alone <= len(variants):
        raise InputError(f"the demo needs 1 epoch or more, and 1 to {len(variants)} members alone.")
    datasets = _package("sklearn.datasets", "scikit-learn")
    _package("matplotlib.figure", "matplotlib")  # now, rather than after half a minute
    if console is None:
        from rich.console import Console

        console = Console(highlight=False)

    train, validation = digits(datasets)
    adapter("torch")  # imported before the clock starts, since both ways need it
    console.print(
        f"[bold]{len(variants)} variants[/] of one network: {len(RATES)} learning rates × {len(DECAYS)} "
        f"weight decays × {len(SEEDS)} seeds,\non {len(train[0]):,} digits, {epochs} epochs, fused:"
    )
    begun = time.perf_counter()
    fleet, history = train_fleet(variants, train, validation, epochs)
    fleet_seconds = time.perf_counter() - begun

    sample = [variants[position] for position in np.linspace(0, len(variants) - 1, alone).astype(int)]
    console.print(f"\n[bold]{alone} of them[/], one by one with a plain torch loop, on the same batches:")
    seconds, differences = [], []
    for variant in sample:
        took, difference, accuracy = train_one(fleet, variant, train, validation, epochs)
        seconds.append(took)
        differences.append(difference)
        console.print(
            f"  {variant.name:<20} {took:4.1f} s  accuracy {accuracy:.4f} "
            f"(fleet: {history[variant.name]['val_accuracy'][-1]:.4f})  weights ±{difference:.0e}"
        )
    steps = epochs * -(-len(train[0]) // BATCH_SIZE)
    outcome = Outcome(fleet_seconds, float(np.mean(seconds)), len(variants), max(differences), steps)
    history.plot("val_loss", picture)
    _print_outcome(console, outcome, alone)
    console.print(_best(history, variants))
    console.print(f"All learning curves: {picture.resolve()}", soft_wrap=True, markup=False)
    return outcome


def digits(datasets: ModuleType) -> tuple[Data, Data]:
    """Return scikit-learn's 8×8 digits as (x, y) for training and (x, y) for validation."""
    x, y = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order]
    held_out = len(x) // 5
    return (x[held_out:], y[held_out:]), (x[:held_out], y[:held_out])


def train_fleet(variants: list[Variant], train: Data, validation: Data, epochs: int) -> tuple[mf.Fleet, History]:
    """Train all variants as one fleet."""
    from modelfleet.frameworks.torch.demo import network

    fleet = mf.Fleet.build(
        network, [v.name for v in variants], seed=SEED, init=mf.each([v.seed for v in variants])
    )
    fleet.compile(
        "adamw",
        "cross_entropy",
        metrics=["accuracy"],
        lr=mf.each([v.lr for v in variants]),
        weight_decay=mf.each([v.weight_decay for v in variants]),
    )
    return fleet, fleet.fit(train, validation=validation, epochs=epochs, batch_size=BATCH_SIZE)


def train_one(
    fleet: mf.Fleet, variant: Variant, train: Data, validation: Data, epochs: int
) -> tuple[float, float, float]:
    """Train one variant alone. Return its seconds, its difference from the fleet's weights, and its accuracy."""
    from modelfleet.frameworks.torch.demo import network, train_alone

    rows = np.array([len(train[0])])
    seeds = np.array([member_seed(SEED, variant.name)])
    orders = np.concatenate([permutations(seeds, epoch, rows) for epoch in range(epochs)])
    model = network(variant.seed)
    device = fleet.plan().lanes[0].device
    begun = time.perf_counter()
    with computing():  # so that both ways use the cores in the same way
        accuracy = train_alone(
            model,
            train,
            validation,
            orders,
            device=device or "cpu",
            batch_size=BATCH_SIZE,
            lr=variant.lr,
            weight_decay=variant.weight_decay,
        )
    seconds = time.perf_counter() - begun
    return seconds, largest_difference(model.to("cpu"), fleet[variant.name])[0], accuracy


def _print_outcome(console: "Console", outcome: Outcome, alone: int) -> None:
    fused = outcome.members * outcome.steps / outcome.fleet_seconds
    single = outcome.steps / outcome.alone_seconds
    console.print(
        f"\n[bold]{outcome.speedup:.1f} × as fast[/] as one by one:\n"
        f"  fused        {outcome.fleet_seconds:6.1f} s for all {outcome.members}, start-up included; "
        f"{fused:,.0f} member-steps/s\n"
        f"  one by one   {outcome.members * outcome.alone_seconds:6.1f} s for all {outcome.members}, "
        f"extrapolated from {alone}; {single:,.0f} member-steps/s\n"
        f"Largest difference of any weight after {outcome.steps:,} steps: {outcome.difference:.0e} "
        f"of its tensor's largest\n"
    )


def _best(history: History, variants: list[Variant]) -> "Table":
    from rich.table import Table

    table = Table(title=f"The best {_BEST} of {len(variants)}", title_justify="left")
    for column in ("learning rate", "weight decay", "seed", "val_loss", "val_accuracy"):
        table.add_column(column, justify="right")
    by_name = {variant.name: variant for variant in variants}
    for name, loss in history.ranking("val_loss")[:_BEST]:
        variant = by_name[name]
        accuracy = history[name]["val_accuracy"][-1]
        table.add_row(
            f"{variant.lr:.2g}",
            f"{variant.weight_decay:g}",
            str(variant.seed),
            f"{loss:.4f}",
            f"{accuracy:.4f}",
        )
    return table


def _package(module: str, package: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(package, "demo", "modelfleet demo") from error
