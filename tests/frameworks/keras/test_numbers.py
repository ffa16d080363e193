"""Keras members that differ only in numbers share a lane, and are what Keras's own `fit` makes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import modelfleet as mf

layers, losses = keras.layers, keras.losses
BACKEND = keras.backend.backend()
not_on_jax = pytest.mark.skipif(BACKEND == "jax", reason="there they are tried one by one")
on_jax = pytest.mark.skipif(
    BACKEND != "jax", reason="elsewhere, where tracing takes longer, they are tried together"
)

X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32).astype(np.float64)  # feeds round to float32
Y = np.eye(3)[np.random.default_rng(1).integers(0, 3, size=24)]


def exact() -> AbstractContextManager[object]:
    if BACKEND != "jax":
        return nullcontext()
    import jax

    return jax.enable_x64(True)


@pytest.fixture
def double() -> Iterator[None]:
    kinds = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    with exact():
        yield
    keras.config.set_floatx(kinds[0])
    keras.config.set_dtype_policy(kinds[1])


def model(
    seed: int, *between: Any, loss: Any = None, optimizer: Any = None, metric: Any = "accuracy", **options: Any
) -> keras.Model:
    first, second = (keras.initializers.GlorotUniform(seed=2 * seed + number) for number in (1, 2))
    parts = [layers.Dense(6, "softplus", kernel_initializer=first), *between]
    made = keras.Sequential([keras.Input((4,)), *parts, layers.Dense(3, kernel_initializer=second, **options)])
    made.compile(
        optimizer or keras.optimizers.Adam(0.02),
        loss or losses.CategoricalCrossentropy(from_logits=True),
        metrics=[metric],
    )
    return made


class Scaled(keras.layers.Layer):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def call(self, x: Any) -> Any:
        return keras.ops.relu(x * self.factor - 0.1) + self.factor * x


def smoothing(amount: float) -> Any:
    return losses.CategoricalCrossentropy(from_logits=True, label_smoothing=amount)


def focal(gamma: float) -> Any:
    weights = np.array([1.0, gamma, 0.5]) if BACKEND != "torch" else gamma

    def loss(target: Any, output: Any) -> Any:
        chances = keras.ops.softmax(output)
        return -keras.ops.sum(weights * target * (1 - chances) ** gamma * keras.ops.log(chances), -1)

    return loss


# A member by its seed. Each has other numbers.
MODELS: dict[str, Callable[[int], keras.Model]] = {
    "Dropout": lambda i: model(i, layers.Dropout(0.2 * (i + 1), seed=i)),
    "SpatialDropout": lambda i: model(
        i, layers.Reshape((2, 3)), layers.SpatialDropout1D(0.2 * (i + 1), seed=i), layers.Flatten()
    ),
    "GaussianNoise": lambda i: model(i, layers.GaussianNoise(0.1 * (i + 1), seed=i)),
    "GaussianDropout": lambda i: model(i, layers.GaussianDropout(0.2 * (i + 1), seed=i)),
    "AlphaDropout": lambda i: model(i, layers.AlphaDropout(0.2 * (i + 1), seed=i)),
    "LeakyReLU": lambda i: model(i, layers.LeakyReLU(0.1 * (i + 1))),
    "ELU": lambda i: model(i, layers.ELU(0.4 * (i + 1))),
    "Rescaling": lambda i: model(i, layers.Rescaling(0.5 * (i + 1), offset=0.1 * i)),
    "own layer": lambda i: model(i, Scaled(1.0 + i)),
    "UnitNormalization of noise": lambda i: model(
        i, layers.GaussianNoise(0.5 / (i + 1), seed=i), layers.UnitNormalization()
    ),
    "regularizers": lambda i: model(
        i,
        # On torch, Keras adds to a constant in place, which can't be fused.
        *([] if BACKEND == "torch" else [layers.ActivityRegularization(l2=0.1 * (i + 1))]),
        kernel_regularizer=keras.regularizers.L2(0.1 / (i + 1)),
    ),
    "constraints": lambda i: model(i, kernel_constraint=keras.constraints.MaxNorm(0.3 * (i + 1))),
    "metrics": lambda i: model(i, metric=keras.metrics.BinaryAccuracy(threshold=0.2 * i - 0.1)),
    "label smoothing": lambda i: model(i, loss=smoothing(0.1 * (i + 1))),
    "own loss": lambda i: model(i, loss=focal(1.5 + i)),
    "optimizer": lambda i: model(
        i, optimizer=keras.optimizers.AdamW(0.01 * (i + 1), beta_1=0.8 + 0.05 * i, global_clipnorm=0.1 * (i + 1))
    ),
}
# Keras computes these in float32, also in models of float64 (and `ops.tanh` and `ops.sin`, too).
ROUNDED: dict[str, Callable[[int], keras.Model]] = {
    "BatchNormalization": lambda i: model(
        i, layers.BatchNormalization(momentum=0.5 + 0.1 * i, epsilon=10.0 ** -(i + 1))
    ),
    "LayerNormalization": lambda i: model(i, layers.LayerNormalization(epsilon=10.0 ** -(i + 1))),
}


def fleet_of(make: Callable[[int], keras.Model], count: int = 3) -> mf.Fleet:
    return mf.Fleet({f"m{i}": make(i) for i in range(count)})


def lanes(fleet: mf.Fleet) -> list[tuple[str, ...]]:
    return [lane.members for lane in fleet.plan((X, Y), batch_size=8).lanes]


def fit(fleet: mf.Fleet, **options: Any) -> mf.History:
    return fleet.fit((X, Y), batch_size=8, shuffle=False, progress=False, **options)


def close(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def plain(make: Callable[[int], keras.Model], i: int) -> keras.Model:
    """A model for Keras's own `fit`: untraced, where Keras takes longer to trace than for these few steps."""
    found = make(i)
    found.run_eagerly = BACKEND != "jax"
    return found


