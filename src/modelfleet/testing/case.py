"""Cases of the conformance suite: a framework as its checks see it, and what they have in common."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

import modelfleet as mf
from modelfleet.types import Data as AnyData
from modelfleet.types import Model, Tensor

SEED = 3
KINDS = ("mlp", "dropout", "batchnorm", "unlike")
BATCH = 8
EVEN, RAGGED = 2 * BATCH, 2 * BATCH - 2
"""Rows of two batches: of the same size, and with a shorter second batch."""
RATES = {"a": 0.02, "b": 0.05, "c": 0.01, "d": 0.03}

Data = tuple[np.ndarray, np.ndarray]
Weights = Mapping[str, Tensor]


def classes(seed: int, rows: int) -> Data:
    """Return rows of four numbers, and for each row one of three classes that can be learnt from it."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, 4)).astype(np.float32)
    return x, np.argmax(x[:, :3] + 0.1 * generator.normal(size=(rows, 3)), axis=1).astype(np.int32)


def cross_entropy(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean cross-entropy of labels under logits."""
    shifted = outputs.astype(np.float64) - outputs.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return float(-logs[np.arange(len(labels)), labels].mean())


@dataclass(frozen=True, eq=False)
class Case:
    """Describes a framework to check.

    The adapter's author writes `make`, `compile`, `alone`, `weights` and `outputs`. The defaults of the other
    fields are for models that take four numbers and return three logits.
    """

    make: Callable[[str, int], Model]
    """`make(kind, seed)`: return a new model of one of `KINDS` with weights that depend on the seed. "dropout"
    draws as it trains, "batchnorm" has running statistics, and "unlike" has another structure than "mlp"."""
    compile: Callable[[mf.Fleet, float | mf.Each], None]
    """`compile(fleet, lr)`: compile a fleet for this learning rate, or `each(...)`, with an optimizer that has a
    state, such as Adam."""
    alone: Callable[..., Model]
    """`alone(model, name, data, *, lr, seed, epochs, batch_size, shuffle)`: return a copy of the model, trained by
    the framework itself in the way that the member `name` of a fleet with this seed must be trained."""
    weights: Callable[[Model], Weights]
    """`weights(model)`: return a copy of everything that training changes, by name."""
    outputs: Callable[[Model, np.ndarray], Tensor]
    """`outputs(model, x)`: return the model's outputs outside of training."""
    data: Callable[[int, int], Data] = classes
    """`data(seed, rows)`: return NumPy arrays to learn from."""
    loss: Callable[[np.ndarray, np.ndarray], float] = cross_entropy
    """`loss(outputs, y)`: return the value that `evaluate` must report as "loss"."""
    tolerance: float = 1e-5
    """Largest allowed difference of weights, relative to the largest of a tensor (at least 1)."""
    in_place: bool = True
    """True if a member's model stays the object that was given; False if models can't be changed."""


def seed_of(name: str) -> int:
    """Return the seed of a member's initial weights."""
    return ord(name)


def make_fleet(
    case: Case, kinds: Mapping[str, str], *, lr: float | Mapping[str, float], devices: str = "auto"
) -> mf.Fleet:
    """Return a compiled fleet. A member's initial weights depend on its name and kind alone."""
    models = {name: case.make(kind, seed_of(name)) for name, kind in kinds.items()}
    fleet = mf.Fleet(models, seed=SEED, devices=devices)
    case.compile(fleet, mf.each({name: lr[name] for name in kinds}) if isinstance(lr, Mapping) else lr)
    return fleet


def fit(fleet: mf.Fleet, data: AnyData, **options: Any) -> mf.History:
    """Fit a fleet without a progress display."""
    return fleet.fit(data, batch_size=BATCH, progress=False, **options)


def own_data(case: Case, name: str, rows: int) -> Data:
    """Return data that no other member has."""
    return case.data(seed_of(name), rows)


@cache
def weights_alone(
    case: Case,
    kind: str,
    name: str,
    *,
    rows: int = EVEN,
    own: bool = False,
    lr: float | None = None,
    epochs: int = 2,
    shuffle: bool = True,
) -> Weights:
    """Return the weights of a member trained alone, on its own data or on the common data. Do not change them."""
    data = own_data(case, name, rows) if own else case.data(0, rows)
    return trained_alone(case, kind, name, data, lr=lr, epochs=epochs, shuffle=shuffle)


def trained_alone(
    case: Case, kind: str, name: str, data: Data, *, lr: float | None = None, epochs: int, shuffle: bool
) -> Weights:
    """Return the weights of a member trained alone on these data."""
    model = case.alone(
        case.make(kind, seed_of(name)),
        name,
        data,
        lr=RATES[name] if lr is None else lr,
        seed=SEED,
        epochs=epochs,
        batch_size=BATCH,
        shuffle=shuffle,
    )
    return case.weights(model)


def weight_arrays(case: Case, model: Model) -> dict[str, np.ndarray]:
    """Return a model's weights as NumPy arrays."""
    return {name: np.array(value) for name, value in case.weights(model).items()}


def distance(first: Weights, second: Weights) -> tuple[float, str]:
    """Return the largest difference between two sets of weights, and the name of its tensor."""
    assert first.keys() == second.keys(), f"unlike weights: {', '.join(first)} and {', '.join(second)}"
    return max(((_difference(first[name], second[name], name), name) for name in first), default=(0.0, ""))


def _difference(value: ArrayLike, expected: ArrayLike, what: str) -> float:
    """Return the largest difference between two arrays, relative to the largest number expected (at least 1)."""
    a, b = (np.asarray(one).astype(np.float64) for one in (value, expected))
    assert a.shape == b.shape, f"{what}: {a.shape}, expected {b.shape}"
    difference = float(np.abs(a - b).max(initial=0.0)) / max(1.0, float(np.abs(b).max(initial=0.0)))
    return difference if np.isfinite(difference) else np.inf


def check_same(case: Case, model: Model, expected: Weights, who: str) -> None:
    """Raise AssertionError if a model's weights differ from the expected ones."""
    difference, where = distance(case.weights(model), expected)
    assert difference <= case.tolerance, f"{who}: {where} is off by {difference:.1e}, allowed {case.tolerance:.0e}"


def check_near(value: ArrayLike, expected: ArrayLike, tolerance: float, what: str) -> None:
    """Raise AssertionError if two arrays differ by more than a tolerance."""
    difference = _difference(value, expected, what)
    assert difference <= tolerance, f"{what}: off by {difference:.1e}, allowed {tolerance:.0e}"


def check_finite(values: Sequence[float], count: int) -> None:
    """Raise AssertionError if a history does not have `count` finite values."""
    assert len(values) == count, f"{len(values)} epochs in the history, expected {count}"
    assert np.isfinite(values).all(), f"the history holds {values}"
