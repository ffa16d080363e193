"""An ensemble says what NumPy says of its members' outputs, by any strategy, and holds no more than it needs."""

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.helpers import mlp, toy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import modelfleet as mf
from modelfleet.ensembles import here
from modelfleet.ensembles.reduction import Reduction
from modelfleet.errors import InputError, StrategyError
from modelfleet.lanes import Lane
from modelfleet.types import Strategy

X, Y = toy(70)
STRATEGIES: list[Strategy] = ["auto", "interleaved", "threads", "processes"]
BOTH = "cpu:0,cpu:1"


class Convolved(nn.Module):
    """A small CNN over the same rows as an `mlp`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 2)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x[:, None])).flatten(1))


class Two(nn.Module):
    """A model with two outputs, one of which has an axis more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> dict[str, Any]:
        found = self.layer(x)
        return {"flat": found[:, :3], "pair": (found.reshape(-1, 2, 3), found[:, 0])}


def unlike() -> dict[str, nn.Module]:
    """Equal members, one of another width, and a CNN."""
    torch.manual_seed(0)
    return {"a": mlp(), "b": mlp(), "wide": mlp(9), "c": mlp(), "cnn": Convolved()}


@cache
def one_device() -> mf.Fleet:
    return mf.Fleet(unlike())


@cache
def two_devices() -> mf.Fleet:
    return mf.Fleet(unlike(), devices=BOTH)


@cache
def values() -> np.ndarray:
    """All members' outputs, `(member, row, class)`."""
    return np.stack(list(one_device().predict(X).values()))


