"""Idle time and memory are what the papers say."""

import pytest
from tests.schedules.specs import chain, devices, grouped

from modelfleet.schedules import ScheduleName, Timeline, build, simulate

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (p, p + 1, 2 * p, 4 * p + 3)]


def timeline(stages: int, ranks: int, micro_batches: int, schedule: ScheduleName) -> Timeline:
    spec = chain(stages, ranks)
    return simulate(build(spec, devices(ranks), micro_batches=micro_batches, schedule=schedule), spec)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_gpipe_and_1f1b(p: int, m: int, schedule: ScheduleName) -> None:
    assert timeline(p, p, m, schedule).bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_keeps_all_micro_batches_and_1f1b_those_that_are_in_the_pipeline(p: int, m: int) -> None:
    assert timeline(p, p, m, "gpipe").peak_bytes == (m,) * p
    assert timeline(p, p, m, "1f1b").peak_bytes == tuple(p - stage for stage in range(p))


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_interleaving_divides_the_idle_time_by_the_stages_per_rank(p: int, v: int, rounds: int) -> None:
    m = rounds * p
    spec = grouped(p * v, p)
    plain = simulate(build(spec, devices(p), micro_batches=m), spec)
    interleaved = timeline(p * v, p, m, "interleaved")
    assert plain.seconds - plain.busy(0) == pytest.approx(2 * v * (p - 1))
    assert interleaved.seconds - interleaved.busy(0) == pytest.approx(2 * (p - 1))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zero_bubble_is_idle_for_less_than_1f1b_with_the_same_memory(p: int, m: int) -> None:
    """ZB-H1 is idle for (p - 1)(F + B - W), where 1F1B is idle for (p - 1)(F + B + W)."""
    for backward, most in ((1.0, 1.0), (2.0, 1.5)):  # the halves: 0.5 and 1; a full one may delay others by half
        spec = chain(p, backward=backward)
        plain, filled = (
            simulate(build(spec, devices(p), micro_batches=m, schedule=schedule), spec)
            for schedule in ("1f1b", "zero-bubble")
        )
        assert plain.seconds - plain.busy(0) == pytest.approx((p - 1) * (1 + backward))
        assert p - 1 - 1e-9 <= filled.seconds - filled.busy(0) <= most * (p - 1) + 1e-9
        assert plain.peak_bytes is not None
        assert filled.peak_bytes is not None
        assert max(filled.peak_bytes) == max(plain.peak_bytes) == p


def test_waiting_in_every_transfer_is_no_quicker() -> None:
    spec = chain(4, backward=2.0)
    schedule = build(spec, devices(4), micro_batches=8)
    assert simulate(schedule, spec, blocking=True).seconds >= simulate(schedule, spec).seconds
