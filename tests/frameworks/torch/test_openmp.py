"""Torch's waiting threads: they sleep while other processes are busy, and spin as torch has it otherwise."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from modelfleet.frameworks.torch.cpu import openmp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only GNU's OpenMP is known to spin")


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in openmp._USERS_OWN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(openmp, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(openmp, "IDLE_SECONDS", 0.0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("modelfleet-openmp")}


def wait_until(names: set[str]) -> None:
    while threads() != names:  # the test's own time limit ends a wait for nothing
        for thread in threading.enumerate():
            if thread.name.startswith("modelfleet-openmp"):
                thread.join(0.01)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    code = "print(flush=True)\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in busy:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in busy:
            process.kill()
            process.communicate()


def test_a_team_sleeps_beside_busy_processes_and_ends_with_the_computation() -> None:
    with busy_processes((os.cpu_count() or 1) + 1), openmp.sharing_cores():
        wait_until({"modelfleet-openmp", "modelfleet-openmp-team"})
    wait_until(set())


def test_no_team_is_started_while_there_are_cores_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "is_crowded", lambda: False)
    with openmp.sharing_cores():
        assert threads() == {"modelfleet-openmp"}
    wait_until(set())


def test_a_team_is_released_when_the_others_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = True
    monkeypatch.setattr(openmp, "is_crowded", lambda: crowded)
    with openmp.sharing_cores():
        wait_until({"modelfleet-openmp", "modelfleet-openmp-team"})
        crowded = False
        wait_until({"modelfleet-openmp"})
    wait_until(set())


@pytest.mark.parametrize("name", openmp._USERS_OWN)
def test_what_the_user_has_set_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "is_crowded", lambda: True)
    monkeypatch.setenv(name, "1")
    with openmp.sharing_cores():
        assert threads() == set()


def test_one_thread_has_nobody_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "is_crowded", lambda: True)
    torch.set_num_threads(1)
    with openmp.sharing_cores():
        assert threads() == set()
