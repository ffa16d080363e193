"""evaluate and predict of some members, and by every strategy: the same numbers, or a reason why not."""

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import modelfleet as mf
from modelfleet.errors import InputError, StrategyError
from modelfleet.fleet import Fleet
from modelfleet.types import Strategy

X = np.random.default_rng(0).normal(size=(70, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 70)
STRATEGIES: list[Strategy] = ["auto", "interleaved", "threads", "processes"]


class Noisy(nn.Module):
    """A model that draws random numbers when it predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.5, training=True)


class Counting(nn.Module):
    """A model that counts its calls."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.calls: Any = 0
        if buffer:
            del self.calls
            self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.layer(x)


def mlp(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 3))


def torch_fleet() -> mf.Fleet:
    torch.manual_seed(0)
    fleet = mf.Fleet({"a": mlp(), "b": mlp(), "wide": mlp(12), "noisy": Noisy()})
    fleet.compile("adam", "cross_entropy", lr=0.01, metrics=["accuracy"])
    fleet.fit((X, Y), epochs=2, progress=False)
    return fleet


def apply(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["w"]) @ params["v"]


def jax_fleet() -> mf.Fleet:
    def pair(seed: int, width: int) -> Any:
        random = np.random.default_rng(seed)
        weights = {"w": random.normal(size=(4, width)), "v": random.normal(size=(width, 3))}
        return {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}, apply

    fleet = mf.Fleet({"a": pair(0, 5), "b": pair(1, 5), "wide": pair(2, 6)})
    fleet.compile("adam", "cross_entropy", lr=0.01, metrics=["accuracy"])
    fleet.fit((X, Y), epochs=2, progress=False)
    return fleet


@functools.cache
def fleet_and_answers(kind: str) -> tuple[mf.Fleet, dict[str, Any], dict[str, Any]]:
    fleet = {"torch": torch_fleet, "jax": jax_fleet}[kind]()
    return fleet, fleet.predict(X), fleet.evaluate((X, Y))


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, own in expected.items():
        if isinstance(own, dict):
            assert found[name] == pytest.approx(own, rel=1e-5)
        else:
            np.testing.assert_allclose(found[name], own, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_every_strategy_gives_the_same_numbers(kind: str, strategy: Strategy) -> None:
    fleet, outputs, values = fleet_and_answers(kind)
    for _ in range(2):
        check(fleet.predict(X, strategy=strategy), outputs)
        check(fleet.evaluate((X, Y), strategy=strategy), values)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_some_members_answer_as_they_do_among_all(kind: str, strategy: Strategy) -> None:
    fleet, outputs, values = fleet_and_answers(kind)
    chosen = ["wide", "a"]
    expected = {name: outputs[name] for name in chosen}
    check(fleet.predict(X, strategy=strategy, members=chosen), expected)
    check(fleet.evaluate((X, Y), strategy=strategy, members=chosen), {name: values[name] for name in chosen})
    for given in (dict.fromkeys(chosen, X), dict.fromkeys(fleet, X)):
        check(fleet.predict(mf.each(given), strategy=strategy, members=chosen), expected)


def test_some_members_can_be_fused() -> None:
    fleet, outputs, _ = fleet_and_answers("torch")
    check(fleet.predict(X, strategy="fused", members=["b", "a"]), {name: outputs[name] for name in "ba"})
    with pytest.raises(StrategyError, match="'noisy' differs from 'a'"):
        fleet.predict(X, strategy="fused")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_changes_of_a_model_are_seen(strategy: Strategy) -> None:
    fleet = torch_fleet()
    for members in (None, ["a", "b"]):
        fleet.predict(X, strategy=strategy, members=members)
        with torch.no_grad():
            next(fleet["a"].parameters()).mul_(-2.0)
        found = fleet.predict(X, strategy=strategy, members=members)["a"]
        model = fleet["a"].eval()
        np.testing.assert_allclose(found, model(torch.from_numpy(X)).detach().numpy(), rtol=1e-4, atol=1e-5)
        model.train()


@pytest.mark.parametrize("strategy", ["interleaved", "processes"])
def test_after_more_training_the_answers_are_those_of_now(strategy: Strategy) -> None:
    fleet = torch_fleet()
    fleet.predict(X, strategy=strategy, members=["noisy"])
    fleet.fit((X, Y), epochs=1, progress=False)
    expected = fleet.predict(X)
    check(fleet.predict(X, strategy=strategy, members=["noisy"]), {"noisy": expected["noisy"]})


def test_a_call_for_some_members_leaves_the_training_alone() -> None:
    fleet, other = torch_fleet(), torch_fleet()
    fleet.predict(X, members=["a"])
    fleet.evaluate((X, Y), strategy="threads")
    for one in (fleet, other):
        one.fit((X, Y), epochs=1, progress=False)
    for name in fleet:
        for ours, theirs in zip(fleet[name].parameters(), other[name].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["auto", "interleaved", "processes"])
def test_loaders_are_read_by_every_strategy(strategy: Strategy) -> None:
    fleet, outputs, values = fleet_and_answers("torch")
    loader = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=70)
    quiet = [name for name in fleet if name != "noisy"]
    check(fleet.evaluate(loader, strategy=strategy, members=quiet), {name: values[name] for name in quiet})
    own = mf.each({name: [(X, Y)] for name in quiet})
    check(fleet.predict(own, strategy=strategy, members=quiet), {name: outputs[name] for name in quiet})


