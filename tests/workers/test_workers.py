"""Workers of every kind: one protocol, the same behaviour."""

import errno
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.clusters import two_nodes
from tests.workers import tasks

from modelfleet.workers import CannotSendError, WorkerDiedError
from modelfleet.workers.inline import InlinePlace
from modelfleet.workers.process import ProcessPlace, dismiss

INLINE = InlinePlace("cpu", "cpu")
PROCESS = ProcessPlace("cpu:1", "cpu:1", {"OMP_NUM_THREADS": "1", "MODELFLEET_DEVICE": "cpu:1"})


@pytest.fixture(scope="module", params=["inline", "process", pytest.param("ray", marks=pytest.mark.slow)])
def places(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Where two workers can be at the same time."""
    if request.param == "inline":
        yield [INLINE, INLINE]
    elif request.param == "process":
        yield [PROCESS, PROCESS]
        dismiss()
    else:
        with two_nodes():
            from modelfleet.workers import ray

            yield list(ray.places(None))


@pytest.fixture(scope="module")
def hired(places: list[Any]) -> Iterator[list[Any]]:
    """The one worker that all tests of a kind take in turn: starting one is what costs."""
    workers = [places[0].hire()]
    yield workers
    places[0].release(workers[0])


@pytest.fixture
def worker(places: list[Any], hired: list[Any]) -> Iterator[Any]:
    """The worker, or a new one after a test that left it busy."""
    yield hired[0]
    if hired[0].busy:
        hired[0].close()
        hired[0] = places[0].hire()


def test_a_task_and_its_owner_speak_in_turn(worker: Any) -> None:
    worker.start(tasks.echo, "first", "an order")
    assert worker.receive() == (True, "first")
    for value in ({"a": [1, 2]}, "third"):
        worker.answer(value)
        assert worker.receive() == (True, value)
    assert worker.busy
    worker.answer(None)
    assert worker.receive() == (False, None)
    assert not worker.busy


def test_a_worker_takes_one_task_after_another(worker: Any) -> None:
    for number in range(3):
        worker.start(tasks.echo, number, "an order")
        assert worker.receive() == (True, number)
        worker.answer(None)
        assert worker.receive() == (False, None)


def test_arrays_and_tensors_cross_whole(worker: Any) -> None:
    sent = {"x": np.arange(12.0).reshape(3, 4).T, "empty": np.empty((0, 2)), "t": torch.arange(5)}
    worker.start(tasks.echo, sent, "an order")
    _, got = worker.receive()
    np.testing.assert_array_equal(got["x"], sent["x"])
    assert got["empty"].shape == (0, 2)
    assert torch.equal(got["t"], torch.arange(5))
    worker.answer(None)
    worker.receive()


def test_messages_may_grow(worker: Any) -> None:
    worker.start(tasks.grow, None, "an order")
    worker.receive()
    for number, size in enumerate([1, 40, 1600, 64_000, 2_560_000]):
        worker.answer(float(number))
        _, got = worker.receive()
        assert got.shape == (size,)
        assert (got == number).all()
        del got
    worker.answer(None)
    worker.receive()


def test_what_a_task_raises_is_raised_here_and_the_worker_lives_on(worker: Any) -> None:
    worker.start(tasks.fail, "the key", "an order")
    worker.receive()
    worker.answer(None)
    with pytest.raises(KeyError, match="the key"):
        worker.receive()
    worker.start(tasks.echo, 1, "an order")
    assert worker.receive() == (True, 1)
    worker.answer(None)
    worker.receive()


def test_a_task_hears_that_it_is_to_stop(worker: Any) -> None:
    worker.start(tasks.until_interrupted, None, "an order")
    worker.receive()
    worker.answer(None)
    worker.interrupt()
    assert worker.receive() == (True, "interrupted")
    worker.answer(None)
    assert worker.receive() == (False, None)


def test_a_shared_value_is_seen_by_all(places: list[Any], worker: Any) -> None:
    shared = places[0].publish(np.ones(1000), "ones")
    second = places[1].hire()
    for each in (worker, second):
        each.start(tasks.total, shared, "an order")
    for each in (worker, second):
        _, (total, own) = each.receive()
        assert total == 1000
        assert own == (places[0] is INLINE)  # elsewhere it is a view of the one memory
        each.answer(None)
        each.receive()
    places[1].release(second)
    shared.close()


def test_the_environment_is_there_before_anything() -> None:
    worker = PROCESS.hire()
    worker.start(tasks.environment, ["OMP_NUM_THREADS", "MODELFLEET_DEVICE"], "an order")
    assert worker.receive() == (True, PROCESS.env)
    worker.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_is_noticed_and_named(number: signal.Signals) -> None:
    worker = PROCESS.hire()
    worker.start(tasks.die, int(number), "an order")
    worker.receive()
    worker.answer(None)
    assert worker.poll(None)
    with pytest.raises(WorkerDiedError, match=number.name):
        worker.receive()
    assert not worker.alive
    worker.close()


def test_an_error_that_can_not_be_sent_is_told_in_words() -> None:
    worker = PROCESS.hire()
    worker.start(tasks.fail_strangely, "loadable", "an order")
    worker.receive()
    worker.answer(None)
    with pytest.raises(RuntimeError, match="UnloadableError: unloadable"):
        worker.receive()
    PROCESS.release(worker)


def test_what_can_not_be_sent_says_how_to_write_it() -> None:
    worker = PROCESS.hire()
    with pytest.raises(CannotSendError, match=r"the factory can't be sent .* at the top of a module"):
        worker.start(tasks.echo, threading.Lock(), "the factory")
    worker.close()


def test_what_nobody_else_can_import_is_sent_with_its_code() -> None:
    worker = PROCESS.hire()
    worker.start(tasks.called, lambda: 42, "the factory")
    assert worker.receive() == (True, 42)
    worker.close()


def test_shared_memory_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CannotSendError, match=r"16.* of shared memory is not available\. Give .*--memory"):
        PROCESS.publish(np.ones(2_000_000), "ones")


def test_after_a_message_that_was_refused_smaller_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    fallocate = os.posix_fallocate

    def small(fd: int, start: int, size: int) -> None:
        if size > 1_000_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(fd, start, size)

    worker = PROCESS.hire()
    worker.start(tasks.echo, 0, "an order")
    worker.receive()
    monkeypatch.setattr(os, "posix_fallocate", small)
    for size, fits in ((10_000, True), (200_000, False), (10_000, True), (100_000, True), (10, True)):
        if not fits:
            with pytest.raises(CannotSendError):
                worker.answer(np.ones(size))
            continue
        worker.answer(np.ones(size))
        _, got = worker.receive()
        assert got.shape == (size,)
        del got
    worker.close()


def test_open_files_are_not_sent(tmp_path: Path) -> None:
    with (tmp_path / "text").open("w") as file, pytest.raises(CannotSendError, match="cannot pickle an open file"):
        PROCESS.publish([file, lambda: None], "a file")


def test_idle_workers_are_hired_again() -> None:
    dismiss()  # those that other tests have left
    worker = PROCESS.hire()
    worker.start(tasks.echo, 1, "an order")
    worker.receive()
    worker.answer(None)
    worker.receive()
    PROCESS.release(worker)
    assert PROCESS.hire() is worker
    worker.close()


def test_a_worker_says_which_answers_it_has_begun_with(worker: Any) -> None:
    assert not worker.starting
    worker.start(tasks.until_interrupted, None, "an order")
    assert worker.starting
    worker.receive()
    assert (worker.starting, worker.answers_begun) == (False, 0)
    worker.answer(None)
    worker.answer(None)  # ahead of its time: it is not begun with until the item before it is there
    while worker.answers_begun < 1:
        worker.poll(0.01)
    worker.poll(0.2)
    assert worker.answers_begun == 1
    worker.interrupt()
    worker.receive()
    while worker.answers_begun < 2:
        worker.poll(0.01)
    assert worker.receive() == (False, None)
    worker.start(tasks.echo, 1, "an order")
    assert worker.answers_begun == 0
    worker.receive()
    worker.answer(None)
    worker.receive()
