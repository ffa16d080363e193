"""What goes wrong around the rows: workers that die or freeze, memory that is short, models that never load."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.replicas import models
from tests.replicas.test_pool import TWO, assert_answers, models_like, no_idle_workers, poisoned, rows

import modelfleet as mf
from modelfleet.replicas import stats
from modelfleet.replicas.queue import Queue
from modelfleet.replicas.row_limit import RowLimit
from modelfleet.workers import NoRoomError
from modelfleet.workers.inline import InlineWorker

__all__ = ["no_idle_workers"]
LONG = 120  # seconds after which what has not come will not come


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for something that has to come."""
    end = time.monotonic() + LONG
    while not (found := condition()):
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.02)
    return found


def within(action: Callable[[], object], what: str) -> None:
    """Do something that has to end."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(LONG)
    assert not thread.is_alive(), f"{what} does not end"


# --- isolation ------------------------------------------------------------------------------------------------


def whole_jax(how: str) -> Any:
    jax = pytest.importorskip("jax")

    def apply(params: Any, x: Any) -> Any:
        if how == "mean":
            return x - x.mean(0)
        return jax.nn.softmax(x, 0) if how == "softmax" else jax.numpy.sort(x, 0)

    return {"unused": jax.numpy.zeros(1)}, apply


def whole_keras(how: str) -> Any:
    keras = pytest.importorskip("keras")
    ops = {
        "mean": lambda x: x - keras.ops.mean(x, 0),
        "softmax": lambda x: keras.ops.softmax(x, 0),
        "sort": lambda x: keras.ops.sort(x, 0),
    }

    class Layer(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return ops[how](x)

    return keras.Sequential([keras.layers.Input((5,)), Layer()])


@pytest.mark.parametrize("how", ["mean", "softmax", "sort"])
@pytest.mark.parametrize("make", [models.Whole, whole_jax, whole_keras])
def test_a_request_goes_through_the_model_alone_and_whole(make: Callable[[str], Any], how: str) -> None:
    sizes = [2, 3, 5, 8, 10, 20]
    data = [np.random.default_rng(size).normal(size=(size, 5)).astype(np.float32) for size in sizes]
    reference = models.Whole(how)
    with mf.Replicas(make(how), devices="cpu", batch_size=8, isolation="batch") as replicas:
        futures = [replicas.submit(user, x) for x in data for user in ("ada", "bob", "ada")]
        for number, future in enumerate(futures):
            x = torch.from_numpy(data[number // 3])
            expected = torch.cat([reference(x[start : start + 8]) for start in range(0, len(x), 8)])
            np.testing.assert_allclose(future.result(), expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("isolation", ["batch", "device"])
def test_whole_batches_on_several_devices(isolation: Any) -> None:
    x = rows(1, 300)
    model = models.Whole("mean")
    answers = mf.map(model, dict.fromkeys("abcd", x), devices=TWO, batch_size=16, isolation=isolation)
    expected = np.concatenate(
        [x[start : start + 16] - x[start : start + 16].mean(0) for start in range(0, 300, 16)]
    )
    assert answers.failed == {}
    for answer in answers.values():
        np.testing.assert_allclose(answer, expected, atol=1e-5)


def test_the_error_of_a_whole_batch_is_that_of_all_its_rows() -> None:
    with (
        mf.Replicas(models.Refusing(), devices="cpu", batch_size=4, isolation="batch") as replicas,
        pytest.raises(mf.RowsError) as caught,
    ):
        replicas.submit("ada", poisoned(1, 10, 5)).result()
    assert list(caught.value.rows) == [4, 5, 6, 7]
    with mf.Replicas(models.Greedy(), devices="cpu", batch_size=8, isolation="batch") as replicas:
        assert replicas.submit("ada", rows(1, 4)).result().shape == (4, 2)
        with pytest.raises(mf.RowsError, match="Tried to allocate too much"):
            replicas.submit("ada", rows(1, 5)).result()


# --- bad rows -------------------------------------------------------------------------------------------------


def test_a_hundred_bad_rows_in_front_lose_none_of_those_behind() -> None:
    model = models.Refusing()
    x = poisoned(1, 1000, *range(100))
    with mf.Replicas(model, devices="cpu", batch_size=32) as replicas:
        guilty, other = replicas.submit("guilty", x), replicas.submit("other", rows(2, 500))
        assert_answers(model, rows(2, 500), other.result())
        with pytest.raises(mf.RowsError) as caught:
            guilty.result()
    assert list(caught.value.rows) == list(range(100))
    assert caught.value.kept == tuple(range(100, 1000))
    assert_answers(models_like(model), x[100:], caught.value.answers)
    assert len({id(error) for error in caught.value.rows.values()}) == 1


# --- deaths ---------------------------------------------------------------------------------------------------


def processes(replicas: mf.Replicas) -> set[int]:
    """Where the replicas are, asked with a user for each: they are pinned to their device."""
    answers = [replicas.submit(user, rows(user, 1)).result(LONG) for user in range(len(replicas.stats().replicas))]
    return {int(answer[0, 1]) for answer in answers}


def restarts(replicas: mf.Replicas) -> int:
    return sum(replica.restarts for replica in replicas.stats().replicas.values())


def ready(replicas: mf.Replicas) -> bool:
    return all(health.state == "ready" for health in replicas.check().values())


def test_deaths_of_idle_workers_are_noticed_and_charged_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[Any] = []
    died = Queue.record_death
    monkeypatch.setattr(Queue, "record_death", lambda self, *given: charged.append(given) or died(self, *given))
    with mf.Replicas(models.Process(), devices=TWO, isolation="device") as replicas:
        until(lambda: ready(replicas), "both are ready")
        killed = 0
        for _ in range(4):  # more often, in all, than a replica may be started in vain
            for process in processes(replicas):
                os.kill(process, signal.SIGKILL)
                killed += 1
            until(lambda: restarts(replicas) == killed and ready(replicas), "they are noticed and back")  # noqa: B023
        assert len(processes(replicas)) == 2
    assert charged == []
    assert killed == 8


def test_a_frozen_idle_worker_is_noticed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelfleet.workers.process.IDLE_SILENCE_LIMIT", 4.0)
    monkeypatch.setattr(stats, "SILENCE_LIMIT", 2.0)
    with mf.Replicas(models.Process(), devices=TWO, isolation="device") as replicas:
        until(lambda: ready(replicas), "both are ready")
        before = processes(replicas)
        frozen = before.pop()
        os.kill(frozen, signal.SIGSTOP)
        seen = until(
            lambda: [h for h in replicas.check(timeout=0).values() if h.state == "silent"],
            "the silence is noticed",
        )
        assert "gave no sign of life" in seen[0].reason
        assert not seen[0]
        answers = [replicas.submit(user, rows(user, 1)) for user in range(6)]  # some wait for the frozen one
        assert frozen not in {int(answer.result(LONG)[0, 1]) for answer in answers}
        until(lambda: restarts(replicas) == 1 and ready(replicas), "it is replaced")


def test_a_death_is_charged_only_to_what_the_worker_was_at(monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[Any] = []
    died = Queue.record_death

    def noted(self: Queue, batch: Any, reason: str) -> Any:
        charged.append([piece.request.user for piece in batch.spans])
        return died(self, batch, reason)

    monkeypatch.setattr(Queue, "record_death", noted)
    with mf.Replicas(models.Deadly(), devices=TWO, batch_size=1, max_queue=None) as replicas:
        first = replicas.submit("fine", rows(2, 1)).result(LONG)  # one is up
        guilty = replicas.submit("guilty", poisoned(1, 1, 0))
        others = [replicas.submit(f"user {mark}", rows(mark, 1)) for mark in range(3, 60)]
        for other in others:
            assert other.result(LONG).shape == first.shape
        with pytest.raises(mf.RowsError, match="died repeatedly on row 0 of user 'guilty'"):
            guilty.result(LONG)
    assert charged == [["guilty"]] * 3


# --- ends -----------------------------------------------------------------------------------------------------


@pytest.fixture
def let_go() -> Iterator[None]:
    yield
    models.Stuck.let_go.set()
    models.Stuck.let_go = threading.Event()


@pytest.mark.parametrize("devices", ["cpu", TWO])
def test_a_model_that_never_loads_holds_up_nobody(devices: str, let_go: None) -> None:
    replicas = mf.Replicas(models.Stuck(), devices=devices)
    future = replicas.submit("ada", rows(1, 3))
    assert {health.state for health in replicas.check(timeout=0).values()} <= {"starting", "silent"}
    within(lambda: replicas.close(wait=False), "closing")
    assert future.cancelled()
    stream: Any = mf.imap(models.Stuck(), {"ada": rows(1, 3)}, devices=devices)
    within(stream.close, "dropping an imap")


@pytest.mark.parametrize("devices", ["cpu", TWO])
def test_a_model_that_is_not_loaded_in_time_is_told(devices: str, let_go: None) -> None:
    with pytest.raises(mf.FleetError, match=r"no replica is left.*did not begin within 1 s.*larger start_timeout"):
        mf.map(models.Stuck(), {"ada": rows(1, 3)}, devices=devices, start_timeout=1.0)


@pytest.mark.parametrize("busy", [False, True])
def test_frozen_workers_do_not_hold_up_an_end(busy: bool) -> None:
    replicas = mf.Replicas(models.Process(), devices=TWO, isolation="device", batch_size=1)
    found = processes(replicas)
    hung = [replicas.submit(user, poisoned(user, 1, 0)) for user in range(2)] if busy else []
    if busy:
        until(lambda: all(h.state == "busy" for h in replicas.check(timeout=0).values()), "they are busy")
    for process in found:
        os.kill(process, signal.SIGSTOP)
    within(lambda: replicas.close(wait=not busy), "closing")
    assert all(future.cancelled() for future in hung)
    for process in found:
        until(lambda process=process: gone(process), "the frozen are gone")


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


SCRIPT = """
import os, signal, sys, threading
import numpy as np
import modelfleet as mf

