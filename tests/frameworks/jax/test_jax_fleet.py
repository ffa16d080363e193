"""Fleets of JAX models: what the conformance suite does not ask for."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import modelfleet as mf
from modelfleet import testing
from modelfleet.errors import InputError, StrategyError

ROWS = 16


class Linear(NamedTuple):
    params: Any
    apply: Any


def apply(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["first"]) @ params["last"]


def make(seed: int, width: int = 5) -> Linear:
    generator = np.random.default_rng(seed)
    shapes = {"first": (4, width), "last": (width, 3)}
    params = {name: generator.normal(size=shape).astype(np.float32) / 2 for name, shape in shapes.items()}
    return Linear(params, apply)


def module(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(4, 3, rngs=rngs)


def toy(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 4)).astype(np.float32)
    return x, np.argmax(x[:, :3], axis=1)


def fit(fleet: mf.Fleet, data: Any, **options: Any) -> mf.History:
    return fleet.fit(data, progress=False, strategy="fused", batch_size=4, **options)


def test_members_are_built_from_seeds_of_their_own() -> None:
    fleet = mf.Fleet.build(module, 2, seed=1)
    again = mf.Fleet.build(module, 3, seed=1)
    assert testing.largest_difference(fleet["1"], again["1"])[0] == 0
    assert testing.largest_difference(fleet["0"], fleet["1"])[0] > 0.1
    pairs = mf.Fleet.build(make, 2, seed=1)
    assert testing.largest_difference(pairs["0"], pairs["1"])[0] > 0.1


def test_a_pair_comes_out_as_a_pair_of_its_own_class() -> None:
    model = make(0)
    before = model.params["first"].copy()
    fleet = mf.Fleet([model, make(1)])
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    fit(fleet, toy())
    trained = fleet["0"]
    assert type(trained) is Linear
    assert trained.apply is apply
    assert (np.asarray(trained.params["first"]) != before).any()
    np.testing.assert_array_equal(model.params["first"], before)  # somebody else's arrays
    assert fleet.predict(toy()[0])["0"].shape == (ROWS, 3)


@pytest.mark.parametrize(
    "recipe",
    [
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.05},
        {"optimizer": "sgd", "momentum": 0.9, "schedule": optax.cosine_decay_schedule(0.1, 8)},
        {"optimizer": optax.chain(optax.clip(0.01), optax.rmsprop(0.01))},
    ],
    ids=["clipped", "scheduled", "made"],
)
def test_recipes_give_what_optax_gives(recipe: dict[str, Any]) -> None:
    fleet = mf.Fleet.build(make, 2)
    whole: dict[str, Any] = {"loss": "cross_entropy", **recipe}
    expected = testing.alone(fleet["1"], "1", toy(), epochs=2, batch_size=4, **whole)
    fleet.compile(**whole)
    fit(fleet, toy(), epochs=2)
    difference, where = testing.largest_difference(fleet["1"], expected)
    assert difference < 1e-5, where


def test_an_objective_computes_its_own_loss_and_metrics() -> None:
    def objective(model: Any, batch: Any) -> Any:
        params, function = model
        error = function(params, batch["x"]) - batch["y"]
        return (error**2).mean(), {"largest": jnp.abs(error).max()}

    x, _ = toy()
    data = {"x": x, "y": np.zeros((ROWS, 3), np.float32)}
    fleet = mf.Fleet.build(make, 2)
    expected = testing.alone(
        fleet["0"], "0", data, optimizer="sgd", objective=objective, lr=0.1, epochs=1, batch_size=4
    )
    fleet.compile("sgd", objective=objective, lr=0.1)
    history = fit(fleet, data)
    assert testing.largest_difference(fleet["0"], expected)[0] < 1e-5
    assert list(history["0"]) == ["loss", "largest"]


def test_metrics_of_an_epoch_are_those_of_all_its_rows() -> None:
    x, y = toy()
    fleet = mf.Fleet.build(make, 2)
    fleet.compile("sgd", "cross_entropy", lr=0.0, metrics=["accuracy", "top_2"])
    history = fit(fleet, (x, y), validation=(x[:-1], y[:-1]))
    outputs = np.asarray(apply(fleet["1"].params, x))
    right = outputs.argmax(1) == y
    assert list(history["1"])[:3] == ["loss", "accuracy", "top_2"]
    assert history["1"]["accuracy"][0] == pytest.approx(right.mean())
    assert history["1"]["val_accuracy"][0] == pytest.approx(right[:-1].mean())


def test_halves_compute_and_float32_keeps() -> None:
    fleet, whole = mf.Fleet.build(make, 2), mf.Fleet.build(make, 2)
    for one, precision in ((fleet, "bf16"), (whole, "float32")):
        one.compile("sgd", "cross_entropy", lr=0.1, precision=precision)
        fit(one, toy(), epochs=2)
    difference, _ = testing.largest_difference(fleet["0"], whole["0"])
    assert 1e-6 < difference < 0.02
    assert fleet["0"].params["first"].dtype == jnp.float32
    assert fleet.predict(toy()[0])["0"].dtype == np.float32


def branching(params: Any, x: Any) -> Any:
    return x @ params["last"] if x.sum() > 1000 else x @ params["last"] * 2


def test_a_model_that_branches_runs_its_python_and_the_plan_says_why() -> None:
    params = {"last": np.ones((4, 3), np.float32)}
    fleet = mf.Fleet([(params, branching), (params, branching)])
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    with pytest.raises(StrategyError, match="branches on an array's values"):
        fit(fleet, toy())
    history = fleet.fit(toy(8), progress=False, batch_size=4, strategy="interleaved")
    assert np.isfinite(history["0"]["loss"]).all()
    plan = fleet.plan(toy(8), batch_size=4)
    assert ["branches on an array's values" in lane.reason for lane in plan.lanes] == [True, True]


def test_data_and_models_that_do_not_fit_are_refused() -> None:
    x, y = toy()
    fleet = mf.Fleet.build(make, 2)
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    with pytest.raises(InputError, match="labels go from 0 to 2"):
        fit(fleet, (x, y + 1))
    with pytest.raises(InputError, match=r"can't take this batch: \(2, 3\) float32.* into Linear gave"):
        fit(fleet, (x[:, :3], y))
    with pytest.raises(InputError, match="needs \\(x, y\\), but the data hold a dict of x"):
        fit(fleet, {"x": x})
    with pytest.raises(InputError, match="not a model that modelfleet can run"):
        mf.Fleet([({}, apply)])


def test_a_second_fleet_of_the_same_kind_compiles_nothing_anew() -> None:
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    counts = []
    for _ in range(2):
        fleet = mf.Fleet.build(make, 3)
        fleet.compile("sgd", "mse", lr=0.1)
        fit(fleet, (toy()[0], np.zeros((ROWS, 3), np.float32)))
        counts.append(len(compiled))
    assert counts[0] == counts[1] > 0
