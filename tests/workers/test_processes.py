"""Workers in processes: frozen, stale, forked from, left idle, and hired again and again."""

import gc
import importlib
import multiprocessing
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.helpers import all_weights, fit, mlp, toy
from tests.workers import tasks

import modelfleet as mf
from modelfleet.devices import Memory
from modelfleet.sharing import dispatcher
from modelfleet.types import Strategy
from modelfleet.workers import CannotSendError, WorkerDiedError, fork_server_client, process, shared_memory
from modelfleet.workers.parcels import Inbox, Outbox, SharedMemoryValue
from modelfleet.workers.process import ProcessPlace, ProcessWorker

PLACE = ProcessPlace("cpu:1", "cpu:1", {"OMP_NUM_THREADS": "1", "MODELFLEET_DEVICE": "cpu:1"})
LIMIT = 120.0


@pytest.fixture(autouse=True)
def none_idle() -> Iterator[None]:
    """Tests begin and end without idle workers."""
    process.dismiss()
    yield
    process.dismiss()


def until(condition: Callable[[], Any]) -> None:
    """Wait for something that has to happen."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def asked(worker: ProcessWorker, task: Any, order: Any = None) -> Any:
    """What a task yields first; it is ended then."""
    worker.start(task, order, "an order")
    _, item = worker.receive()
    worker.answer(None)
    worker.receive()
    return item


def kept() -> ProcessWorker:
    """A worker that has done something, and is idle now."""
    worker = PLACE.hire()
    asked(worker, tasks.echo, 1)
    PLACE.release(worker)
    return worker


def pid(worker: ProcessWorker) -> int:
    assert worker.alive
    assert worker.process.pid is not None
    return worker.process.pid


# --- frozen ------------------------------------------------------------------------------------------------------


def test_an_idle_worker_that_is_frozen_is_not_hired_again() -> None:
    worker = kept()
    os.kill(pid(worker), signal.SIGSTOP)
    other = PLACE.hire()
    assert other is not worker
    assert asked(other, tasks.echo, 2) == 2
    assert not worker.alive
    other.close()


def test_a_worker_that_is_frozen_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_SILENCE_LIMIT", 2.0)
    worker = PLACE.hire()
    worker.start(tasks.echo, 1, "an order")
    worker.receive()
    assert worker.silent_seconds < 2.0
    os.kill(pid(worker), signal.SIGSTOP)
    with pytest.raises(WorkerDiedError, match="is frozen: it has given no sign of life for"):
        worker.receive()
    worker.close()


def test_a_program_that_was_stopped_itself_does_not_take_its_worker_for_frozen() -> None:
    worker = PLACE.hire()
    asked(worker, tasks.echo, 1)
    worker._silence._stopwatch._last_read -= 1000.0  # as if nobody had looked for so long
    assert worker.silent_seconds < 2.0
    assert not worker.frozen
    worker.close()


def test_a_fork_server_that_is_frozen_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_SILENCE_LIMIT", 2.0)
    kept().close()
    process.dismiss()
    first = PLACE.hire()
    asked(first, tasks.echo, 1)
    home = first.process.server
    os.kill(home._process.pid, signal.SIGSTOP)
    stuck = PLACE.hire()
    stuck.start(tasks.echo, 1, "an order")
    with pytest.raises(WorkerDiedError, match="frozen"):
        stuck.receive()
    stuck.close()
    second = PLACE.hire()
    assert asked(second, tasks.echo, 2) == 2
    assert second.process.server is not home
    second.close()
    first.close()


def test_a_fork_server_that_is_killed_takes_its_workers_along_and_another_follows() -> None:
    worker = PLACE.hire()
    worker.start(tasks.echo, 1, "an order")
    worker.receive()
    there = psutil.Process(pid(worker))
    worker.process.server._process.kill()
    with pytest.raises(WorkerDiedError, match="the fork server, which starts workers and was killed by SIGKILL"):
        worker.receive()
    until(lambda: not there.is_running() or there.status() == psutil.STATUS_ZOMBIE)
    other = PLACE.hire()
    assert asked(other, tasks.echo, 2) == 2
    other.close()


class Freezer(mf.Callback):
    """Freezes a worker after the first epoch."""

    def __init__(self) -> None:
        self.frozen = 0

    def on_epoch_end(self, run: Any) -> None:
        if not self.frozen:
            self.frozen = process.hired_pids()[0]
            os.kill(self.frozen, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("processes", "cpu:0,cpu:1"), ("processes", "cpu"), ("data_parallel", "cpu:0,cpu:1")],
)
def test_a_fit_goes_on_when_a_worker_is_frozen(
    strategy: Strategy, devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last whole epoch, in another worker: the weights are those of a run without trouble."""
    monkeypatch.setattr(process, "IDLE_SILENCE_LIMIT", 2.0)
    monkeypatch.setattr(process, "BUSY_SILENCE_LIMIT", 4.0)
    fleets = []
    for where, given, callbacks in (("cpu", "auto", []), (devices, strategy, [Freezer()])):
        fleet = mf.Fleet.build(mlp, 2, devices=where)
        fleet.compile("sgd", "cross_entropy", lr=0.1)
        history = fit(fleet, toy(), epochs=3, batch_size=8, strategy=given, callbacks=callbacks)
        assert history.failed == {}
        fleets.append(all_weights(fleet))
    for name, weights in fleets[0].items():
        for key, tensor in weights.items():
            torch.testing.assert_close(fleets[1][name][key], tensor, rtol=1e-4, atol=1e-6)


