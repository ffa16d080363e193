"""Threads of a lane's steps beside busy processes: as many as are quickest, and the usual number outside."""

from collections.abc import Iterator

import pytest
import torch

from modelfleet.frameworks.torch.cpu import openmp, thread_choice
from modelfleet.frameworks.torch.cpu.thread_choice import HOLD_SECONDS, ThreadChoice

USUAL = 3


class Machine:
    """A clock, and steps that take as long as the test says."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = seconds
        self.now = 100.0
        self.crowded = True
        self.choice = ThreadChoice()

    def perf_counter(self) -> float:
        return self.now

    def threads_of_a_step(self, steps: int = 1) -> int:
        with self.choice(steps):
            threads = torch.get_num_threads()
            self.now += steps * self.seconds[threads]
        assert torch.get_num_threads() == USUAL
        return threads

    def threads_after_trials(self) -> int:
        for _ in range(50):
            self.threads_of_a_step()
        return self.threads_of_a_step()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine({1: 0.01, USUAL: 0.02})
    monkeypatch.setattr(thread_choice, "time", machine)
    monkeypatch.setattr(openmp, "crowded", lambda: machine.crowded)
    before = torch.get_num_threads()
    torch.set_num_threads(USUAL)
    yield machine
    torch.set_num_threads(before)


def test_one_thread_steps_where_that_is_quicker(machine: Machine) -> None:
    assert machine.threads_after_trials() == 1


def test_all_threads_step_where_that_is_quicker(machine: Machine) -> None:
    machine.seconds = {1: 0.02, USUAL: 0.01}
    assert machine.threads_after_trials() == USUAL


def test_calls_of_several_steps_count_each_step(machine: Machine) -> None:
    while len(machine.choice._rates) < 1:
        machine.threads_of_a_step(steps=8)
    machine.threads_after_trials()
    assert machine.choice._rates == pytest.approx(machine.seconds)


def test_the_choice_is_made_again_after_a_while(machine: Machine) -> None:
    assert machine.threads_after_trials() == 1
    machine.seconds = {1: 0.02, USUAL: 0.01}
    assert machine.threads_of_a_step() == 1
    machine.now += HOLD_SECONDS
    assert machine.threads_after_trials() == USUAL


def test_an_idle_machine_gives_all_threads(machine: Machine) -> None:
    assert machine.threads_after_trials() == 1
    machine.crowded = False
    assert machine.threads_of_a_step() == USUAL
    machine.crowded = True  # others are busy again, and not in the same way
    assert machine.threads_of_a_step() == USUAL


def test_a_step_that_raises_leaves_the_usual_threads(machine: Machine) -> None:
    machine.threads_after_trials()
    with pytest.raises(ValueError, match="a step"), machine.choice(1):
        raise ValueError("a step")
    assert torch.get_num_threads() == USUAL
