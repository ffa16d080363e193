"""One loader for all members is read once, however many lanes there are: it shuffles alike for everyone."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from tests.helpers import close, equal, mlp, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import modelfleet as mf
from modelfleet.types import Strategy


def _loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 4, generator=generator)
    return DataLoader(
        TensorDataset(x, torch.randint(0, 3, (40,), generator=generator)), batch_size=8, shuffle=True
    )


def _trained(widths: dict[str, int]) -> mf.Fleet:
    torch.manual_seed(0)
    models = {name: mlp(width) for name, width in widths.items()}
    fleet = mf.Fleet(models)
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    torch.manual_seed(1)
    loader = _loader()
    fleet.plan(loader)  # a look that takes nothing from the generator
    fleet.fit(loader, epochs=3, progress=False)
    return fleet


def test_a_shuffling_loader_gives_a_member_the_same_batches_beside_members_of_another_structure() -> None:
    alone = _trained({"a": 6})
    beside = _trained({"a": 6, "b": 9})
    assert close(weights(alone["a"]), _plain(_members({"a": 6})["a"], 3, validate=False)[0])
    assert len(beside.plan().lanes) == 2
    assert equal(weights(alone["a"]), weights(beside["a"]))


def test_every_batch_is_read_once_for_all_lanes() -> None:
    read = []

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(4):
            read.append(number)
            yield torch.randn(8, 4), torch.randint(0, 3, (8,))

    fleet = mf.Fleet({"a": mlp(6), "b": mlp(9), "c": mlp(5)})
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    history = fleet.fit(batches, epochs=2, progress=False)
    assert read == [0, 1, 2, 3] * 2
    assert history.epochs == 2


def _plain(model: nn.Module, epochs: int, *, validate: bool = True) -> tuple[dict[str, torch.Tensor], list[float]]:
    """A plain loop over a shuffling loader, with another one to validate on; the weights, and the losses."""
    torch.manual_seed(1)
    loader, validation = _loader(), _loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if not validate:
            continue
        with torch.no_grad():
            found = [nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in validation]
        losses.append(float(sum(found)) / 40)
    return weights(model), losses


def _members(widths: dict[str, int]) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {name: mlp(width) for name, width in widths.items()}


def _jax_member() -> Any:
    """A JAX model of the same form as `mlp(6)`."""
    model = _members({"a": 6})["a"]
    names = {"w0": "0.weight", "b0": "0.bias", "w1": "2.weight", "b1": "2.bias"}
    params = {key: jnp.asarray(model.state_dict()[name].numpy()) for key, name in names.items()}
    return params, _apply


def _apply(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w0"].T + params["b0"]) @ params["w1"].T + params["b1"]


@pytest.mark.parametrize("strategy", ["auto", "interleaved", "threads", "processes"])
def test_members_of_all_lanes_see_the_batches_they_would_see_alone(strategy: Strategy) -> None:
    widths = {"a": 6, "b": 9, "c": 6}
    fleet = mf.Fleet(_members(widths))
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    torch.manual_seed(1)
    loader, validation = _loader(), _loader()
    history = fleet.fit(loader, validation=validation, epochs=3, strategy=strategy, progress=False)
    for name, model in _members(widths).items():
        expected, losses = _plain(model, 3)
        assert close(weights(fleet[name]), expected), name
        assert history[name]["val_loss"] == pytest.approx(losses, rel=1e-4)


def test_members_of_several_frameworks_see_the_batches_they_would_see_alone() -> None:
    fleet = mf.Fleet({**_members({"a": 6, "b": 9}), "j": _jax_member()})
    fleet.compile("sgd", "cross_entropy", lr=0.1, members=["a", "b"])
    fleet.compile(optax.sgd(0.1), "cross_entropy", members=["j"])
    torch.manual_seed(1)
    loader, validation = _loader(), _loader()
    history = fleet.fit(loader, validation=validation, epochs=3, progress=False)
    expected, losses = _plain(_members({"a": 6})["a"], 3)
    assert close(weights(fleet["a"]), expected)
    assert np.allclose(fleet["j"][0]["w1"], expected["2.weight"], atol=1e-5)
    assert history["j"]["val_loss"] == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("strategy", ["auto", "threads"])
def test_waves_see_the_batches_of_those_that_fit_at_once(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = mlp(6)
    names = [f"m{number}" for number in range(6)]
    fleet = mf.Fleet({name: _copied(model) for name in names})
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    (lane,) = fleet.plan(_loader()).lanes
    assert lane.working_bytes
    monkeypatch.setenv("MODELFLEET_MEMORY", str((lane.state_bytes + lane.working_bytes) // 2))
    torch.manual_seed(1)
    loader, validation = _loader(), _loader()
    history = fleet.fit(loader, validation=validation, epochs=3, strategy=strategy, progress=False)
    expected, losses = _plain(model, 3)
    if strategy == "auto":
        assert max(lane.spec.wave for lane in fleet._lanes) > 0
    for name in names:
        assert close(weights(fleet[name]), expected), name
        assert history[name]["val_loss"] == pytest.approx(losses, rel=1e-4)


def _copied(model: nn.Module) -> nn.Module:
    twin = mlp(6)
    twin.load_state_dict(model.state_dict())
    return twin


def test_evaluate_and_predict_read_a_loader_once_for_all_lanes() -> None:
    read = []

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(3):
            read.append(number)
            yield torch.randn(8, 4), torch.randint(0, 3, (8,))

    fleet = mf.Fleet({**_members({"a": 6, "b": 9}), "j": _jax_member()})
    fleet.compile("sgd", "cross_entropy", lr=0.1, members=["a", "b"])
    fleet.compile(optax.sgd(0.1), "cross_entropy", members=["j"])
    found = fleet.evaluate(batches)
    assert read == [0, 1, 2]
    assert found["a"]["loss"] == pytest.approx(found["j"]["loss"], rel=1e-5)  # the same weights, the same rows
    outputs = fleet.predict(batches)
    assert read == [0, 1, 2] * 2
    assert np.allclose(outputs["a"], outputs["j"], atol=1e-5)


def test_a_loader_that_reuses_its_buffer_feeds_several_frameworks() -> None:
    data = np.random.default_rng(0).normal(size=(5, 8, 4)).astype(np.float32)
    labels = torch.arange(8) % 3

    def batches() -> Iterator[Any]:
        buffer = torch.empty(8, 4)
        for own in data:
            buffer.copy_(torch.from_numpy(own))
            yield buffer, labels
            buffer.fill_(1e6)

    fleet = mf.Fleet({**_members({"a": 6}), "j": _jax_member()})
    fleet.compile("sgd", "cross_entropy", lr=0.1, members=["a"])
    fleet.compile(optax.sgd(0.1), "cross_entropy", members=["j"])
    fleet.fit(batches, epochs=2, progress=False)
    model = _members({"a": 6})["a"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for own in (*data, *data):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.from_numpy(own)), labels).backward()
        optimizer.step()
    assert close(weights(fleet["a"]), weights(model))
    assert np.allclose(fleet["j"][0]["w0"], model[0].weight.detach(), atol=1e-5)  # type: ignore[index]


class Noisy:
    """A loader of batches that draws from all global generators."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(3):
            scale = random.random() + np.random.rand() + random.gauss(0, 1)
            yield scale * torch.randn(8, 4), torch.randint(0, 3, (8,))