def test_a_fit_for_which_no_worker_can_be_had_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fork_server_client.fork_server, "command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"]
    )
    fleet = mf.Fleet([mlp(4), mlp(5)])
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    with pytest.raises(mf.AllFailedError, match=r"starts workers and ended with code 3.* All 2 members failed"):
        fit(fleet, toy(), epochs=3, batch_size=8, strategy="processes")


def test_a_worker_that_does_not_begin_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "WORKER_POLICY", replace(dispatcher.WORKER_POLICY, start_timeout=1.0))
    monkeypatch.setattr(fork_server_client.fork_server, "command", lambda *_: ["sleep", "1000"])
    monkeypatch.setattr(multiprocessing.spawn, "get_executable", lambda: b"/bin/sleep")
    fleet = mf.Fleet([mlp(4), mlp(5)])
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    with pytest.raises(mf.AllFailedError, match="did not begin within 1 s"):
        fit(fleet, toy(), epochs=3, batch_size=8, strategy="processes")


# --- hired again -------------------------------------------------------------------------------------------------


def test_idle_workers_are_dismissed_and_the_fork_server_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_LIFETIME", 0.2)
    workers = [kept()]
    home = workers[0].process.server._process
    until(lambda: not workers[0].alive)
    assert process.idle_count() == 0
    workers.clear()
    until(lambda: fork_server_client._current is None)
    until(lambda: home.poll() is not None)


def test_a_worker_with_code_that_has_changed_since_is_not_hired_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "users_own_module.py"
    monkeypatch.syspath_prepend(tmp_path)
    answers = []
    for number in (1, 1, 22):
        module.write_text(f"def told(order):\n    yield {number}\n", encoding="ascii")
        if number == 1:
            os.utime(module, (1, 1))  # long ago, and unchanged the second time
        sys.modules.pop("users_own_module", None)
        importlib.invalidate_caches()
        task = importlib.import_module("users_own_module").told
        worker = PLACE.hire()
        answers.append((asked(worker, task), worker))
        PLACE.release(worker)
    sys.modules.pop("users_own_module", None)
    assert [told for told, _ in answers] == [1, 1, 22]
    assert answers[0][1] is answers[1][1]
    assert answers[2][1] is not answers[1][1]


def test_what_was_set_since_is_seen_by_a_worker_that_is_hired_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = kept()
    monkeypatch.setenv("MODELFLEET_OF_THIS_TEST", "set since")
    monkeypatch.chdir(tmp_path)
    again = PLACE.hire()
    assert again is worker
    assert asked(again, tasks.environment, ["MODELFLEET_OF_THIS_TEST"]) == {"MODELFLEET_OF_THIS_TEST": "set since"}
    assert asked(again, tasks.called, os.getcwd) == str(tmp_path)
    PLACE.release(again)
    monkeypatch.setenv("KERAS_BACKEND", "another")  # which is looked at once
    assert PLACE.hire() is not worker


