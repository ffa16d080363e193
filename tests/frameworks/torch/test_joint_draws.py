"""Several draws of a step as one: the same words, and none is moved to where it may not be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from modelfleet.frameworks.torch.random.streams import Streams
from modelfleet.frameworks.torch.random.threefry import WORDS
from modelfleet.frameworks.torch.tracing import joint_draws
from modelfleet.frameworks.torch.tracing.joint_draws import join_draws

SEED, STEP = torch.tensor([5, 2**40 + 1, 7]), torch.tensor([0, 3, 9])
Draw = Callable[..., Any]


@pytest.fixture(autouse=True)
def as_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_draws, "_takes_long_to_begin", lambda device: True)


def joined(draw: Draw, *args: Tensor) -> tuple[fx.GraphModule, int]:
    """The graph of a function with its draws joined, and how many there are now."""
    graph = make_fx(draw, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    join_draws(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph, sum(node.target is WORDS for node in graph.graph.nodes)


def several(seed: Tensor, step: Tensor) -> list[Tensor]:
    streams, lead = Streams(seed, step), list(seed.shape)
    rates = torch.tensor([0.1, 0.0, 0.4], dtype=torch.float64)
    return [
        streams.below([*lead, 4, 3], 0.5),
        streams.uniform([*lead, 7], torch.float32),
        *([streams.noise([3, 2, 5], rates, torch.float64)] if lead else []),
        streams.normal([*lead, 5], torch.float64),
        streams.integers([*lead, 2], 0, 100),
    ]


@pytest.mark.parametrize("stacked", [True, False])
def test_several_draws_are_one_and_the_same(stacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    args = (SEED, STEP) if stacked else (SEED[1], STEP[1])
    expected = several(*args)
    graph, draws = joined(several, *args)
    for one, other in zip(graph(*args), expected, strict=True):
        assert torch.equal(one, other)
    assert draws == 1


def test_a_large_draw_stays_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_draws, "MAX_PAIRS", 30)
    graph, draws = joined(several, SEED, STEP)
    assert draws > 1
    for one, other in zip(graph(SEED, STEP), several(SEED, STEP), strict=True):
        assert torch.equal(one, other)


def test_a_draw_after_a_write_is_not_brought_before_it() -> None:
    def step(seed: Tensor, step: Tensor) -> list[Tensor]:
        first = Streams(seed, step).below([3, 8], 0.5)
        step.add_(1)
        return [first, Streams(seed, step).below([3, 8], 0.5)]

    expected = step(SEED, STEP.clone())
    graph, draws = joined(step, SEED, STEP.clone())
    assert draws == 2
    for one, other in zip(graph(SEED, STEP.clone()), expected, strict=True):
        assert torch.equal(one, other)


def test_a_draw_whose_numbers_come_from_a_draw_stays_behind_it() -> None:
    def step(seed: Tensor, step: Tensor) -> list[Tensor]:
        first = Streams(seed, step).integers([3, 1], 0, 1000)
        return [
            first,
            WORDS(*(part.to(torch.int32) for part in (seed[:, None], first, torch.arange(4), step[:, None]))),
        ]

    expected = step(SEED, STEP)
    graph, _ = joined(step, SEED, STEP)
    for one, other in zip(graph(SEED, STEP), expected, strict=True):
        assert torch.equal(one, other)
