"""The engine of Keras lanes on JAX."""

from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras import models

from modelfleet.feeds import Batch
from modelfleet.frameworks import keras as adapter
from modelfleet.frameworks.lane_context import alike
from modelfleet.frameworks.stacked import by_path
from modelfleet.members import Member

pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="for Keras on JAX")


def lane(count: int = 2, *, programs: Any = None) -> tuple[Any, list[Member]]:
    import jax

    own = []
    for index in range(count):
        model = models.mlp(seed=index, rate=0.2, norm=True)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01 * (index + 1)), loss, metrics=["accuracy"])
        own.append(Member(str(index), model, index, adapter))
    task = adapter.prepare(None, own, "train").tasks[0]
    return adapter.make_engine(alike(own, task, {}, jax.devices()[0], fused=count > 1, programs=programs)), own


@cache
def compiled() -> Any:
    """The programs of two members, for all tests: steps are compiled once."""
    return lane()[0].programs


def steps(engine: Any, data: Any, *, count: int = 3, together: bool = True) -> None:
    width = len(engine.trouble())
    active = engine.tensor(np.ones(width, dtype=bool))
    if together:
        stacked = tuple(np.stack([leaf] * count) for leaf in data)
        engine.train({}, active, Batch(stacked, True, np.full(width, len(data[0])), count))
        return
    for _ in range(count):
        engine.train({}, active, Batch(data, True, np.full(width, len(data[0]))))


def state(engine: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(tensor) for name, tensor in by_path(engine.read(engine.slots)).items()}


def ready(engine: Any, data: Any) -> None:
    width = len(engine.trouble())
    batch = Batch(data, True, np.full(width, len(data[0])))
    engine.check(batch, "0")
    engine.ready("train", {}, engine.tensor(np.ones(width, dtype=bool)), batch)


def test_several_steps_a_call_are_as_many_calls() -> None:
    data = models.data(8)
    one, _ = lane(programs=compiled())
    many, _ = lane(programs=compiled())
    for engine, together in ((one, False), (many, True)):
        ready(engine, data)
        steps(engine, data, together=together)
    for (name, a), b in zip(state(one).items(), state(many).values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)


def test_fused_and_alone_are_the_same() -> None:
    data = models.data(8)
    fused, _ = lane(programs=compiled())
    alone, _ = lane(1)
    for engine in (fused, alone):
        ready(engine, data)
        steps(engine, data)
    for (name, a), b in zip(state(fused).items(), state(alone).values(), strict=True):
        np.testing.assert_allclose(a[:1], b, rtol=1e-5, atol=1e-6, err_msg=name)


def test_refresh_takes_the_optimizer_too() -> None:
    engine, own = lane(programs=compiled())
    data = models.data(8)
    ready(engine, data)
    steps(engine, data)
    engine.scatter([1], [own[1]])
    own[1].model.optimizer.learning_rate = 0.25
    before = state(engine)
    engine.gather([1], [own[1]])
    for name, tensor in state(engine).items():
        expected = before[name].copy()
        if name.endswith("learning_rate"):
            expected[1] = 0.25
        np.testing.assert_array_equal(tensor, expected, err_msg=name)


def test_a_model_keeps_its_numbers_while_the_lane_steps_on() -> None:
    engine, own = lane(programs=compiled())
    data = models.data(8)
    ready(engine, data)
    steps(engine, data)
    engine.scatter(range(len(own)), own)
    before = [models.numbers(member.model) for member in own]
    steps(engine, data)
    for member, arrays in zip(own, before, strict=True):
        for a, b in zip(models.numbers(member.model), arrays, strict=True):
            np.testing.assert_array_equal(a, b)


def test_programs_are_handed_on() -> None:
    data = models.data(8)
    first, _ = lane(programs=compiled())
    second, _ = lane(programs=compiled())
    assert second.programs is first.programs
    assert lane()[0].programs is not first.programs
    ready(second, data)
    steps(second, data, count=1, together=False)
    assert second.trouble().tolist() == [0, 0]