def vote(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels and their shares of the votes."""
    counts = np.stack([np.bincount(column, minlength=scores.shape[-1]) for column in scores.argmax(-1).T])
    return counts.argmax(-1), counts.max(-1) / len(scores)


def highest(found: np.ndarray) -> np.ndarray:
    return found.max(axis=0)


def check(fleet: mf.Fleet, strategy: Strategy, batch_size: int | None) -> None:
    given: dict[str, Any] = {"std": True, "strategy": strategy, "batch_size": batch_size}
    mean, deviation = mf.Ensemble(fleet).predict(X, **given)
    assert mean.dtype == deviation.dtype == np.float32
    np.testing.assert_allclose(mean, values().mean(0), atol=1e-6)
    np.testing.assert_allclose(deviation, values().std(0), atol=1e-6)
    median, deviation = mf.Ensemble(fleet, "median").predict(X, **given)
    np.testing.assert_allclose(median, np.median(values(), 0), atol=1e-6)
    np.testing.assert_allclose(deviation, values().std(0), atol=1e-6)
    labels, shares = mf.Ensemble(fleet, "vote").predict(X, **given)
    expected = vote(values())
    np.testing.assert_array_equal(labels, expected[0])
    np.testing.assert_allclose(shares, expected[1])
    found = mf.Ensemble(fleet, highest).predict(X, strategy=strategy, batch_size=batch_size)
    np.testing.assert_allclose(found, values().max(0), atol=1e-6)


@pytest.mark.parametrize("batch_size", [None, 1, 7, 100])
@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_an_ensemble_says_what_numpy_says(strategy: Strategy, batch_size: int | None) -> None:
    check(one_device(), strategy, batch_size)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_members_on_two_devices_give_the_same_numbers(strategy: Strategy) -> None:
    check(two_devices(), strategy, 9)
    assert {lane.device for lane in two_devices().plan().lanes} == {"cpu:0", "cpu:1"}


def test_several_processes_on_one_device_give_the_same_numbers() -> None:
    check(one_device(), "processes", None)


def test_one_row_for_two_devices() -> None:
    for strategy in ("threads", "processes"):
        found = mf.Ensemble(two_devices(), "median").predict(X[:1], strategy=strategy)
        np.testing.assert_allclose(found, np.median(values(), 0)[:1], atol=1e-6)


def test_a_fused_fleet_of_float64_agrees_to_twelve_digits() -> None:
    torch.manual_seed(0)
    fleet = mf.Fleet([mlp().double() for _ in range(9)])
    x = torch.from_numpy(X).double()
    expected = np.stack(list(fleet.predict(x).values()))
    for strategy in ("auto", "fused"):
        mean, deviation = mf.Ensemble(fleet).predict(x, std=True, strategy=strategy)
        assert mean.dtype == np.float64
        np.testing.assert_allclose(mean, expected.mean(0), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(deviation, expected.std(0), rtol=1e-12, atol=1e-14)
        median = mf.Ensemble(fleet, "median").predict(x, strategy=strategy)
        np.testing.assert_allclose(median, np.median(expected, 0), rtol=1e-12)


@pytest.mark.parametrize("combine", ["mean", "median", highest])
@pytest.mark.parametrize("strategy", ["auto", "processes"])
def test_outputs_may_be_trees(combine: Any, strategy: Strategy) -> None:
    torch.manual_seed(0)
    fleet = mf.Fleet([Two(), Two(), Two()])
    every = list(fleet.predict(X).values())
    found = mf.Ensemble(fleet, combine).predict(X, strategy=strategy, batch_size=16)
    function: Any = combine if callable(combine) else getattr(np, combine)
    for ours, theirs in (
        (found["flat"], [own["flat"] for own in every]),
        (found["pair"][0], [own["pair"][0] for own in every]),
        (found["pair"][1], [own["pair"][1] for own in every]),
    ):
        np.testing.assert_allclose(
            ours,
            function(np.stack(theirs), axis=0) if combine is not highest else np.stack(theirs).max(0),
            atol=1e-6,
        )


def test_weights_count_in_the_mean_and_in_the_vote() -> None:
    weights = {"a": 0.5, "b": 2.0, "wide": 0.0, "c": 1.0, "cnn": 0.25}
    column = np.array(list(weights.values()))
    mean, deviation = mf.Ensemble(one_device(), weights=weights).predict(X, std=True)
    expected = np.average(values(), axis=0, weights=column)
    np.testing.assert_allclose(mean, expected, atol=1e-6)
    squares = np.average((values() - expected) ** 2, axis=0, weights=column)
    np.testing.assert_allclose(deviation, np.sqrt(squares), atol=1e-6)
    labels = mf.Ensemble(one_device(), "vote", weights=list(weights.values())).predict(X)
    best = values().argmax(-1)
    counts = np.stack([np.bincount(own, column, minlength=3) for own in best.T])
    np.testing.assert_array_equal(labels, counts.argmax(-1))


class Says(nn.Module):
    """A model that prefers the same class in every row."""

    def __init__(self, label: int, classes: int = 3) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.eye(classes)[label])

    def forward(self, x: Tensor) -> Tensor:
        return self.scores + 0 * x[:, :1]


def test_of_classes_with_equally_many_votes_the_lowest_wins() -> None:
    labels, shares = mf.Ensemble([Says(2), Says(1), Says(2), Says(1)], "vote").predict(X, std=True)
    assert set(labels.tolist()) == {1}
    assert set(shares.tolist()) == {0.5}


def test_a_function_gets_all_members_in_their_order_for_a_batch_of_rows() -> None:
    shapes: list[tuple[int, ...]] = []

    def first(found: np.ndarray) -> np.ndarray:
        shapes.append(found.shape)
        return found[0] - 2 * found[-1]

    found = mf.Ensemble(one_device(), first).predict(X, batch_size=32)
    np.testing.assert_allclose(found, values()[0] - 2 * values()[-1], atol=1e-5)
    assert shapes == [(5, 32, 3), (5, 32, 3), (5, 6, 3)]


def test_some_members_may_be_combined() -> None:
    found = mf.Ensemble(one_device()).predict(X, members=["cnn", "a"])
    np.testing.assert_allclose(found, values()[[0, 4]].mean(0), atol=1e-6)


@pytest.mark.parametrize("combine", ["mean", "median", "vote"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_outputs_of_unequal_shapes_are_refused_by_name(combine: Any, strategy: Strategy) -> None:
    fleet = mf.Fleet({"three": Says(0, 3), "four": Says(0, 4)}, devices=BOTH)
    with pytest.raises(InputError, match=r"'(three|four)' and '(three|four)' .*\(\d+, [34]\) and \(\d+, [34]\)"):
        mf.Ensemble(fleet, combine).predict(X, strategy=strategy)


def test_outputs_of_other_structures_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="'one' and 'two' can't be combined: one array and flat"):
        mf.Ensemble({"one": mlp(), "two": Two()}).predict(X)


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_members_may_see_the_rows_in_their_own_way(strategy: Strategy) -> None:
    fleet = one_device()
    own = mf.each({name: X * scale for scale, name in enumerate(fleet, 1)})
    expected = np.stack(list(fleet.predict(own).values()))
    for combine, function in (("mean", np.mean), ("median", np.median)):
        found = mf.Ensemble(fleet, combine).predict(own, strategy=strategy)
        np.testing.assert_allclose(found, function(expected, axis=0), atol=1e-6)


@pytest.mark.parametrize("combine", ["mean", "median"])
@pytest.mark.parametrize("rows", [69, 64, 32, 0])
def test_members_with_unequal_rows_are_refused(combine: Any, rows: int) -> None:
    own: Any = dict.fromkeys(one_device(), X)
    own["cnn"] = X[: max(rows, 1)]
    with pytest.raises(InputError, match="rows"):
        mf.Ensemble(one_device(), combine).predict(mf.each(own))
    own = {**dict.fromkeys(one_device(), X), "b": X[: max(rows, 1)]}
    with pytest.raises(InputError, match="rows"):
        mf.Ensemble(one_device(), combine).predict(mf.each(own))


@pytest.mark.parametrize("combine", ["mean", "median"])
@pytest.mark.parametrize("strategy", ["auto", "processes"])
def test_a_loader_is_read_once_for_all(combine: Any, strategy: Strategy) -> None:
    loader = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=20)
    found = mf.Ensemble(one_device(), combine).predict(loader, strategy=strategy)
    np.testing.assert_allclose(found, getattr(np, combine)(values(), axis=0), atol=1e-6)


def test_models_of_two_frameworks_agree() -> None:
    def apply(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params)

    torch.manual_seed(0)
    weights = jnp.asarray(np.random.default_rng(3).normal(size=(4, 3)), jnp.float32)
    fleet = mf.Fleet({"torch": mlp(), "jax": (weights, apply)})
    expected = np.stack(list(fleet.predict(X).values()))
    for strategy in ("auto", "processes"):
        for combine in ("mean", "median"):
            found = mf.Ensemble(fleet, combine).predict(X, strategy=strategy)
            np.testing.assert_allclose(found, getattr(np, combine)(expected, axis=0), atol=1e-6)


def test_a_median_in_processes_needs_a_framework_that_connects_them() -> None:
    def apply(params: Any, x: Any) -> Any:
        return x @ params

    ensemble = mf.Ensemble([(jnp.ones((4, 3)), apply), (jnp.zeros((4, 3)), apply)], "median")
    with pytest.raises(StrategyError, match="only torch can exchange them"):
        ensemble.predict(X, strategy="processes")
    np.testing.assert_allclose(ensemble.predict(X), np.repeat(X.sum(1, keepdims=True) / 2, 3, 1), atol=1e-6)


def test_a_loaded_fleet_and_plain_models_can_be_ensembles(tmp_path: Path) -> None:
    fleet = mf.Fleet.build(mlp, 3, seed=0)
    fleet.save(tmp_path / "saved")
    expected = mf.Ensemble(fleet).predict(X)
    loaded = mf.load(tmp_path / "saved", mlp)
    np.testing.assert_array_equal(mf.Ensemble(loaded).predict(X), expected)
    np.testing.assert_allclose(mf.Ensemble([fleet[name] for name in fleet]).predict(X), expected, atol=1e-7)


def test_after_training_the_ensemble_is_that_of_now() -> None:
    fleet = mf.Fleet.build(mlp, 3, seed=0)
    fleet.compile("adam", "cross_entropy", lr=0.01)
    ensemble = mf.Ensemble(fleet)
    for _ in range(2):
        expected = np.mean(list(fleet.predict(X).values()), axis=0)
        np.testing.assert_allclose(ensemble.predict(X), expected, atol=1e-6)
        fleet.fit((X, Y), progress=False)


def test_an_error_of_one_device_is_raised_and_ends_the_others() -> None:
    for strategy in ("threads", "processes"):
        for combine in ("mean", "median"):
            fleet = mf.Fleet({"a": mlp(), "b": Raising(), "c": mlp(), "d": Raising()}, devices=BOTH)
            with pytest.raises(InputError, match=r"can't take a batch of .*ten rows"):
                mf.Ensemble(fleet, combine).predict(X, batch_size=30, strategy=strategy)


class Raising(nn.Module):
    """A model that raises in its third batch, which has ten rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 10:
            raise ValueError("ten rows")
        return self.layer(x)


# --- what is held --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [3, 24])
@pytest.mark.parametrize("combine", ["mean", "vote", "median"])
def test_no_more_than_a_batch_of_outputs_is_held(
    combine: Any, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[weakref.ref[np.ndarray], int]] = []
    most: list[int] = []
    predictions = Lane.predictions

    def counted(self: Lane, feed: Any) -> Iterator[Any]:
        for found in predictions(self, feed):
            batch = [(slots, tree.copy()) for slots, tree in found]  # views of a copy keep it alive
            made.extend((weakref.ref(tree), tree.nbytes) for _, tree in batch)
            most.append(sum(size for array, size in made if array() is not None))
            del found
            yield batch

    monkeypatch.setattr(Lane, "predictions", counted)
    torch.manual_seed(0)
    fleet = mf.Fleet([mlp() for _ in range(members - 1)] + [Convolved()])
    rows = np.random.default_rng(0).normal(size=(640, 4)).astype(np.float32)
    gc.disable()  # what only the collector frees would be held
    try:
        mf.Ensemble(fleet, combine).predict(rows, batch_size=16)
    finally:
        gc.enable()
    one_batch = members * 16 * 3 * 4
    assert len(most) == 80
    assert max(most) <= 2 * one_batch  # the last one of each lane is there until the next one comes


def test_what_is_kept_does_not_depend_on_the_number_of_members(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[Reduction]] = []

    class Noted(Reduction):
        def __init__(self, way: Any) -> None:
            super().__init__(way)
            kept[-1].append(self)

    monkeypatch.setattr(here, "Reduction", Noted)
    sizes = []
    for members in (2, 20):
        kept.append([])
        torch.manual_seed(0)
        mf.Ensemble(mf.Fleet([mlp() for _ in range(members)], devices=BOTH)).predict(X, std=True)
        parts = [part.tree for reduction in kept[-1] for part in reduction.parts]
        sizes.append(sum(part.mean.nbytes + part.squares.nbytes for part in parts))
    assert [len(own) for own in kept] == [2, 2]  # one for each device
    assert sizes[0] == sizes[1]


# --- evaluate ------------------------------------------------------------------------------------------------


def trained() -> mf.Fleet:
    fleet = mf.Fleet.build(mlp, 4, seed=0)
    fleet.compile("adam", "cross_entropy", lr=mf.each([0.01, 0.02, 0.03, 0.1]), metrics=["accuracy", "top_2"])
    fleet.fit((X, Y), epochs=3, progress=False)
    return fleet


def test_evaluate_measures_the_combined_output() -> None:
    fleet = trained()
    outputs = np.stack(list(fleet.predict(X).values()))
    mean = outputs.mean(0)
    loss = nn.functional.cross_entropy(torch.from_numpy(mean), torch.from_numpy(Y)).item()
    found = mf.Ensemble(fleet).evaluate((X, Y))
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["accuracy"] == pytest.approx((mean.argmax(1) == Y).mean())
    assert list(found) == ["loss", "accuracy", "top_2"]
    voted = mf.Ensemble(fleet, "vote").evaluate((X, Y), strategy="threads")
    assert voted["accuracy"] == pytest.approx((vote(outputs)[0] == Y).mean())
    assert "loss" not in voted


def test_evaluate_takes_metrics_of_its_own() -> None:
    fleet = mf.Fleet(unlike())
    ensemble = mf.Ensemble(fleet)
    with pytest.raises(InputError, match="there is nothing to compute"):
        ensemble.evaluate((X, Y))

    def lowest(output: Tensor, target: Tensor) -> Tensor:
        return output.min()

    found = ensemble.evaluate((X, Y), metrics=["accuracy", lowest])
    assert found["lowest"] == pytest.approx(values().mean(0).min(), abs=1e-6)
    assert found["accuracy"] == pytest.approx((values().mean(0).argmax(1) == Y).mean())


def test_evaluate_of_members_with_several_losses_has_none() -> None:
    fleet = mf.Fleet.build(mlp, 2, seed=0)
    losses: Any = mf.each([nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)])
    fleet.compile("sgd", losses, lr=0.1, metrics=["accuracy"])
    assert list(mf.Ensemble(fleet).evaluate((X, Y))) == ["accuracy"]