def test_many_threads_hire_at_once() -> None:
    answers: list[int] = []

    def hire_one(number: int) -> None:
        worker = PLACE.hire()
        answers.append(asked(worker, tasks.echo, number))
        PLACE.release(worker)

    threads = [threading.Thread(target=hire_one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == list(range(8))


# --- processes of others -----------------------------------------------------------------------------------------


def test_a_forked_child_leaves_its_parents_workers_alone() -> None:
    idle, busy = kept(), ProcessPlace("cpu:0", "cpu:0").hire()
    busy.start(tasks.echo, np.ones(1000), "an order")
    busy.receive()
    shared_value = PLACE.publish(np.ones(1000), "ones")
    there = pid(busy)
    child = multiprocessing.get_context("fork").Process(target=_end_all, args=(busy, shared_value))
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 0
    busy.answer(np.ones(10))
    assert busy.receive()[1].sum() == 10
    assert PLACE.hire() is idle
    asked(idle, tasks.total, shared_value)
    # Nor does one that lives on keep them alive: it has not their sockets.
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    socket = os.readlink(f"/proc/self/fd/{busy._channel.fileno()}")
    until(lambda: socket not in _open_files(child.pid))
    child.kill()
    child.join()
    busy.close()
    until(lambda: not psutil.pid_exists(there))
    idle.close()


def _open_files(process: int | None) -> set[str]:
    found = set()
    for name in os.listdir(f"/proc/{process}/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{process}/fd/{name}"))
    return found


def _end_all(worker: ProcessWorker, value: SharedMemoryValue) -> None:
    """What the end of a program does, in a forked child."""
    worker.close()
    value.close()
    process.dismiss()
    assert process.idle_count() == 0
    assert not worker.alive


BARE = """
import os, sys
import numpy as np
report = os.fdopen(os.dup(1), "w")
for descriptor in map(int, sys.argv[1]):
    os.close(descriptor)
if "removed" in sys.argv:
    os.chdir(sys.argv[3])
    os.rmdir(sys.argv[3])
import modelfleet as mf
x = np.ones((3, 2))
answers = mf.map(lambda rows: rows * 2, {"a": x}, devices="cpu:0,cpu:1", progress=False)
with mf.Replicas(lambda rows: rows * 3, devices="cpu:0,cpu:1") as replicas:
    more = replicas.submit("a", x).result()
    standard = [os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2) if os.path.exists(f"/proc/self/fd/{n}")]
print(dict(answers)["a"].sum(), more.sum(), [s for s in standard if "socket" in s or "memfd" in s], file=report)
"""


@pytest.mark.parametrize("given", [["1"], ["12"], ["012"], ["", "removed"]], ids=" ".join)
def test_programs_without_standard_files_or_a_folder_have_workers(given: list[str], tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    command = [sys.executable, "-c", BARE, *given, str(tmp_path / "gone")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.split() == ["12.0", "18.0", "[]"], done.stderr


def test_a_worker_may_have_workers_and_forked_processes_of_its_own() -> None:
    worker = PLACE.hire()
    assert asked(worker, tasks.nested, 3) == [3, 3]
    worker.close()


def test_what_a_worker_has_started_ends_with_it() -> None:
    worker = PLACE.hire()
    worker.start(tasks.with_a_child, None, "an order")
    _, child = worker.receive()
    os.kill(pid(worker), signal.SIGKILL)
    until(lambda: not psutil.pid_exists(child))
    worker.close()


def test_threads_are_those_that_were_asked_for() -> None:
    place = ProcessPlace("cpu:0", "cpu:0", {"OMP_NUM_THREADS": "3"})
    worker = place.hire()
    assert asked(worker, tasks.called, torch.get_num_threads) == 3
    worker.close()


def test_workers_do_not_draw_the_same_random_numbers() -> None:
    workers = [PLACE.hire() for _ in range(2)]
    one, other = (asked(worker, tasks.called, tasks.drawn) for worker in workers)
    assert one != other
    for worker in workers:
        worker.close()


# --- memory and descriptors --------------------------------------------------------------------------------------


def test_descriptors_and_memory_stay_as_they_are_over_many_maps() -> None:
    model = torch.nn.Linear(64, 64)
    rows = {user: np.ones((50, 64), np.float32) for user in range(4)}
    counts, sizes = [], []
    for number in range(200):
        answers = mf.map(model, mf.each(rows), devices="cpu:0,cpu:1", batch_size=8, progress=False)
        assert len(answers) == 4
        del answers
        if number in (20, 199):
            gc.collect()
            worker = process._idle[0]
            counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{pid(worker)}/fd"))))
            sizes.append(_mappings())
    assert counts[0] == counts[1]
    assert sizes[0] == sizes[1]


def _mappings() -> int:
    """How many pieces of shared memory this process has mapped."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:modelfleet")


def test_an_outbox_gives_back_what_is_far_too_large() -> None:
    outbox, inbox = Outbox(), Inbox()
    for size in [4_000_000, 4_000_000, *[10] * 100]:
        parcel, descriptors = outbox.pack(np.ones(size), "ones")
        assert inbox.unpack(parcel, descriptors).shape == (size,)
    assert sum(len(piece.memory) for piece in outbox._segments if piece is not None) < 1_000_000


def test_more_than_is_free_is_refused_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "host_memory", lambda: Memory(10**9, 10**8))
    with pytest.raises(CannotSendError, match=r"160.*is not available; 100.* is free"):
        PLACE.publish(np.zeros(20_000_000), "zeros")


def test_a_large_order_without_arrays_crosses() -> None:
    worker = PLACE.hire()
    order = [str(number) for number in range(200_000)]
    assert asked(worker, tasks.echo, order) == order
    worker.close()