def test_threads_refuse_one_loader_and_shared_modules() -> None:
    fleet, *_ = fleet_and_answers("torch")
    with pytest.raises(StrategyError, match="all members read one loader"):
        fleet.predict([(X, Y)], strategy="threads")
    trunk = nn.Linear(4, 4)
    shared = mf.Fleet({"a": nn.Sequential(trunk, nn.Linear(4, 2)), "b": nn.Sequential(trunk, nn.Linear(4, 2))})
    with pytest.raises(StrategyError, match="members 'a' and 'b' hold the same module"):
        shared.predict(X, strategy="threads")


@pytest.mark.parametrize("buffer", [False, True])
def test_processes_refuse_models_that_change_when_they_are_called(buffer: bool) -> None:
    fleet = mf.Fleet([Counting(buffer), Counting(buffer)])
    with pytest.raises(StrategyError, match="member '0' changes when it is called"):
        fleet.predict(X, strategy="processes")
    fleet.predict(X, strategy="interleaved")
    assert int(fleet["0"].calls) > 0


class Locked(nn.Module):
    """A model that can't be sent to another process."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.file = open(os.devnull)  # noqa: SIM115

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_what_can_not_be_sent_is_named() -> None:
    fleet = mf.Fleet([Locked()])
    with pytest.raises(StrategyError, match="strategy=\"processes\" is not possible: members '0'"):
        fleet.predict(X, strategy="processes")
    fleet["0"].file.close()


def test_errors_in_a_worker_are_the_user_s_own() -> None:
    fleet, *_ = fleet_and_answers("torch")
    for strategy in STRATEGIES:
        with pytest.raises(InputError, match="member 'a' can't take this batch"):
            fleet.predict(X[:, :3], strategy=strategy, members=["a"])


class Deadly(nn.Module):
    """A model that kills the process that runs it, unless it is the one that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.home = os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)


def test_a_model_that_kills_its_workers_is_given_up() -> None:
    with pytest.raises(StrategyError, match="a worker process has died again and again"):
        mf.Fleet([Deadly()]).predict(X, strategy="processes")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"members": "a"}, r"expected a list of names. Give members=\['a'\]"),
        ({"members": []}, "members is empty"),
        ({"members": ["a", "a"]}, "members has 'a' twice"),
        ({"members": ["c"]}, "no member 'c'|member 'c'"),
        ({"strategy": "proceses"}, "processes"),
        ({"members": ["a"], "strategy": "data_parallel"}, "is for fit"),
    ],
)
@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_wrong_arguments_are_explained(verb: str, arguments: dict[str, Any], message: str) -> None:
    fleet, *_ = fleet_and_answers("torch")
    with pytest.raises((InputError, StrategyError), match=message):
        getattr(fleet, verb)((X, Y), **arguments)


def test_a_callback_may_ask_for_some_members_and_a_strategy() -> None:
    found: list[dict[str, Any]] = []

    class Asking(mf.Callback):
        def on_epoch_end(self, run: Any, *args: Any) -> None:
            fleet: Fleet = run.fleet
            found.append(fleet.predict(X, members=["a"], strategy="interleaved"))
            found.append(fleet.predict(X))

    fleet = torch_fleet()
    fleet.fit((X, Y), epochs=2, progress=False, callbacks=[Asking()])
    for some, whole in zip(found[::2], found[1::2], strict=True):
        np.testing.assert_allclose(some["a"], whole["a"], rtol=1e-4, atol=1e-6)
    assert not np.allclose(found[0]["a"], found[2]["a"])


def test_a_gpu_less_machine_uses_several_logical_devices() -> None:
    torch.manual_seed(0)
    models = [mlp() for _ in range(3)]
    fleet = mf.Fleet(models, devices="cpu:0,cpu:1")
    expected = fleet.predict(X)
    calls: list[Callable[[], dict[str, Any]]] = [
        functools.partial(fleet.predict, X, strategy="threads"),
        functools.partial(fleet.predict, X, strategy="processes"),
    ]
    for call in calls:
        check(call(), expected)