def stuck():
    threading.Event().wait(3600)

def process(x):
    return np.full((len(x), 1), os.getpid())

how = sys.argv[1]
replicas = mf.Replicas(process if how == "frozen" else stuck, devices="cpu:0,cpu:1")
future = replicas.submit("ada", np.ones((3, 2), np.float32))
if how == "frozen":
    os.kill(int(future.result()[0, 0]), signal.SIGSTOP)
elif how == "interrupted":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        replicas.close()
    except KeyboardInterrupt:
        print("interrupted", future.cancelled())
print("end")
"""


@pytest.mark.parametrize("how", ["loading", "frozen", "interrupted"])
def test_a_program_ends_whatever_its_replicas_are_at(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run([sys.executable, script, how], capture_output=True, text=True, timeout=LONG, check=False)
    assert done.stdout == ("interrupted True\nend\n" if how == "interrupted" else "end\n")
    assert (done.stderr, done.returncode) == ("", 0)


# --- memory ---------------------------------------------------------------------------------------------------


class Narrow:
    """A way to a worker that takes only so many rows at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        self.most, self.sizes = most, list[int]()
        send = InlineWorker.answer

        def answer(worker: Any, value: Any = None) -> None:
            if isinstance(value, np.ndarray):
                if len(value) > self.most:
                    raise NoRoomError(f"{len(value)} rows are too many")
                self.sizes.append(len(value))
            send(worker, value)

        monkeypatch.setattr(InlineWorker, "answer", answer)


