"""JAX members that average, copy the best, and learn from each other's predictions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import modelfleet as mf

NAMES = ("a", "b", "c")
BATCH, RATE = 5, 0.3


def apply(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["first"]) @ params["last"]


def make(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    shapes = {"first": (4, 5), "last": (5, 3)}
    return {name: jnp.asarray(generator.normal(size=shape) / 2) for name, shape in shapes.items()}


def rows(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(count, 4)).astype(np.float32), generator.integers(0, 3, size=count)


DATA = [rows(seed, count) for seed, count in enumerate((20, 15, 10))]


def fleet_of(members: list[Any], **recipe: Any) -> mf.Fleet:
    fleet = mf.Fleet({name: (params, apply) for name, params in zip(NAMES, members, strict=True)})
    whole: dict[str, Any] = {"lr": RATE, **recipe}
    fleet.compile("sgd", "cross_entropy", **whole)
    return fleet


def cross_entropy(output: Any, y: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(output), y[:, None], 1).mean()


def distance(fleet: mf.Fleet, members: list[Any]) -> float:
    pairs = zip(fleet.names, members, strict=True)
    return max(float(jnp.abs(fleet[name][0][key] - own[key]).max()) for name, own in pairs for key in own)


@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
@pytest.mark.parametrize("way", ["average", "distill"])
def test_members_equal_a_plain_loop(way: str, strategy: Any) -> None:
    members = [make(seed) for seed in range(3)]
    fleet = fleet_of(members)
    exchange = mf.Average(every_steps=2) if way == "average" else mf.Distill(0.5, temperature=2.0)
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "strategy": strategy, "progress": False}
    fleet.fit(mf.each(DATA), epochs=2, exchange=exchange, **options)

    def loss_of(params: Any, x: Any, y: Any, others: list[Any]) -> Any:
        output = apply(params, x)
        if way == "average":
            return cross_entropy(output, y)
        p = sum(jax.nn.softmax(apply(other, x) / 2) for other in others) / len(others)
        divergence = (p * (jnp.log(p) - jax.nn.log_softmax(output / 2))).sum(1).mean()
        return cross_entropy(output, y) + 0.5 * 4 * divergence

    step = 0
    for _ in range(2):
        for start in range(0, 20, BATCH):
            before, members = members, list(members)
            for number, (x, y) in enumerate(DATA):
                batch = x[start : start + BATCH], y[start : start + BATCH]
                if len(batch[0]):
                    others = [own for other, own in enumerate(before) if other != number]
                    gradient = jax.grad(loss_of)(before[number], *batch, others)
                    members[number] = jax.tree.map(lambda w, g: w - RATE * g, before[number], gradient)
            step += 1
            if way == "average" and step % 2 == 0:
                members = [jax.tree.map(lambda *own: sum(own) / 3, *members)] * 3
    assert distance(fleet, members) < 1e-5


def test_the_worst_member_becomes_a_copy_with_another_rate() -> None:
    fleet = fleet_of([make(seed) for seed in range(3)], lr=mf.each([0.3, 0.1, 1e-6]))
    exploit = mf.Exploit("loss", perturb={"lr": (0.5,)})
    history = fleet.fit(DATA[0], epochs=2, batch_size=BATCH, exchange=exploit, progress=False)
    ((target, (copied,)),) = history.copied.items()
    losses = {name: history[name]["loss"][0] for name in NAMES}
    assert target == max(losses, key=losses.__getitem__)
    assert copied.source == min(losses, key=losses.__getitem__)
    rates = dict(zip(NAMES, [0.3, 0.1, 1e-6], strict=True))
    assert copied.hyperparameters["lr"] == pytest.approx(rates[copied.source] / 2)


def test_members_of_torch_and_jax_learn_from_each_other() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    fleet = mf.Fleet({"torch": torch.nn.Linear(4, 3), "jax": (make(0), apply)})
    fleet.compile("sgd", "cross_entropy", lr=0.0)
    x, y = DATA[0]
    history = fleet.fit((x, y), epochs=1, batch_size=20, exchange=mf.Distill(2.0), progress=False)
    outputs = {name: jnp.asarray(output) for name, output in fleet.predict(x).items()}
    for name, other in (("torch", "jax"), ("jax", "torch")):
        p = jax.nn.softmax(outputs[other])
        divergence = (p * (jnp.log(p) - jax.nn.log_softmax(outputs[name]))).sum(1).mean()
        expected = cross_entropy(outputs[name], y) + 2 * divergence
        assert history[name]["loss"][0] == pytest.approx(float(expected), rel=1e-4)