def _seed() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


class Stops(mf.Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_epoch_end(self, run: Any) -> None:
        if run.epoch == self.at:
            raise KeyboardInterrupt


def _jax_fleet() -> mf.Fleet:
    fleet = mf.Fleet({"j": _jax_member(), "k": _jax_member()})
    fleet.compile(optax.sgd(0.1), "cross_entropy")
    return fleet


def test_the_generators_of_a_loader_are_carried_for_members_of_any_framework(tmp_path: Path) -> None:
    whole = _jax_fleet()
    _seed()
    whole.fit(Noisy(), epochs=4, progress=False)

    elsewhere = _jax_fleet()
    _seed()
    elsewhere.fit(Noisy(), epochs=4, strategy="processes", progress=False)
    assert np.allclose(whole["k"][0]["w0"], elsewhere["k"][0]["w0"], atol=1e-6)

    broken = _jax_fleet()
    _seed()
    with pytest.raises(KeyboardInterrupt):
        broken.fit(Noisy(), epochs=4, callbacks=[mf.Checkpoint(tmp_path), Stops(at=3)], progress=False)
    resumed = _jax_fleet()
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    resumed.fit(Noisy(), epochs=4, callbacks=[mf.Checkpoint(tmp_path), Stops(at=9)], progress=False)
    assert np.allclose(whole["k"][0]["w0"], resumed["k"][0]["w0"], atol=1e-6)


def test_a_loader_with_a_generator_of_its_own_gives_the_same_batches_in_a_worker_process() -> None:
    def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(
            _loader().dataset, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5)
        )

    fleet = mf.Fleet(_members({"a": 6, "b": 9}))
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    fleet.fit(loader(), epochs=3, strategy="processes", progress=False)
    for name, model in _members({"a": 6, "b": 9}).items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own = loader()
        for _ in range(3):
            for x, y in own:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        assert close(weights(fleet[name]), weights(model)), name