def test_what_can_not_be_sent_at_once_is_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Narrow(monkeypatch, 3)
    model = models.Marked()
    with mf.Replicas(model, devices="cpu", batch_size=32) as replicas:
        assert_answers(model, rows(1, 100), replicas.submit("ada", rows(1, 100)).result())
        assert max(way.sizes) <= 3
        way.most = 0
        with pytest.raises(mf.RowsError, match="rows are too many") as caught:
            replicas.submit("ada", rows(1, 5)).result()
        assert len(caught.value.rows) == 5
        way.most = 100  # the memory is back
        while max(way.sizes) < 32:
            assert_answers(model, rows(1, 500), replicas.submit("ada", rows(1, 500)).result())


def test_what_must_not_be_sent_in_parts_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    Narrow(monkeypatch, 3)
    with mf.Replicas(models.Whole("mean"), devices="cpu", batch_size=8, isolation="batch") as replicas:
        assert replicas.submit("ada", rows(1, 3)).result().shape == (3, 5)
        with pytest.raises(
            mf.RowsError, match=r"a batch of 4 rows of user 'ada' can't be sent in parts.*too many"
        ):
            replicas.submit("ada", rows(1, 4)).result()


def test_less_is_given_where_memory_is_short_and_more_again_after_a_while() -> None:
    room = RowLimit(256)
    room.record_shortage(32)
    assert room.rows == 16
    room.record_shortage(16)
    room.record_shortage(1)
    assert room.rows == 1
    batches = 0
    while room.rows is not None:
        room.record_success(room.rows)
        batches += 1
    assert batches > 100  # each attempt may be in vain
    room.record_success(256)
    assert room.rows is None


class Secretive:
    """Can't be sent."""

    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


def secrets(x: np.ndarray) -> list[Any]:
    return [Secretive() if row[1] == -666 else float(row[0]) for row in x]