def trained(fleet: mf.Fleet) -> tuple[mf.History, dict[str, Any], dict[str, Any]]:
    history = fit(fleet, epochs=2, validation=(X[:10], Y[:10]))
    return history, fleet.predict(X, batch_size=8), fleet.evaluate((X, Y), batch_size=8)


def as_keras(make: Callable[[int], keras.Model], tolerance: float, count: int = 3) -> None:
    fleet = fleet_of(make, count)
    assert lanes(fleet) == [("m0", "m1", "m2")[:count]]
    history, outputs, values = trained(fleet)
    for i, name in enumerate(fleet.names):
        alone = plain(make, i)
        options: Any = {"batch_size": 8, "verbose": 0}
        logs = alone.fit(X, Y, validation_data=(X[:10], Y[:10]), shuffle=False, epochs=2, **options).history
        close(fleet[name].get_weights(), alone.get_weights(), tolerance)
        # Keras's means are sums in float32.
        close([history[name][key] for key in logs], list(logs.values()), 1e-6)
        close([outputs[name]], [alone.predict(X, **options)], 10 * tolerance)
        assert values[name]["loss"] == pytest.approx(
            alone.evaluate(X, Y, return_dict=True, **options)["loss"], rel=1e-6
        )
        assert abs(alone.get_weights()[0] - make(i).get_weights()[0]).max() > 1e-3


@on_jax
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", MODELS)
def test_members_that_differ_in_a_number_share_a_lane_and_are_as_alone(name: str) -> None:
    as_keras(MODELS[name], 1e-10)


@on_jax
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ROUNDED)
def test_norms_that_differ_in_a_number_share_a_lane_and_are_as_alone(name: str) -> None:
    as_keras(ROUNDED[name], 2e-6)


def all_at_once(i: int, *between: Any) -> keras.Model:
    metric = keras.metrics.BinaryAccuracy(threshold=0.2 * i - 0.1)
    optimizer = keras.optimizers.AdamW(0.01 * (i + 1), beta_1=0.8 + 0.05 * i, clipnorm=0.1 * (i + 1))
    return model(
        i,
        layers.LeakyReLU(0.1 * (i + 1)),
        layers.ELU(0.4 * (i + 1)),
        Scaled(1.0 + i),
        layers.Rescaling(0.5 * (i + 1), offset=0.1 * i),
        layers.UnitNormalization(),
        *between,
        loss=smoothing(0.1 * (i + 1)),
        optimizer=optimizer,
        metric=metric,
        kernel_regularizer=keras.regularizers.L2(0.1 / (i + 1)),
        kernel_constraint=keras.constraints.MaxNorm(0.3 * (i + 1)),
    )


def with_norms(i: int) -> keras.Model:
    epsilon = 10.0 ** -(i + 1)
    return all_at_once(
        i,
        layers.BatchNormalization(momentum=0.5 + 0.1 * i, epsilon=epsilon),
        layers.LayerNormalization(epsilon=epsilon),
        layers.GroupNormalization(2, epsilon=epsilon),
        layers.RMSNormalization(epsilon=epsilon),
    )