def test_evaluate_of_jax_members() -> None:
    def apply(params: Any, x: Any) -> Any:
        return x @ params

    random = np.random.default_rng(0)
    fleet = mf.Fleet([(jnp.asarray(random.normal(size=(4, 3)), jnp.float32), apply) for _ in range(3)])
    fleet.compile("sgd", "cross_entropy", lr=0.1, metrics=["accuracy"])
    mean = np.mean(list(fleet.predict(X).values()), axis=0)
    found = mf.Ensemble(fleet).evaluate((X, Y))
    assert found["accuracy"] == pytest.approx((mean.argmax(1) == Y).mean())
    loss = nn.functional.cross_entropy(torch.from_numpy(mean), torch.from_numpy(Y)).item()
    assert found["loss"] == pytest.approx(loss, rel=1e-4)


# --- what is refused -----------------------------------------------------------------------------------------


def ensemble(*arguments: Any) -> Any:
    """An ensemble that is called with what its types forbid."""
    return mf.Ensemble(*arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda fleet: ensemble(fleet, "maen"), "mean"),
        (lambda fleet: mf.Ensemble(fleet, weights=[1, 2]), "weights: each"),
        (lambda fleet: mf.Ensemble(fleet, weights=[1, 2, 3, 4, -1]), "the weight of member 'cnn' is -1"),
        (lambda fleet: mf.Ensemble(fleet, "median", weights=[1] * 5), 'they are for "mean" and "vote"'),
        (lambda fleet: mf.Ensemble(fleet, weights=[0] * 5).predict(X), "add up to 0"),
        (lambda fleet: ensemble(fleet).predict(X, batch_size=mf.each([1] * 5)), "batch_size is each"),
        (lambda fleet: mf.Ensemble(fleet).predict(X, members=["d"]), "member 'd'"),
        (lambda fleet: mf.Ensemble(fleet).predict(X, strategy="data_parallel"), "is for fit"),
        (lambda fleet: ensemble(fleet, lambda found: 1.0).predict(X), "Return one answer for each of the"),
        (lambda fleet: mf.Ensemble([nn.Linear(4, 1)], "vote").predict(X), r"a score for every class"),
        (lambda fleet: ensemble(fleet).evaluate([(X, Y)]), r"expected arrays \(x, y\)"),
    ],
)
def test_what_does_not_fit_is_explained(make: Callable[[mf.Fleet], object], message: str) -> None:
    with pytest.raises((InputError, StrategyError), match=message):
        make(one_device())
