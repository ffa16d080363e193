"""JAX members that differ only in numbers share a lane, and each has the numbers it would have alone."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import modelfleet as mf
from modelfleet import testing
from modelfleet.frameworks.jax.engine import JaxEngine

DOUBLE: Any = {"dtype": jnp.float64, "param_dtype": jnp.float64}
X = np.random.default_rng(0).normal(size=(24, 6))
Y = np.random.default_rng(1).normal(size=(24, 3))
RECIPE: Any = {"optimizer": "adam", "loss": "mse", "lr": 0.02}


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class Net(nnx.Module):
    """Two layers with a layer between them."""

    slope: float
    temperature: float
    deviation: float
    share: float
    power: int

    def __init__(self, between: Any, rngs: nnx.Rngs, **numbers: float) -> None:
        self.first = nnx.Linear(6, 8, rngs=rngs, **DOUBLE)
        self.between = between
        self.last = nnx.Linear(8, 3, rngs=rngs, **DOUBLE)
        for name, number in numbers.items():
            setattr(self, name, number)

    def __call__(self, x: Any) -> Any:
        return self.last(self.between(jnp.sin(self.first(x))))


class Leaky(Net):
    def __call__(self, x: Any) -> Any:
        return self.last(jax.nn.leaky_relu(self.first(x), self.slope) / self.temperature)


class Noisy(Net):
    def __call__(self, x: Any) -> Any:
        x = self.first(x)
        if not self.between.deterministic:
            x = x + self.deviation * jax.random.normal(self.between.rngs(), x.shape, jnp.float64)
        return self.last(self.between(x))


class Repeated(Net):
    def __call__(self, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c * self.slope + 0.1), None), self.first(x), None, length=3)
        return self.last(jax.checkpoint(lambda x: jnp.sin(x) * self.slope)(x))


def params(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {"w": generator.normal(size=(6, 8)) / 2, "v": generator.normal(size=(8, 3)) / 2}


def apply(own: Any, x: Any, *, slope: float, scale: float = 1.0) -> Any:
    return jax.nn.elu(x @ own["w"], slope) @ own["v"] * scale


def closing(slope: float, weights: list[float]) -> Any:
    scale = np.asarray(weights)

    def apply(own: Any, x: Any, train: bool, rng: jax.Array) -> Any:
        hidden = jnp.tanh(x @ own["w"])
        if train:
            hidden = jnp.where(jax.random.bernoulli(rng, 1 - slope, hidden.shape), hidden / (1 - slope), 0.0)
        return hidden @ own["v"] * scale

    return apply


def batch_norm(**options: Any) -> Any:
    layer = nnx.BatchNorm(8, **options, **DOUBLE)
    # Flax makes them in float32, whatever it is told.
    layer.mean, layer.var = (nnx.BatchStat(jnp.asarray(own[...], jnp.float64)) for own in (layer.mean, layer.var))
    return layer


def plain(rngs: nnx.Rngs) -> Any:
    return jnp.tanh


def net(kind: type[Net], between: Callable[[nnx.Rngs], Any], seed: int, **numbers: float) -> Net:
    rngs = nnx.Rngs(seed)
    return kind(between(rngs), rngs, **numbers)


# A member by its seed. Each has other numbers.
MODELS: dict[str, Callable[[int], Any]] = {
    "Dropout": lambda i: net(Net, lambda rngs: nnx.Dropout(0.2 * (i + 1), rngs=rngs), i),
    "NumPy's numbers": lambda i: net(Net, lambda rngs: nnx.Dropout(np.linspace(0.1, 0.9, 3)[i], rngs=rngs), i),
    "LayerNorm": lambda i: net(Net, lambda rngs: nnx.LayerNorm(8, epsilon=10.0**-i, rngs=rngs, **DOUBLE), i),
    "RMSNorm": lambda i: net(Net, lambda rngs: nnx.RMSNorm(8, epsilon=0.1 * (i + 1), rngs=rngs, **DOUBLE), i),
    "BatchNorm": lambda i: net(
        Net, lambda rngs: batch_norm(momentum=0.5 + 0.1 * i, epsilon=10.0**-i, rngs=rngs), i
    ),
    "own attributes": lambda i: net(Leaky, lambda rngs: None, i, slope=0.1 * (i + 1), temperature=1.0 + i / 3),
    "an integer among floats": lambda i: net(Leaky, lambda rngs: None, i, slope=0.1, temperature=[2.5, 1, 0.5][i]),
    "noise": lambda i: net(Noisy, lambda rngs: nnx.Dropout(0.3, rngs=rngs), i, deviation=0.1 * (i + 1)),
    "scan and checkpoint": lambda i: net(Repeated, lambda rngs: None, i, slope=0.3 * (i + 1)),
    "partial": lambda i: (params(i), functools.partial(apply, slope=0.5 + i, scale=1 / (i + 1))),
    "closure": lambda i: (params(i), closing(0.2 * (i + 1), [1.0, 0.5 * i, 2.0])),
}


def told(recipe: dict[str, Any]) -> Any:
    return {key: value for key, value in {**RECIPE, **recipe}.items() if value is not None}


def fleet_of(make: Callable[[int], Any], count: int = 3, **recipe: Any) -> mf.Fleet:
    fleet = mf.Fleet({f"m{i}": make(i) for i in range(count)})
    fleet.compile(**told(recipe))
    return fleet


def lanes(fleet: mf.Fleet) -> list[tuple[str, ...]]:
    return [lane.members for lane in fleet.plan((X, Y), batch_size=8).lanes]


def fit(fleet: mf.Fleet, **options: Any) -> mf.History:
    return fleet.fit((X, Y), batch_size=8, progress=False, **options)


def close(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def same(fleet: mf.Fleet, make: Callable[[int], Any], act: Callable[[mf.Fleet], Any], **recipe: Any) -> None:
    """Compare every member with a fleet of its own, by its weights and by what `act` has returned for it."""
    found = act(fleet)
    for i, name in enumerate(fleet.names):
        alone = mf.Fleet({name: make(i)})
        alone.compile(**told(recipe))
        wanted = act(alone)
        close([own[name] for own in found], [own[name] for own in wanted])
        assert testing.largest_difference(fleet[name], alone[name])[0] < 1e-10


@pytest.mark.parametrize("name", MODELS)
def test_members_that_differ_in_a_number_share_a_lane_and_are_as_alone(name: str) -> None:
    make = MODELS[name]
    fleet = fleet_of(make)
    assert lanes(fleet) == [("m0", "m1", "m2")]
    fit(fleet, epochs=2)
    for i, member in enumerate(fleet.names):
        expected = testing.alone(make(i), member, (X, Y), **RECIPE, epochs=2, batch_size=8)
        difference, where = testing.largest_difference(fleet[member], expected)
        assert difference < 1e-10, where
    assert testing.largest_difference(fleet["m1"], make(1))[0] > 1e-3


@pytest.mark.parametrize("name", ["Dropout", "BatchNorm", "closure"])
def test_every_verb_gives_each_what_it_gives_alone(name: str) -> None:
    def act(fleet: mf.Fleet) -> list[Any]:
        first = fit(fleet, epochs=2, validation=(X[:10], Y[:10]))
        second = fit(fleet, epochs=1, validation=(X[:10], Y[:10]))
        return [first, second, fleet.evaluate((X, Y), batch_size=7), fleet.predict(X, batch_size=5)]

    same(fleet_of(MODELS[name]), MODELS[name], act)


def test_members_that_end_early_leave_the_others_their_numbers() -> None:
    def make(i: int) -> Any:
        return net(Net, lambda rngs: nnx.Dropout(0.15 * (i + 1), rngs=rngs), i)

    def act(fleet: mf.Fleet) -> list[Any]:
        epochs = {"m0": 1, "m1": 1, "m2": 4, "m3": 3, "m4": 1}
        fit(fleet, epochs=mf.each({name: epochs[name] for name in fleet.names}))
        return [fleet.evaluate((X, Y), batch_size=8)]

    same(fleet_of(make, 5), make, act)


def test_own_rows_and_batch_sizes_are_as_alone() -> None:
    make = MODELS["Dropout"]
    rows = {"m0": 24, "m1": 13, "m2": 20}

    def act(fleet: mf.Fleet) -> list[Any]:
        data = mf.each({name: (X[: rows[name]], Y[: rows[name]]) for name in fleet.names})
        history = fleet.fit(data, batch_size=8, epochs=2, progress=False)
        other = fleet.fit(data, batch_size=mf.each({n: 4 + int(n[1]) for n in fleet.names}), progress=False)
        return [history, other]

    same(fleet_of(make), make, act)


class Mixing(Net):
    """Mixes the rows of a batch by a number, which may be 0."""

    def __call__(self, x: Any) -> Any:
        x = self.last(self.first(x))
        return x + self.share * x.mean(0)


def test_padding_is_tried_with_the_numbers_of_every_variant() -> None:
    def make(i: int) -> Any:
        return net(Mixing, lambda rngs: None, i, share=0.5 * i)

    rows = {"m0": 24, "m1": 13, "m2": 20}

    def act(fleet: mf.Fleet) -> list[Any]:
        data = mf.each({name: (X[: rows[name]], Y[: rows[name]]) for name in fleet.names})
        history = fleet.fit(data, batch_size=8, epochs=2, progress=False)
        return [history, fleet.predict(mf.each({n: X[: rows[n]] for n in fleet.names}), batch_size=8)]

    fleet = fleet_of(make)
    assert len(lanes(fleet)) == 1
    same(fleet, make, act)


def test_members_that_branch_on_their_number_have_a_lane_of_their_own() -> None:
    rates = [0.5, 0.0, 0.25, 0, 0.75]

    def make(i: int) -> Any:
        return net(Net, lambda rngs: nnx.Dropout(rates[i], rngs=rngs), i)

    fleet = fleet_of(make, 5)
    plan = fleet.plan((X, Y), batch_size=8)
    assert [lane.members for lane in plan.lanes] == [("m0", "m2", "m4"), ("m1", "m3")]
    assert "between.rate is 0.0, not 0.5, which changes more than a number" in (plan.lanes[1].reason or "")
    same(fleet, make, lambda fleet: [fit(fleet, epochs=2, validation=(X, Y)), fleet.predict(X)])


def test_other_integers_are_another_structure() -> None:
    class Power(Net):
        def __call__(self, x: Any) -> Any:
            return self.last(self.first(x) ** self.power)

    fleet = fleet_of(lambda i: net(Power, lambda rngs: None, i, power=i + 2), 2)
    plan = fleet.plan((X, Y), batch_size=8)
    assert [lane.members for lane in plan.lanes] == [("m0",), ("m1",)]
    assert "power is 3, not 2" in (plan.lanes[1].reason or "")


class Step(mf.Callback):
    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def on_epoch_end(self, run: Any) -> None:
        self.act()


@pytest.mark.parametrize("alike", [True, False])
def test_numbers_that_a_callback_changes_are_read_again(alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members may begin with equal numbers, and each goes its own way from there. They stay fused."""

    def not_fused(engine: JaxEngine, slot: int) -> None:
        raise AssertionError(f"the member in slot {slot} has a program of its own")

    monkeypatch.setattr(JaxEngine, "_serving", not_fused)

    def make(i: int) -> Any:
        rate = 0.5 if alike else 0.2 * (i + 1)
        return net(Net, lambda rngs: nnx.Dropout(rate, rngs=rngs), i)

    def act(fleet: mf.Fleet) -> list[Any]:
        def change() -> None:
            for name in fleet.names:
                model: Any = fleet[name]
                model.between.rate *= 0.5 + 0.1 * int(name[1])

        history = fit(fleet, epochs=4, callbacks=[Step(change)], validation=(X, Y), shuffle=False)
        return [history, fit(fleet, shuffle=False)]

    fleet = fleet_of(make)
    assert len(lanes(fleet)) == 1
    same(fleet, make, act)