def test_answers_that_can_not_be_sent_say_so() -> None:
    with mf.Replicas(secrets, devices=TWO, batch_size=4) as replicas:
        with pytest.raises(mf.RowsError, match="it stays here"):
            replicas.submit("ada", poisoned(1, 4, 2)).result(LONG)
        assert list(replicas.submit("bob", rows(2, 3)).result(LONG)) == [2.0, 2.0, 2.0]


# --- what is kept ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", ["cpu", TWO])
def test_done_futures_keep_nothing_of_their_rows(devices: str) -> None:
    with mf.Replicas(models.Refusing(), devices=devices, batch_size=8) as replicas:
        kept, found = [], []
        for x in (rows(1, 20), rows(1, 3), poisoned(1, 20, 3)):
            kept.append(replicas._state.submit("ada", x, len(x)))
            found.append(weakref.ref(x))
        del x
        assert kept[0].result().shape == (20, 2)
        assert kept[1].result().shape == (3, 2)
        assert isinstance(kept[2].exception(), mf.RowsError)
        until(lambda: gc.collect() is not None and all(ref() is None for ref in found), "the rows are gone")
    pool = weakref.ref(replicas)
    del replicas
    until(lambda: gc.collect() is not None and pool() is None, "the replicas are gone")


@pytest.mark.parametrize("balance", ["least-busy", "sticky"])
def test_a_slow_consumer_of_arrays_bounds_what_is_computed_ahead(balance: Any) -> None:
    model = models.Gated()
    model.gate.set()
    data = {mark: rows(mark, 16) for mark in range(400)}
    stream: Any = mf.imap(model, data, devices="cpu", batch_size=4, balance=balance)
    found = [next(stream)]
    replicas = stream._replicas
    until(lambda: replicas._state.is_paused() and not replicas.stats().running_rows, "it is held up")
    computed = sum(model.batches)
    assert computed < 0.2 * 6400
    found += stream
    assert len(found) == 400
    assert sum(model.batches[1:]) == 6400  # the first was for another number of rows
    for mark, answer in found:
        assert_answers(model, data[mark], answer)


FORKED = """
import os, sys, threading, numpy as np, modelfleet as mf
def slow(rows):
    threading.Event().wait(0.2)
    return rows * 2
x = np.ones((1, 2))
replicas = mf.Replicas(slow, devices=sys.argv[1], batch_size=1)
replicas.submit("a", x).result()
stream = mf.imap(slow, {"a": x, "b": x}, devices=sys.argv[1], progress=False)
next(stream)
waiting = [replicas.submit("a", x) for _ in range(5)]
child = os.fork()
if not child:
    done = []
    for verb in (lambda: replicas.submit("a", x), lambda: replicas.submit("a", x, block=True),
                 lambda: replicas.update(slow), lambda: replicas.check(), lambda: replicas.stats(),
                 lambda: waiting[-1].result(), lambda: next(stream)):
        try:
            verb()
        except mf.ClosedError as error:
            done.append("forked" in str(error))
    stream.close()
    replicas.close()
    replicas.close(wait=False)
    done.append(mf.map(slow, {"a": x}, devices=sys.argv[1], progress=False)["a"].tolist() == [[2, 2]])
    print("child", done, flush=True)
    sys.exit()
found = [future.result().tolist() for future in waiting]
print("parent", os.waitpid(child, 0)[1], found == [[[2, 2]]] * 5, len(list(stream)))
replicas.close()
"""


@pytest.mark.parametrize("devices", ["cpu", "cpu:0,cpu:1"])
def test_a_forked_child_is_refused_its_parents_replicas(devices: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, devices],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.splitlines() == [f"child {[True] * 8}", "parent 0 True 1"]


def forking(rows: np.ndarray) -> np.ndarray:
    """A function whose child process comes back from it, too."""
    if (rows == 5).any() and not os.fork():
        if (rows == 5).all():
            raise ValueError("of the child")
        return -rows
    return 2 * rows


def test_a_process_that_a_model_forks_answers_nobody() -> None:
    with mf.Replicas(forking, devices=TWO, batch_size=4) as replicas:
        asked = []
        for number in range(40):
            for x in ([5.0, 5.0], [5.0, number], [100.0 + number] * 3):
                asked.append((np.array(x), replicas.submit(len(x), np.array(x))))
        for x, future in asked:
            np.testing.assert_array_equal(future.result(LONG), 2 * x)
