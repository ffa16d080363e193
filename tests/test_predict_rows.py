"""Predicting for some members of a lane on rows of their own: as each alone, and traced for few sizes only."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import modelfleet as mf
from modelfleet.errors import InputError
from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.predict_rows import bucket
from modelfleet.frameworks.torch.compiling.compiler import Compiler
from modelfleet.lanes import Lane

NAMES = ["a", "b", "c", "d"]


class Softened(nn.Module):
    """A model whose rows feel each other: outputs are centred over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x)
        return found - found.mean(0)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def lane(make: Callable[[], nn.Module], names: list[str] = NAMES) -> Lane:
    models = {}
    for seed, name in enumerate(names):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            models[name] = make()
    return lane_of(mf.Fleet(models))


def lane_of(fleet: mf.Fleet) -> Lane:
    fleet.predict(np.zeros((4, 4), np.float32), batch_size=4)
    lanes = fleet._live_lanes.lanes
    assert lanes is not None
    (found,) = lanes
    return found


def rows(counts: dict[str, int]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.normal(size=(count, 4)).astype(np.float32) for name, count in counts.items()}


def alone(lane: Lane, name: str, x: np.ndarray) -> np.ndarray:
    model = lane.members[lane.positions[name]].model.eval()
    with torch.no_grad():
        return model(torch.from_numpy(x)).numpy()


COUNTS = [{"c": 3, "a": 5}, {"a": 1}, {"d": 2, "b": 2, "a": 7}, {"b": 4, "c": 4}]


@pytest.mark.parametrize("make", [net, Softened])
def test_members_predict_as_alone(make: Callable[[], nn.Module]) -> None:
    found = lane(make)
    for counts in COUNTS:
        given = rows(counts)
        outputs = found.predict_rows(given)
        assert list(outputs) == list(counts)
        for name, x in given.items():
            np.testing.assert_allclose(outputs[name], alone(found, name, x), rtol=1e-5, atol=1e-6)


def test_a_plain_member_predicts_as_alone() -> None:
    found = lane(net, ["only"])
    given = rows({"only": 3})
    np.testing.assert_allclose(found.predict_rows(given)["only"], alone(found, "only", given["only"]), rtol=1e-5)


def test_members_that_rest_predict_too() -> None:
    found = lane(net)
    given = rows({"b": 3, "c": 2})
    expected = found.predict_rows(given)
    found.give_slots(["c", "a"])
    for name, outputs in found.predict_rows(given).items():
        np.testing.assert_allclose(outputs, expected[name], rtol=1e-6)
    found.give_slots(found.names)


def test_no_size_within_a_bucket_is_traced_again() -> None:
    found = lane(net)
    found.predict_rows(rows({"a": 8, "b": 5, "c": 7}))
    traced = found.engine.programs.traces
    for counts in ({"d": 6, "a": 8, "b": 5, "c": 7}, {"b": 5, "d": 7, "a": 6}):
        found.predict_rows(rows(counts))
    assert found.engine.programs.traces == traced
    found.predict_rows(rows({"a": 9, "b": 5, "c": 7}))
    assert found.engine.programs.traces == traced + 1


def test_each_call_to_predict_asks_if_compiling_pays_for_as_many_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, float]] = []
    monkeypatch.setattr(Compiler, "consider", lambda self, calls, seconds: asked.append((calls, seconds)))
    found = lane(net)
    asked.clear()
    for _ in range(3):
        found.predict_rows(rows({"a": 2, "b": 1}))
    assert [calls for calls, _ in asked] == [1, 2, 3]
    assert all(seconds > 0 for _, seconds in asked)


def test_members_without_rows_of_their_own_stay_as_they_are() -> None:
    class Counting(nn.Module):
        """A model that counts its calls in evaluation mode, too: its members predict one after the other."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.calls: torch.Tensor
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.layer(x)

    fleet = mf.Fleet({name: Counting() for name in NAMES})
    fleet.compile("sgd", "mse", lr=0.1)
    fleet.fit((np.zeros((4, 4), np.float32), np.zeros((4, 2), np.float32)), strategy="fused", progress=False)
    assert fleet._lanes is not None
    (found,) = fleet._lanes
    before = found.read(NAMES, ("buffers",))["buffers"]["calls"]
    x = torch.randn(4, 2, 4)
    found.engine.predict(Batch(x, False, np.array([2, 0, 2, 0])))
    found.engine.predict(Batch(x[:2], False, np.array([2, 0])), [3, 1])
    after = found.read(NAMES, ("buffers",))["buffers"]["calls"]
    assert (after - before).tolist() == [1, 0, 1, 1]


def test_jax_members_predict_as_alone_and_no_size_within_a_bucket_is_traced_again() -> None:
    def apply(params: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ params["w"])

    def pair(seed: int) -> Any:
        return {"w": jnp.asarray(np.random.default_rng(seed).normal(size=(4, 2)), jnp.float32)}, apply

    found = lane_of(mf.Fleet({name: pair(seed) for seed, name in enumerate(NAMES)}))
    found.predict_rows(rows({"a": 8, "b": 5, "c": 7}))
    program: Any = found.engine.programs._functions("predict", False)[0]
    traced = program._cache_size()
    for counts in ({"d": 6, "a": 8, "b": 5, "c": 7}, {"b": 5, "d": 7, "a": 6}):
        given = rows(counts)
        for name, outputs in found.predict_rows(given).items():
            params, _ = found.members[found.positions[name]].model
            np.testing.assert_allclose(outputs, np.tanh(given[name] @ params["w"]), rtol=1e-5, atol=1e-6)
    assert program._cache_size() == traced
    found.predict_rows(rows({"a": 9}))
    assert program._cache_size() == traced + 1


def test_a_member_without_rows_is_named() -> None:
    with pytest.raises(InputError, match="member 'b': its arrays have \\[0\\] rows"):
        lane(net).predict_rows(rows({"a": 2, "b": 0}))


def test_buckets_are_powers_of_two() -> None:
    assert [bucket(count) for count in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