def test_a_number_that_becomes_a_branch_in_a_fit_is_as_alone() -> None:
    make = MODELS["Dropout"]

    def act(fleet: mf.Fleet) -> list[Any]:
        def change() -> None:
            if "m1" in fleet.names:
                model: Any = fleet["m1"]
                model.between.rate = 0.0

        return [fit(fleet, epochs=3, callbacks=[Step(change)], validation=(X, Y), shuffle=False)]

    same(fleet_of(make), make, act)


def test_a_closure_that_a_callback_changes_is_read_again() -> None:
    def make(i: int) -> Any:
        slope = 0.5 + i

        def scaled(own: Any, x: Any) -> Any:
            return apply(own, x, slope=slope)

        def change() -> None:
            nonlocal slope
            slope /= 2

        changes[i] = change
        return params(i), scaled

    changes: dict[int, Callable[[], None]] = {}

    def act(fleet: mf.Fleet) -> list[Any]:
        def change() -> None:
            for name in fleet.names:
                changes[int(name[1])]()

        return [fit(fleet, epochs=3, callbacks=[Step(change)], shuffle=False)]

    fleet = fleet_of(make)
    assert len(lanes(fleet)) == 1
    same(fleet, make, act)


class Interrupt(mf.Callback):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch_end(self, run: Any) -> None:
        if run.epoch == self.epoch:
            raise KeyboardInterrupt