def with_draws(i: int) -> keras.Model:
    return all_at_once(
        i,
        layers.Dropout(0.2 * (i + 1), seed=i),
        layers.GaussianNoise(0.1 * (i + 1), seed=i),
        layers.GaussianDropout(0.2 * (i + 1), seed=i),
        layers.AlphaDropout(0.2 * (i + 1), seed=i),
    )


@not_on_jax
@pytest.mark.usefixtures("double")
def test_members_that_differ_in_every_number_share_a_lane_and_are_as_alone() -> None:
    # On torch, a lane of one differs from Keras's `fit` by as much, in columns that a constraint scales.
    as_keras(all_at_once, 1e-8 if BACKEND == "torch" else 1e-10, count=2)


# On torch, Keras draws other numbers. Its norms round to float32: in another order with a number per member.
@not_on_jax
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("make", "tolerance"), [(with_draws, 1e-10), (with_norms, 2e-6 if BACKEND == "torch" else 1e-10)]
)
def test_members_have_the_draws_and_norms_of_a_fleet_of_one(
    make: Callable[[int], keras.Model], tolerance: float
) -> None:
    fleet = fleet_of(make, 2)
    assert lanes(fleet) == [("m0", "m1")]
    history, outputs, values = trained(fleet)
    for i, name in enumerate(fleet.names):
        alone = mf.Fleet({name: make(i)})
        own, own_outputs, own_values = trained(alone)
        close(fleet[name].get_weights(), alone[name].get_weights(), tolerance)
        close(list(history[name].values()), list(own[name].values()), tolerance)
        close([outputs[name]], [own_outputs[name]], tolerance)
        assert values[name] == pytest.approx(own_values[name], rel=tolerance)


