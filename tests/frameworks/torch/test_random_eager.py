"""A member that runs as plain torch draws what it would draw in a fused lane."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from modelfleet.frameworks.torch.random.eager import EagerDraws, WordCache
from modelfleet.frameworks.torch.random.operations import DrawFromStreams
from modelfleet.frameworks.torch.random.streams import Streams

SEED = 2**62 + 12345


def by_streams(function: Callable[[], Any], step: int = 0) -> Any:
    with DrawFromStreams(Streams(torch.tensor(SEED), torch.tensor(step))):
        return function()


def equal(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def draw() -> Tensor:
    first = F.dropout(torch.ones(5, 7, dtype=torch.float64), 0.3)
    return torch.cat([first, torch.randn(3, 7, dtype=torch.float64), torch.rand(2, 7, dtype=torch.float64)])


def test_eager_draws_are_those_of_the_members_stream_at_every_step() -> None:
    ahead = WordCache()
    for step in [*range(70), 3, 200]:
        with EagerDraws(SEED, step, ahead) as draws:
            found = draw()
        equal(found, by_streams(draw, step))
        assert draws.count == 3


def test_a_step_without_draws_counts_none() -> None:
    with EagerDraws(SEED, 0) as draws:
        torch.ones(3).sum()
    assert draws.count == 0


def test_torchs_own_generator_is_left_alone() -> None:
    before, names = torch.get_rng_state(), (torch.get_rng_state, torch.set_rng_state, torch.manual_seed)
    with EagerDraws(SEED, 0):
        draw()
        torch.poisson(torch.ones(5))
        torch.distributions.Beta(2.0, 3.0).sample()
    equal(torch.get_rng_state(), before)
    assert names == (torch.get_rng_state, torch.set_rng_state, torch.manual_seed)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_draws_the_same(reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5)).double()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with EagerDraws(SEED, 1) as draws:
            loss = F.dropout(run(run(x)), 0.5).square().sum()
            loss.backward()
        assert draws.count == 5
        found = [p.grad for p in block.parameters()]
        block.zero_grad()
        x.grad = None
        assert all(g is not None and g.abs().sum() > 0 for g in found)
        return [g for g in found if g is not None]

    plain = gradients(block)
    again = gradients(lambda h: checkpoint(block, h, use_reentrant=reentrant))
    for left, right in zip(plain, again, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_within_fork_rng_draws_begin_where_they_go_on_after_it() -> None:
    with EagerDraws(SEED, 0) as draws:
        torch.rand(2)
        with torch.random.fork_rng(devices=[]):
            inside = torch.rand(2)
        after = torch.rand(2)
    equal(inside, after)
    assert draws.count == 2


def test_a_model_that_seeds_torch_draws_from_its_seed() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        expected = torch.rand(3)
    with EagerDraws(SEED, 0) as draws:
        first = torch.rand(3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            seeded = torch.rand(3)
        second = torch.rand(3)
    equal(seeded, expected)
    equal(torch.stack([first, second]), by_streams(lambda: torch.stack([torch.rand(3), torch.rand(3)])))
    assert draws.count == 2


def test_an_explicit_generator_is_drawn_from() -> None:
    with EagerDraws(SEED, 0) as draws:
        found = torch.rand(3, generator=torch.Generator().manual_seed(3))
    equal(found, torch.rand(3, generator=torch.Generator().manual_seed(3)))
    assert draws.count == 0


@pytest.mark.parametrize(
    "sample",
    [
        lambda: torch.poisson(torch.full((50,), 3.0)),
        lambda: torch.binomial(torch.full((50,), 9.0), torch.full((50,), 0.5)),
        lambda: torch.distributions.Gamma(torch.full((50,), 2.0), 1.0).rsample(),
        lambda: torch.distributions.Beta(torch.full((50,), 2.0), 1.0).rsample(),
        lambda: torch.rand(50, out=torch.empty(50)),
    ],
)
def test_operations_without_a_rule_depend_on_the_members_seed_step_and_draw_alone(sample: Any) -> None:
    def two(seed: int, step: int) -> tuple[Tensor, Tensor]:
        with EagerDraws(seed, step):
            return sample(), sample()

    first, second = two(SEED, 0)
    torch.rand(3)
    again, _ = two(SEED, 0)
    equal(first, again)
    for other in (second, two(SEED, 1)[0], two(SEED + 1, 0)[0]):
        assert (first != other).any()


def test_another_threads_draws_are_not_touched() -> None:
    found: list[Tensor] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = torch.rand(4)
        torch.manual_seed(5)
        with EagerDraws(SEED, 0):
            mine = torch.rand(2)
            thread = threading.Thread(target=lambda: found.append(torch.rand(4)))
            thread.start()
            thread.join()
            more = torch.rand(2)
    equal(found[0], expected)
    equal(torch.stack([mine, more]), by_streams(lambda: torch.stack([torch.rand(2), torch.rand(2)])))