def test_a_resumed_run_is_the_unbroken_run(tmp_path: Path) -> None:
    make = MODELS["Dropout"]
    whole, broken, resumed = (fleet_of(make) for _ in range(3))
    expected = fit(whole, epochs=4)
    with pytest.raises(KeyboardInterrupt):
        fit(broken, epochs=4, callbacks=[mf.Checkpoint(tmp_path), Interrupt(2)])
    history = fit(resumed, epochs=4, callbacks=[mf.Checkpoint(tmp_path), Interrupt(0)])
    for name in whole.names:
        close(history[name], expected[name])
        assert testing.largest_difference(resumed[name], whole[name])[0] < 1e-10


def test_a_saved_fleet_goes_on_as_it_was(tmp_path: Path) -> None:
    make = MODELS["Dropout"]
    fleet = fleet_of(make)
    fit(fleet, epochs=2)
    fleet.save(tmp_path / "saved")
    loaded = mf.load(tmp_path / "saved", factory={f"m{i}": make(i) for i in range(3)})
    fit(fleet)
    fit(loaded)
    assert len(lanes(loaded)) == 1
    for name in fleet.names:
        assert testing.largest_difference(fleet[name], loaded[name])[0] < 1e-10


def smoothed(output: Any, target: Any, *, amount: float, weights: Any) -> Any:
    target = jax.nn.one_hot(target, 3, dtype=jnp.float64) * (1 - amount) + amount / 3
    return -(jax.nn.log_softmax(output) * target * weights).sum(-1)


