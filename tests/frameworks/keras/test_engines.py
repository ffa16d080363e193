"""The shared suite of what every engine must hold, for Keras: fused on this process's backend, and plain."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest

from modelfleet.frameworks import keras as adapter
from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.lane_context import alike
from modelfleet.members import Member
from modelfleet.testing import engines

layers = keras.layers


def model(seed: int, *, plain: bool) -> keras.Model:
    keras.utils.set_random_seed(seed)
    made = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(6, use_bias=False),  # before BatchNormalization its gradient would be rounding
            layers.BatchNormalization(),
            layers.Activation("tanh"),
            layers.Dense(2, trainable=False),
            layers.Dense(2),
        ]
    )
    made.compile(keras.optimizers.Adam(0.1 / (seed + 1)), "mse", metrics=["mae"], run_eagerly=plain)
    return made


def weights(model: keras.Model) -> dict[str, np.ndarray]:
    found = enumerate(model.variables)  # not by path: Keras numbers the layers of a process
    return {f"{row} {variable.name}": np.array(keras.ops.convert_to_numpy(variable)) for row, variable in found}


def batch(slots: Sequence[int]) -> Any:
    pairs = (np.random.default_rng(seed).normal(size=(3, 5, size)) for seed, size in ((0, 4), (1, 2)))
    arrays = tuple(array[list(slots)].astype(np.float32) for array in pairs)
    if keras.backend.backend() != "torch":
        return arrays
    import torch

    return tuple(torch.from_numpy(array) for array in arrays)


def case(*, plain: bool) -> engines.Case:
    width = 1 if plain else engines.WIDTH
    known: dict[str, Any] = {}

    def members() -> Sequence[Member]:
        return [Member(str(seed), model(seed, plain=plain), seed, adapter) for seed in range(width)]

    def engine(members: Sequence[Member]) -> Engine:
        task = adapter.prepare(None, members, "train").tasks[0]
        (device,) = adapter.choose(None)[:1]
        programs = known.get("programs")
        context = alike(members, task, {}, adapter.native(device), fused=not plain, programs=programs)
        made = adapter.make_engine(context)
        known.update(programs=made.programs, task=task)  # traced once, as lanes hand them on
        return made

    return engines.Case(members, engine, batch, weights, width=width)


CASES = {"fused": case(plain=False), "plain": case(plain=True)}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("check", engines.CHECKS)
def test_engine(kind: str, check: engines.Check) -> None:
    case = CASES[kind]
    if case.width == 1 and check in engines.OF_SEVERAL:
        pytest.skip("it takes one member")
    check(case)
