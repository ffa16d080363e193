"""Lanes that run side by side on the CPU divide its cores."""

import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from tests.helpers import mlp, toy
from torch import Tensor, nn

import modelfleet as mf
from modelfleet.sharing import thread_counts
from modelfleet.types import Strategy

CORES = 6


class Counting(nn.Module):
    """A model that notes how many threads its forward has."""

    seen: ClassVar[set[tuple[bool, int]]] = set()

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        Counting.seen.add((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
        return self.net(x)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(thread_counts, "cores", lambda: CORES)
    Counting.seen = set()
    before = torch.get_num_threads()
    torch.set_num_threads(CORES)
    yield CORES
    torch.set_num_threads(before)


def seen_by(widths: tuple[int, ...], strategy: Strategy) -> set[int]:
    """The numbers of threads that the steps had, in the threads of the lanes or in this one."""
    fleet = mf.Fleet({f"m{width}": Counting(width) for width in widths}, devices="cpu")
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    fleet.fit(toy(16), epochs=2, batch_size=8, strategy=strategy, progress=False)
    return {count for here, count in Counting.seen if here == (strategy != "threads")}


@pytest.mark.parametrize(("widths", "expected"), [((3, 4), 3), ((3, 4, 5), 2)])
def test_each_lane_in_a_thread_has_its_part_of_the_cores(
    threads: int, widths: tuple[int, ...], expected: int
) -> None:
    assert seen_by(widths, "threads") == {expected}
    assert torch.get_num_threads() == threads


def test_more_lanes_than_cores_have_a_thread_each(threads: int) -> None:
    assert seen_by(tuple(range(3, 11)), "threads") == {1}


def test_a_lane_that_is_alone_has_all_cores(threads: int) -> None:
    assert seen_by((3,), "threads") == {threads}


def test_lanes_that_take_turns_have_all_cores(threads: int) -> None:
    assert seen_by((3, 4), "interleaved") == {threads}
