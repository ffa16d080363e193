"""What is measured of a run, beside what was planned: times, memory, clocks; and notes of the plan."""

from typing import Any

import pytest
import torch
from tests.graph.comparing import THREE, TWO, assert_as_undivided, chain_of, fit, rows, stages
from torch import Tensor, nn

import modelfleet as mf
from modelfleet.graph.recording import by_one_clock
from modelfleet.schedules import Event, Operation

WAYS: list[dict[str, Any]] = [
    {"pipeline": "gpipe"},
    {"pipeline": "1f1b"},
    {"pipeline": "zero-bubble"},
    {"pipeline": "interleaved"},
    {"pipeline": "gpipe", "recompute": True},
    {"pipeline": "1f1b", "recompute": ["1"]},
    {"pipeline": "zero-bubble", "recompute": True},
]


def measured(chain: mf.Graph) -> Any:
    assert chain.last_plan is not None
    assert chain.last_plan.measured is not None
    return chain.last_plan.measured


def wide() -> list[nn.Module]:
    """Stages that keep much of a row."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid()).double(),
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).double(),
        nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 3)).double(),
    ]


@pytest.mark.parametrize("options", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_ranks_hold_what_the_plan_says_at_most(options: dict[str, Any]) -> None:
    chain = chain_of(wide(), THREE)
    fit(chain, rows(128), batch_size=64, micro_batches=8, epochs=1, **options)
    timeline = measured(chain)
    for own, planned in zip(timeline.peak_bytes, timeline.planned.peak_bytes, strict=True):
        # At the end of a backward, the plan counts both what it has kept and the gradient that it gives.
        assert 0.7 * planned < own <= planned


def test_recomputing_holds_less_and_takes_longer() -> None:
    plans = [
        chain_of(wide(), THREE).plan(
            rows(64), batch_size=64, micro_batches=8, pipeline="gpipe", recompute=recompute
        )
        for recompute in (False, True)
    ]
    assert all(less < 0.6 * more for more, less in zip(plans[0].peak_bytes, plans[1].peak_bytes, strict=True))
    assert all(
        node.backward > node.forward + before.backward / 10
        for node, before in zip(plans[1].spec.nodes, plans[0].spec.nodes, strict=True)
    )


@pytest.mark.parametrize("strategy", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_run_is_shown_beside_its_plan(strategy: str) -> None:
    chain = chain_of(wide(), TWO)
    fit(chain, rows(), epochs=1, strategy=strategy)
    timeline, text = measured(chain), str(chain.last_plan)
    assert timeline.planned is not None
    assert f"{timeline.seconds:.3g} s (planned {timeline.planned.seconds:.3g} s)" in text
    assert "peak memory" in text
    assert timeline.bottleneck() in text
    assert chain.last_plan is not None
    assert len(chain.last_plan.plot().axes) == 2


def test_one_step_says_nothing_of_memory() -> None:
    chain = chain_of(wide(), TWO)
    fit(chain, rows(), batch_size=40, epochs=1)
    assert measured(chain).peak_bytes is None
    assert measured(chain).seconds > 0


class OwnGradient(nn.Module):
    """Computes a gradient of its input with torch.func, under which nothing can be counted."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.vmap(torch.func.grad(lambda row: (row**3).sum()))(x)


@pytest.mark.parametrize("pipeline", ["1f1b", "zero-bubble"])
def test_a_stage_that_uses_torch_func(pipeline: str) -> None:
    first, second, third = stages()
    assert_as_undivided(
        [first, nn.Sequential(OwnGradient(), second), third], rows(), options={"pipeline": pipeline}
    )


def test_clocks_of_several_machines_are_brought_together() -> None:
    here = [Event(0, Operation("forward", "a", 0), 1.0, 2.0), Event(0, Operation("sum", "step"), 2.0, 5.0)]
    there = [
        Event(1, Operation("forward", "b", 0), 903.0, 904.5),
        Event(1, Operation("sum", "step"), 904.5, 905.0),
    ]
    first, second = by_one_clock([here, there])
    assert first == here
    assert [(event.start, event.end) for event in second] == [(3.0, 4.5), (4.5, 5.0)]
    assert by_one_clock([here[:1], there]) == [here[:1], there]


@pytest.mark.parametrize(
    ("micro_batches", "words"), [(1, "1 micro-batch on 3 devices"), (2, "2 micro-batches on 3")]
)
def test_a_plan_says_what_too_few_micro_batches_mean(micro_batches: int, words: str) -> None:
    plan = chain_of(None, THREE).plan(rows(), batch_size=8, micro_batches=micro_batches)
    (note,) = plan.notes
    assert words in note
    assert f"no more than {micro_batches} can work at once" in note
    assert "Use 12 micro-batches" in note
    assert note in str(plan)
    assert chain_of(None, THREE).plan(rows(), batch_size=8, micro_batches=3).notes == ()