@on_jax
@pytest.mark.parametrize("weighted", [False, True])
def test_padded_rows_of_64_bits_are_not_rounded(double: None, weighted: bool) -> None:
    lengths = {"a": 23, "b": 13, "c": 9}  # short batches are padded, and their losses divided by their own rows
    data = {name: (X[:length], Y[:length]) for name, length in lengths.items()}
    weights = {name: np.linspace(0.1, 1.9, length) for name, length in lengths.items()}
    models = {name: model(number) for number, name in enumerate(lengths)}
    others = {name: model(number) for number, name in enumerate(lengths)}
    given: dict[str, Any] = {"sample_weight": mf.each(weights)} if weighted else {}
    options: dict[str, Any] = {"epochs": 2, "batch_size": 8, "shuffle": False}
    mf.Fleet(models).fit(mf.each(data), progress=False, strategy="fused", **options, **given)
    for name, other in others.items():
        other.fit(*data[name], sample_weight=weights[name] if weighted else None, verbose=0, **options)
        for own, wanted in zip(models[name].get_weights(), other.get_weights(), strict=True):
            np.testing.assert_allclose(own, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("double")
def test_members_that_branch_on_their_number_have_a_lane_of_their_own() -> None:
    rates = [0.5, 0.0, 0.25, 0]

    def make(i: int) -> keras.Model:
        return model(i, layers.Dropout(rates[i], seed=i) if rates[i] else layers.Dropout(rates[i]))

    fleet = fleet_of(make, 4)
    plan = fleet.plan((X, Y), batch_size=8)
    assert [lane.members for lane in plan.lanes] == [("m0", "m2"), ("m1", "m3")]
    fit(fleet, epochs=2)
    for i, name in enumerate(fleet.names):
        alone = mf.Fleet({name: make(i)})
        fit(alone, epochs=2)
        close(fleet[name].get_weights(), alone[name].get_weights())


# A member's numbers and optimizer by its seed.
MIXED: list[Callable[[], keras.Optimizer]] = [
    lambda: keras.optimizers.Adam(0.02),
    lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    lambda: keras.optimizers.Adam(0.01, beta_1=0.8),
    lambda: keras.optimizers.SGD(0.1),
    lambda: keras.optimizers.SGD(0.05, momentum=0.8),
]


@pytest.mark.usefixtures("double")
def test_members_that_differ_in_numbers_and_optimizers_share_a_lane_and_are_as_alone(tmp_path: Path) -> None:
    def make(i: int) -> keras.Model:
        constraint = keras.constraints.MaxNorm(0.3 * (i + 1))
        return model(
            i,
            # On torch, Keras's own draws are others than a fleet's.
            layers.LeakyReLU(0.1 * (i + 1)) if BACKEND == "torch" else layers.Dropout(0.1 * (i + 1), seed=i),
            loss=smoothing(0.1 * (i % 2 + 1)),
            optimizer=MIXED[i](),
            kernel_constraint=constraint,
        )

    tolerance = 1e-7 if BACKEND == "torch" else 1e-10  # see above
    fleet, alone = fleet_of(make, 5), [plain(make, i) for i in range(5)]
    (lane,) = lanes(fleet)
    assert set(lane) == set(fleet.names)
    # Until one optimizer is left, then one member. Each time, other programs are traced.
    for epochs in ([2] * 5, [1, 3, 1, 1, 2], [1, 1, 2, 1, 1])[: 2 if BACKEND == "tensorflow" else 3]:
        own = mf.each(dict(zip(fleet.names, epochs, strict=True)))
        history = fit(fleet, epochs=own, strategy="fused")
        outputs, values = fleet.predict(X, batch_size=8), fleet.evaluate((X, Y), batch_size=8)
        options: Any = {"batch_size": 8, "verbose": 0}
        for name, single, count in zip(fleet.names, alone, epochs, strict=True):
            logs = single.fit(X, Y, shuffle=False, epochs=count, **options).history
            close(fleet[name].get_weights(), single.get_weights(), tolerance)
            state, expected = (
                [np.array(keras.ops.convert_to_numpy(v.value)) for v in own.optimizer.variables]
                for own in (fleet[name], single)
            )
            close(state, expected, tolerance)
            close([history[name][key] for key in logs], list(logs.values()), 1e-6)
            close([outputs[name]], [single.predict(X, **options)], 10 * tolerance)
            loss = single.evaluate(X, Y, return_dict=True, **options)["loss"]
            assert values[name]["loss"] == pytest.approx(loss, rel=1e-6)
    assert len(fleet._lanes) == 1
    fleet.save(tmp_path)
    loaded = mf.load(tmp_path, factory={f"m{i}": make(i) for i in range(5)})
    fit(fleet)
    fit(loaded)
    for name in fleet.names:
        close(loaded[name].get_weights(), fleet[name].get_weights())


@pytest.mark.usefixtures("double")
def test_a_second_fit_a_shorter_one_and_changed_numbers_are_as_alone() -> None:
    make = MODELS["Dropout"]

    def act(fleet: mf.Fleet) -> list[Any]:
        first = fit(fleet, epochs=2)
        epochs = {"m0": 1, "m1": 3, "m2": 1}
        second = fit(fleet, epochs=mf.each({name: epochs[name] for name in fleet.names}))
        for name in fleet.names:
            own: Any = fleet[name]
            own.layers[1].rate = 0.1 + own.layers[1].rate / 2
        return [first, second, fit(fleet, epochs=2)]

    fleet = fleet_of(make)
    found = act(fleet)
    assert len(lanes(fleet)) == 1
    for i, name in enumerate(fleet.names):
        alone = mf.Fleet({name: make(i)})
        for history, expected in zip(found, act(alone), strict=True):
            close(list(history[name].values()), list(expected[name].values()))
        close(fleet[name].get_weights(), alone[name].get_weights())


class Interrupt(mf.Callback):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch_end(self, run: Any) -> None:
        if run.epoch == self.epoch:
            raise KeyboardInterrupt


@pytest.mark.usefixtures("double")
def test_a_resumed_run_and_a_saved_fleet_go_on_as_they_were(tmp_path: Path) -> None:
    make = MODELS["Dropout"]
    whole, broken, resumed = (fleet_of(make) for _ in range(3))
    fit(whole, epochs=4)
    with pytest.raises(KeyboardInterrupt):
        fit(broken, epochs=4, callbacks=[mf.Checkpoint(tmp_path / "run"), Interrupt(2)])
    fit(resumed, epochs=4, callbacks=[mf.Checkpoint(tmp_path / "run"), Interrupt(0)])
    whole.save(tmp_path / "saved")
    loaded = mf.load(tmp_path / "saved", factory={f"m{i}": make(i) for i in range(3)})
    for name in whole.names:
        close(resumed[name].get_weights(), whole[name].get_weights())
    fit(whole)
    fit(loaded)
    for name in whole.names:
        close(loaded[name].get_weights(), whole[name].get_weights())