@pytest.mark.parametrize("each", [True, False])
def test_losses_that_differ_in_a_number_or_an_array_share_a_lane(each: bool) -> None:
    labels = np.argmax(Y, 1)
    losses = {
        f"m{i}": functools.partial(smoothed, amount=0.1 * i, weights=np.array([1.0, 0.5 * i, 2.0]))
        for i in range(3)
    }

    def compiled(names: list[str]) -> mf.Fleet:
        fleet = mf.Fleet({name: net(Net, plain, int(name[1])) for name in names})
        if each:
            fleet.compile("sgd", mf.each({name: losses[name] for name in names}), lr=0.1, momentum=0.9)
        else:
            for name in names:
                fleet.compile("sgd", losses[name], lr=0.1, momentum=0.9, members=[name])
        return fleet

    fleet = compiled(list(losses))
    assert [lane.members for lane in fleet.plan((X, labels), batch_size=8).lanes] == [("m0", "m1", "m2")]
    history = fleet.fit((X, labels), batch_size=8, epochs=2, progress=False)
    for name in losses:
        alone = compiled([name])
        close(history[name], alone.fit((X, labels), batch_size=8, epochs=2, progress=False)[name])
        assert testing.largest_difference(fleet[name], alone[name])[0] < 1e-10


def test_transformations_that_differ_in_a_number_share_a_lane() -> None:
    made = {
        f"m{i}": optax.chain(optax.clip(0.1 * (i + 1)), optax.adam(0.01 * (i + 1), b1=0.8 + 0.05 * i))
        for i in range(3)
    }
    fleet = mf.Fleet({name: net(Net, plain, int(name[1])) for name in made})
    fleet.compile(mf.each(made), "mse")
    assert len(lanes(fleet)) == 1
    fit(fleet, epochs=2)
    for i, name in enumerate(made):
        expected = testing.alone(
            net(Net, plain, i), name, (X, Y), optimizer=made[name], loss="mse", epochs=2, batch_size=8
        )
        assert testing.largest_difference(fleet[name], expected)[0] < 1e-10


@pytest.mark.parametrize("optimizer", [optax.lbfgs(), optax.polyak_sgd(), optax.MultiSteps(optax.adam(0.02), 2)])
def test_optimizers_that_need_the_loss_have_that_of_their_own_member(optimizer: Any) -> None:
    make = MODELS["own attributes"]
    fleet = fleet_of(make, optimizer=optimizer, lr=None)
    assert len(lanes(fleet)) == 1
    same(fleet, make, lambda fleet: [fit(fleet, epochs=2)], optimizer=optimizer, lr=None)
