"""Members whose rows or batches have unlike shapes, and batches that some members can't take."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from tests.helpers import close, fit, weights
from torch import Tensor, nn

import modelfleet as mf
from modelfleet.frameworks.torch.fused.engine import FusedEngine
from modelfleet.types import Strategy


class Pooled(nn.Module):
    """Takes sequences of any length."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.before = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.after = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(torch.tanh(self.before(x)).mean(1)))


def sequences(length: int, rows: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, 3, generator=generator), torch.arange(rows) % 2


def models(names: list[str], make: Callable[[], nn.Module] = Pooled) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {name: make() for name in names}


def compiled(members: dict[str, nn.Module]) -> mf.Fleet:
    fleet = mf.Fleet(members)
    fleet.compile("adam", "cross_entropy", lr=0.02)
    return fleet


def plain(model: nn.Module, batches: list[tuple[Tensor, Tensor]], epochs: int) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def cut(data: tuple[Tensor, Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(data[0].split(size), data[1].split(size), strict=True))


LENGTHS = {"a": 4, "b": 7, "c": 4, "d": 2}


def test_members_with_rows_of_unlike_shapes_train_as_they_would_alone() -> None:
    data = {name: sequences(length, seed=number) for number, (name, length) in enumerate(LENGTHS.items())}
    fleet = compiled(models(list(data)))
    history = fit(fleet, mf.each(data), validation=mf.each(data), epochs=2, batch_size=5, shuffle=False)
    assert not history.failed
    evaluated, predicted = fleet.evaluate(mf.each(data)), fleet.predict(mf.each(data), batch_size=5)
    for name, model in models(list(data)).items():
        x, y = data[name]
        plain(model, cut(data[name], 5), 2)
        assert close(weights(fleet[name]), weights(model)), name
        with torch.no_grad():
            outputs = model(x)
        loss = float(nn.functional.cross_entropy(outputs, y))
        assert evaluated[name]["loss"] == pytest.approx(loss, rel=1e-4)
        assert np.allclose(predicted[name], outputs.numpy(), atol=1e-5)
    plan = fleet.plan(mf.each(data))
    assert sorted(len(lane.members) for lane in plan.lanes) == [1, 1, 2]
    assert "its rows differ from those of 'a': a row of [0] is (7, 3), expected (4, 3)" in plan.lanes[1].reason
    with pytest.raises(mf.StrategyError, match="rows differ from"):
        fit(fleet, mf.each(data), strategy="fused")
    fit(fleet, sequences(4))
    assert len(fleet.plan().lanes) == 1  # together again


def test_own_loaders_of_varying_lengths_train_as_they_would_alone() -> None:
    batches = {
        "a": [sequences(3, 4), sequences(6, 4, 1)],
        "b": [sequences(6, 4, 2), sequences(6, 4, 3), sequences(2, 5, 4)],
        "c": [sequences(3, 4, 5), sequences(5, 3, 6)],
    }
    fleet = compiled(models(list(batches)))
    history = fit(fleet, mf.each(batches), epochs=2)
    assert not history.failed
    evaluated, predicted = fleet.evaluate(mf.each(batches)), fleet.predict(mf.each(batches))
    for name, model in models(list(batches)).items():
        plain(model, batches[name], 2)
        assert close(weights(fleet[name]), weights(model)), name
        with torch.no_grad():
            outputs = torch.cat([model(x) for x, _ in batches[name]])
            targets = torch.cat([y for _, y in batches[name]])
        assert np.allclose(predicted[name], outputs.numpy(), atol=1e-5)
        loss = float(nn.functional.cross_entropy(outputs, targets))
        assert evaluated[name]["loss"] == pytest.approx(loss, rel=1e-4)


def test_memory_that_runs_out_between_two_shapes_of_a_step_leaves_no_step_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = {name: [sequences(n, 4, seed) for seed in range(3)] for name, n in (("a", 3), ("b", 6))}
    fleet, calls = compiled(models(list(batches))), []
    for method in ("train", "train_some"):
        step = getattr(FusedEngine, method)

        def small_device(*args: Any, step: Callable[..., None] = step, **options: Any) -> None:
            calls.append(None)
            if len(calls) == 2:  # the rows of 'a' are done, those of 'b' are not
                raise torch.OutOfMemoryError("pretended")
            step(*args, **options)

        monkeypatch.setattr(FusedEngine, method, small_device)
    history = fit(fleet, mf.each(batches))
    assert not history.failed
    halves = [lane for lane, _ in fleet._live_lanes._holders.values()]
    assert [lane.names for lane in halves] == [["a"], ["b"]]
    assert [lane.steps.tolist() for lane in halves] == [[3], [3]]
    for name, model in models(list(batches)).items():
        assert close(weights(fleet[name]), weights(plain(model, batches[name], 1))), name


@pytest.mark.parametrize("strategy", ["auto", "interleaved", "threads", "processes"])
def test_a_member_whose_step_raises_is_set_aside_and_the_others_go_on(strategy: Strategy) -> None:
    # Of one row BatchNorm has no variance: alone this raises, too.
    data = {"a": sequences(4, 8), "b": sequences(4, 9, 1), "c": sequences(4, 8, 2)}
    norm = lambda: Pooled(norm=True)  # noqa: E731
    fleet = compiled(models(list(data), norm))
    history = fit(fleet, mf.each(data), epochs=2, batch_size=4, shuffle=False, strategy=strategy)
    assert list(history.failed) == ["b"]
    assert (history.failed["b"].epoch, history.failed["b"].step) == (1, 3)
    assert history.failed["b"].reason.startswith("its step raised ValueError: Expected more than 1 value")
    for name, model in models(list(data), norm).items():
        if name != "b":
            plain(model, cut(data[name], 4), 2)
            assert close(weights(fleet[name]), weights(model)), name
    assert np.isfinite(fleet.predict(sequences(4)[0])["b"]).all()


def test_a_later_batch_of_another_length_only_takes_another_path() -> None:
    batches = [sequences(4, 6), sequences(9, 6, 1), sequences(1, 6, 2)]
    fleet = compiled(models(["a", "b"]))
    history = fit(fleet, batches, epochs=2)
    assert not history.failed
    for name, model in models(["a", "b"]).items():
        assert close(weights(fleet[name]), weights(plain(model, batches, 2))), name


class Picky(Pooled):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 8:
            raise ValueError(f"{x.shape[1]} is too long")
        return super().forward(x)


@pytest.mark.parametrize("strategy", ["auto", "interleaved", "processes"])
def test_a_fit_whose_steps_raise_for_all_says_so(strategy: Strategy) -> None:
    fleet = compiled(models(["a", "b"], Picky))
    with pytest.raises(mf.AllFailedError, match="epoch 1, step 2: its step raised ValueError: 9 is too") as caught:
        fit(fleet, [sequences(4, 6), sequences(9, 6, 1)], epochs=2, strategy=strategy)
    assert set(caught.value.history.failed) == {"a", "b"}
    for name, model in models(["a", "b"], Picky).items():
        assert close(weights(fleet[name]), weights(plain(model, [sequences(4, 6)], 1))), name


def test_jax_members_of_unlike_shapes_train_and_those_whose_step_raises_are_set_aside() -> None:
    def apply(params: Any, x: Any) -> Any:
        if x.shape[1] > 8:
            raise ValueError(f"{x.shape[1]} is too long")
        return jnp.tanh(x @ params["w"]).mean(1) @ params["v"]

    generator = np.random.default_rng(0)
    params = {"w": generator.normal(size=(3, 5)).astype("f"), "v": generator.normal(size=(5, 2)).astype("f")}
    batches = {
        "a": [sequences(3, 4), sequences(6, 4, 1)],
        "b": [sequences(6, 4, 2), sequences(9, 4, 3)],
        "c": [sequences(6, 4, 2), sequences(6, 4, 3), sequences(2, 5, 4)],
    }
    fleet = mf.Fleet({name: (dict(params), apply) for name in batches})
    fleet.compile(optax.sgd(0.1), "cross_entropy")
    history = fit(fleet, mf.each(batches), epochs=2)
    assert list(history.failed) == ["b"]
    assert history.failed["b"].reason == "its step raised ValueError: 9 is too long"
    for name in ("a", "c"):
        w, v = (torch.tensor(params[key], requires_grad=True) for key in ("w", "v"))
        optimizer = torch.optim.SGD([w, v], lr=0.1)
        for x, y in batches[name] * 2:
            optimizer.zero_grad()
            nn.functional.cross_entropy(torch.tanh(x @ w).mean(1) @ v, y).backward()
            optimizer.step()
        assert np.allclose(fleet[name][0]["w"], w.detach().numpy(), atol=1e-5), name


class Two(Pooled):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return out, out.mean()


class Each(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_outputs_that_can_not_be_joined_by_rows_are_refused_with_a_sentence() -> None:
    fleet = mf.Fleet(models(["a", "b"], Two))
    with pytest.raises(mf.InputError, match="a part of the output is a single number for a batch of 12 rows"):
        fleet.predict(sequences(4)[0])
    fleet = mf.Fleet(models(["a", "b"], Each))
    with pytest.raises(mf.InputError, match=r"is \(4, 2\) in one batch and \(6, 2\) in another"):
        fleet.predict([sequences(4), sequences(6)])
    unlike = fleet.predict(mf.each([sequences(4)[0], sequences(6)[0]]))
    assert [output.shape for output in unlike.values()] == [(12, 4, 2), (12, 6, 2)]
    alone = mf.Fleet(models(["a"], Two))
    with pytest.raises(mf.InputError, match="a single number for a batch"):
        alone.predict(sequences(4)[0])


class Doubles(nn.Module):
    """Writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mul_(2))


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
@pytest.mark.parametrize("loader", [False, True])
def test_a_forward_that_writes_into_its_input_writes_into_nobodys_array(names: list[str], loader: bool) -> None:
    x, y = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32), np.arange(10) % 2
    before = x.copy()
    batches = cut((torch.from_numpy(before), torch.from_numpy(y)), 4)
    data: Any = [(torch.from_numpy(x[low : low + 4]), torch.from_numpy(y[low : low + 4])) for low in (0, 4, 8)]
    members = models(names, Doubles)
    members["other"] = nn.Sequential(nn.Linear(3, 2), nn.Tanh())  # a lane beside it, on the same batches
    expected = {}
    for name, model in models(names, Doubles).items():
        expected[name] = plain(model, [(own.clone(), labels) for own, labels in batches], 1)
    fleet = compiled(members)
    options = {} if loader else {"batch_size": 4, "shuffle": False}
    fit(fleet, data if loader else (x, y), **options)
    predicted = fleet.predict(data) if loader else fleet.predict(x, batch_size=4)
    evaluated = fleet.evaluate(data) if loader else fleet.evaluate((x, y), batch_size=4)
    assert (x == before).all()
    for name in names:
        with torch.no_grad():
            outputs = expected[name].inner(2 * torch.from_numpy(before))  # type: ignore[operator]
        assert np.allclose(predicted[name], outputs.numpy(), atol=1e-5), name
        loss = float(nn.functional.cross_entropy(outputs, torch.from_numpy(y)))
        assert evaluated[name]["loss"] == pytest.approx(loss, rel=1e-4)
