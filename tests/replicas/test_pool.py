"""Replicas: many users' rows on every device, nobody's trouble another's, and nothing lost."""

import asyncio
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
import torch
from tests.replicas import models
from torch import nn

import modelfleet as mf
from modelfleet.replicas import driver
from modelfleet.replicas.replica_task import serve
from modelfleet.replicas.requests import Request
from modelfleet.workers.process import dismiss

TWO = "cpu:0,cpu:1"


@pytest.fixture(autouse=True, scope="module")
def no_idle_workers() -> Iterator[None]:
    yield
    dismiss()


def rows(mark: int, count: int, features: int = 4) -> np.ndarray:
    """Rows of user `mark`: the mark first, then numbers of their own."""
    drawn = np.random.default_rng(mark).normal(size=(count, features))
    return np.concatenate([np.full((count, 1), mark), drawn], axis=1).astype(np.float32)


def poisoned(mark: int, count: int, *poison: int) -> np.ndarray:
    made = rows(mark, count)
    made[list(poison), 1] = -666
    return made


def direct(model: nn.Module, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.from_numpy(x)).numpy()


def assert_answers(model: nn.Module, x: np.ndarray, answer: np.ndarray) -> None:
    np.testing.assert_array_equal(answer[:, 0], x[:, 0])  # nobody else's rows
    np.testing.assert_allclose(answer, direct(model, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", ["cpu", TWO])
def test_every_user_gets_their_own_answers(devices: str) -> None:
    model = models.Marked()
    data = {mark: rows(mark, 1 + 13 * mark) for mark in range(9)}
    with mf.Replicas(model, devices=devices, batch_size=8) as replicas:
        waiting = [(x, replicas.submit(f"user {mark}", x)) for mark, x in data.items()]
        for x, future in waiting:
            assert_answers(model, x, future.result())
    stats = replicas.stats()
    assert (stats.submitted, stats.answered, stats.failed, stats.cancelled) == (9, 9, 0, 0)
    assert sum(replica.rows for replica in stats.replicas.values()) == sum(map(len, data.values()))
    assert stats.users["user 3"].rows == 40
    assert all(name in str(stats) for name in devices.split(","))


def test_answers_can_be_awaited() -> None:
    model = models.Marked()
    data = [rows(mark, 5) for mark in range(20)]

    async def ask(replicas: mf.Replicas) -> list[Any]:
        return await asyncio.gather(*(replicas.submit(mark, x) for mark, x in enumerate(data)))

    with mf.Replicas(model, devices="cpu") as replicas:
        for x, answer in zip(data, asyncio.run(ask(replicas)), strict=True):
            assert_answers(model, x, answer)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.randn(6, 4)
    with mf.Replicas(model, devices="cpu") as replicas:
        answer = replicas.submit("ada", x).result()
    assert model.training
    assert isinstance(answer, np.ndarray)
    np.testing.assert_allclose(answer, direct(model, x.numpy()), rtol=1e-6)


def test_trees_go_in_and_come_out() -> None:
    left, right = np.ones((3, 2), np.float32), np.full((3, 2), 2, np.float32)
    with mf.Replicas(models.Pair(), devices="cpu", batch_size=2) as replicas:
        answer = replicas.submit("ada", {"left": left, "right": right}).result()
    np.testing.assert_array_equal(answer["sum"], left + right)
    np.testing.assert_array_equal(answer["first"], left[:, 0])


def test_rows_of_several_shapes_are_answered_beside_each_other() -> None:
    model = nn.Flatten(1)
    with mf.Replicas(model, devices="cpu") as replicas:
        shapes = [(2, 3), (4, 5), (1, 3), (2, 2, 2)]
        futures = [replicas.submit(number, np.ones(shape)) for number, shape in enumerate(shapes)]
        assert [future.result().shape for future in futures] == [(2, 3), (4, 5), (1, 3), (2, 4)]


# --- isolation ------------------------------------------------------------------------------------------------


def test_a_poison_row_fails_alone() -> None:
    model = models.Refusing()
    with mf.Replicas(model, devices="cpu", batch_size=32) as replicas:
        guilty = replicas.submit("guilty", poisoned(1, 20, 3, 17))
        others = {mark: replicas.submit(mark, rows(mark, 20)) for mark in range(2, 6)}
        with pytest.raises(mf.RowsError, match="2 of 20 rows of user 'guilty' failed: row 3") as caught:
            guilty.result()
        for mark, future in others.items():
            assert_answers(model, rows(mark, 20), future.result())
    assert set(caught.value.rows) == {3, 17}
    assert all(isinstance(error, ValueError) for error in caught.value.rows.values())
    kept = list(caught.value.kept)
    assert_answers(models_like(model), rows(1, 20)[kept], caught.value.answers)


def models_like(model: models.Marked) -> nn.Module:
    like = models.Marked()
    like.load_state_dict(model.state_dict())
    return like


def test_what_a_model_keeps_is_the_replicas_own() -> None:
    model = models.Keeping()
    with mf.Replicas(model, devices="cpu") as replicas:
        replicas.submit("ada", rows(1, 4)).result()
    assert not model.kept.any()
    assert not model.own.any()


def test_rows_are_those_that_were_submitted(gated: tuple[models.Gated, mf.Replicas]) -> None:
    model, replicas = gated
    x = rows(1, 3)
    future = replicas.submit("ada", x)
    x[:] = 9
    model.gate.set()
    assert_answers(model, rows(1, 3), future.result())


def test_a_model_may_work_in_place() -> None:
    x = poisoned(1, 8, 5)
    before = x.copy()
    with mf.Replicas(models.InPlace(), devices="cpu", batch_size=8) as replicas:
        with pytest.raises(mf.RowsError) as caught:
            replicas.submit("ada", x).result()
        np.testing.assert_array_equal(caught.value.answers, np.delete(2 * before, 5, axis=0))
    answers = mf.map(models.InPlace(), {"ada": rows(1, 8)}, devices="cpu")
    np.testing.assert_array_equal(answers["ada"], 2 * rows(1, 8))
    np.testing.assert_array_equal(x, before)


def test_a_model_may_give_the_same_memory_again() -> None:
    data = {mark: rows(mark, 300) for mark in range(4)}
    found = mf.map(models.Reusing(), data, devices="cpu", batch_size=16)
    for mark, x in data.items():
        np.testing.assert_array_equal(found[mark], x)


def test_functions_that_know_the_model_know_it_as_it_is_asked() -> None:
    model = models.Closed()
    with mf.Replicas(model, devices="cpu") as replicas:
        np.testing.assert_array_equal(replicas.submit("ada", rows(1, 5)).result(), rows(1, 5))
    assert model.drop.training


def test_not_a_number_stays_with_its_row() -> None:
    model = models.Marked()
    bad = rows(1, 10)
    bad[4, 2] = np.nan
    with mf.Replicas(model, devices="cpu") as replicas:
        first, second = replicas.submit("bad", bad), replicas.submit("good", rows(2, 10))
        assert np.isnan(first.result()).any(axis=1).nonzero()[0].tolist() == [4]
        assert_answers(model, rows(2, 10), second.result())


@pytest.mark.parametrize(("isolation", "most"), [("rows", 4), ("batch", 1), ("device", 1)])
def test_users_share_a_batch_only_where_they_may(isolation: Any, most: int) -> None:
    model = models.Mixing()
    with mf.Replicas(model, devices="cpu", batch_size=16, isolation=isolation) as replicas:
        answers = [replicas.submit(mark, rows(mark, 30)) for mark in range(4)]
        assert max(answer.result()[:, 0].max() for answer in answers) <= most


@pytest.mark.parametrize("options", [{"isolation": "device"}, {"balance": "sticky"}])
def test_users_stay_on_their_device(options: dict[str, Any]) -> None:
    with mf.Replicas(models.Mixing(), devices=TWO, batch_size=4, **options) as replicas:
        for _ in range(3):
            answers = [replicas.submit(mark, rows(mark, 20)) for mark in range(4)]
            homes = [set(answer.result()[:, 1]) for answer in answers]
            assert [len(home) for home in homes] == [1, 1, 1, 1]
            assert sorted(home.pop() for home in homes) == [0, 0, 1, 1]


# --- waiting --------------------------------------------------------------------------------------------------


@pytest.fixture
def gated() -> Iterator[tuple[models.Gated, mf.Replicas]]:
    """Replicas of which the only one is busy with a first request until its gate opens."""
    model = models.Gated()
    with mf.Replicas(model, devices="cpu", batch_size=8, max_queue=2) as replicas:
        replicas.submit("first", rows(0, 1))
        model.asked.wait()
        yield model, replicas
        model.gate.set()


def test_a_deadline_fails_what_still_waits(gated: tuple[models.Gated, mf.Replicas]) -> None:
    model, replicas = gated
    late, patient = replicas.submit("late", rows(1, 3), deadline=0.01), replicas.submit("patient", rows(2, 3))
    with pytest.raises(mf.DeadlineError, match=r"3 of 3 rows of user 'late' had no answer"):
        late.result()
    model.gate.set()
    assert_answers(model, rows(2, 3), patient.result())
    assert replicas.stats().failed == 1


def test_a_deadline_fails_what_is_under_way() -> None:
    model = models.Gated()
    with mf.Replicas(model, devices="cpu") as replicas:
        future = replicas.submit("ada", rows(1, 3), deadline=3.0)
        model.asked.wait()
        with pytest.raises(mf.DeadlineError):
            future.result()
        model.gate.set()
    assert replicas.stats().failed == 1


def test_what_is_cancelled_is_not_computed(gated: tuple[models.Gated, mf.Replicas]) -> None:
    model, replicas = gated
    gone, stays = replicas.submit("gone", rows(1, 3)), replicas.submit("stays", rows(2, 2))
    assert gone.cancel()
    model.gate.set()
    answer = stays.result()
    assert model.batches == [2, 1, 2]  # for the first rows it is asked before, with another number of them
    assert_answers(model, rows(2, 2), answer)
    with pytest.raises(CancelledError):
        gone.result()
    assert replicas.stats().cancelled == 1


def test_a_full_queue_says_when_to_come_again(gated: tuple[models.Gated, mf.Replicas]) -> None:
    model, replicas = gated
    waiting = [replicas.submit(mark, rows(mark, 3)) for mark in (1, 2)]
    with pytest.raises(mf.QueueFullError, match="2 requests wait, and max_queue=2") as caught:
        replicas.submit("one too many", rows(3, 3))
    assert caught.value.wait > 0
    model.gate.set()
    for mark, future in zip((1, 2), waiting, strict=True):
        assert_answers(model, rows(mark, 3), future.result())


def test_closing_answers_what_was_submitted() -> None:
    model = models.Marked()
    replicas = mf.Replicas(model, devices="cpu", batch_size=2)
    future = replicas.submit("ada", rows(1, 100))
    replicas.close()
    assert_answers(model, rows(1, 100), future.result(timeout=0))
    with pytest.raises(mf.ClosedError, match="user 'bob' submitted rows after the replicas were closed"):
        replicas.submit("bob", rows(2, 1))
    replicas.close()  # again


def test_closing_without_waiting_cancels() -> None:
    model = models.Gated()
    replicas = mf.Replicas(model, devices="cpu", batch_size=2)
    futures = [replicas.submit(mark, rows(mark, 5)) for mark in range(3)]
    model.asked.wait()
    model.gate.set()
    replicas.close(wait=False)
    stats = replicas.stats()
    assert stats.submitted == stats.answered + stats.cancelled == 3
    assert sum(future.cancelled() for future in futures) == stats.cancelled


def test_an_error_within_the_block_does_not_wait() -> None:
    model = models.Gated()
    futures = []

    def asked() -> None:
        with mf.Replicas(model, devices="cpu", batch_size=2) as replicas:
            futures.extend(replicas.submit(mark, rows(mark, 2)) for mark in range(3))
            model.asked.wait()
            model.gate.set()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asked()
    assert all(future.done() for future in futures)


# --- loss -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "words"), [(models.Deadly(), "killed by SIGKILL"), (models.Hanging(), "not answered after 5 s")]
)
def test_rows_that_take_replicas_down_fail_by_name(model: models.Marked, words: str) -> None:
    with mf.Replicas(model, devices=TWO, batch_size=2, timeout=5) as replicas:
        guilty = replicas.submit("guilty", poisoned(1, 6, 2))
        others = {mark: replicas.submit(mark, rows(mark, 25)) for mark in range(2, 6)}
        for mark, future in others.items():
            assert_answers(models_like(model), rows(mark, 25), future.result())
        with pytest.raises(mf.RowsError, match=re.escape("row 2 of user 'guilty'")) as caught:
            guilty.result()
    assert list(caught.value.rows) == [2]
    assert words in str(caught.value.rows[2])
    assert caught.value.kept == (0, 1, 3, 4, 5)
    assert sum(replica.restarts for replica in replicas.stats().replicas.values()) >= 3


def test_a_row_that_hangs_in_this_process_fails_by_name() -> None:
    before = set(threading.enumerate())
    with mf.Replicas(models.Hanging(), devices="cpu", batch_size=4, timeout=1.5) as replicas:
        guilty = replicas.submit("guilty", poisoned(1, 5, 2))
        other = replicas.submit("other", rows(2, 5))
        assert other.result().shape == (5, 2)
        with pytest.raises(mf.RowsError, match=re.escape("row 2 of user 'guilty'")) as caught:
            guilty.result()
    models.Hanging.let_go.set()
    for thread in set(threading.enumerate()) - before:  # those that were left behind
        thread.join(60)
    models.Hanging.let_go = threading.Event()
    assert list(caught.value.rows) == [2]


@pytest.mark.parametrize("trouble", [OSError(24, "Too many open files"), MemoryError()])
def test_trouble_of_this_process_loses_no_rows(trouble: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    model, raised = models.Marked(), threading.Event()
    reply = driver.Driver._reply

    def once(self: Any, timeout: float) -> Any:
        if not raised.is_set():
            raised.set()
            raise trouble
        return reply(self, timeout)

    monkeypatch.setattr(driver.Driver, "_reply", once)
    with mf.Replicas(model, devices="cpu", batch_size=4) as replicas:
        assert_answers(model, rows(1, 9), replicas.submit("ada", rows(1, 9)).result())
    assert raised.is_set()


def test_rows_for_which_there_is_no_shared_memory_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fallocate = os.posix_fallocate

    def small(fd: int, start: int, size: int) -> None:
        if size > 1_000_000:
            raise OSError(28, "No space left on device")
        fallocate(fd, start, size)

    monkeypatch.setattr(os, "posix_fallocate", small)
    model = models.Pair()
    with mf.Replicas(model, devices=TWO, batch_size=4) as replicas:
        large = np.ones((2, 300_000), np.float32)
        failing = replicas.submit("large", {"left": large, "right": large})
        small_rows = {"left": np.ones((9, 2), np.float32), "right": np.ones((9, 2), np.float32)}
        np.testing.assert_array_equal(replicas.submit("small", small_rows).result()["sum"], np.full((9, 2), 2))
        with pytest.raises(mf.RowsError, match="of shared memory is not available"):
            failing.result()


def test_answers_that_can_not_be_joined_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = Request.joined

    def full(self: Request) -> Any:
        if self.user == "large":
            raise MemoryError("no room")
        return joined(self)

    monkeypatch.setattr(Request, "joined", full)
    with mf.Replicas(models.Marked(), devices="cpu", batch_size=4) as replicas:
        large, small = replicas.submit("large", rows(1, 9)), replicas.submit("small", rows(2, 9))
        assert small.result().shape == (9, 2)
        with pytest.raises(MemoryError, match="no room"):
            large.result()


def test_a_row_after_which_a_device_can_not_go_on_fails_by_name() -> None:
    with mf.Replicas(models.Faulty(), devices="cpu", batch_size=4) as replicas:
        guilty, other = replicas.submit("guilty", poisoned(1, 5, 2)), replicas.submit("other", rows(2, 9))
        assert other.result().shape == (9, 2)
        with pytest.raises(mf.RowsError, match="device-side assert") as caught:
            guilty.result()
    assert list(caught.value.rows) == [2]
    assert replicas.stats().replicas["cpu"].restarts >= 3


def test_a_replica_that_has_worked_is_not_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Any] = []

    def busy_once(order: Any) -> Any:
        starts.append(order)
        if len(starts) == 2:
            raise OSError("another program has the memory")
        yield from serve(order)

    monkeypatch.setattr(driver, "serve", busy_once)
    with mf.Replicas(models.Faulty(), devices="cpu", batch_size=1) as replicas:
        with pytest.raises(mf.RowsError):
            replicas.submit("guilty", poisoned(1, 1, 0)).result()
        assert replicas.submit("other", rows(2, 3)).result().shape == (3, 2)
    assert len(starts) > 2


def test_a_model_that_ends_its_thread_is_told() -> None:
    with mf.Replicas(models.Leaving(), devices="cpu") as replicas:
        future = replicas.submit("ada", rows(1, 3))
        with pytest.raises(mf.FleetError, match="its thread was ended by SystemExit: 3"):
            future.result()


def test_a_deadline_that_never_comes_does_not_end_the_others() -> None:
    model = models.Gated()
    with mf.Replicas(model, devices="cpu", batch_size=1) as replicas:
        patient = replicas.submit("patient", rows(1, 1), deadline=float("inf"))
        model.asked.wait()
        hasty = replicas.submit("hasty", rows(2, 1), deadline=0.05)
        with pytest.raises(mf.DeadlineError):
            hasty.result()
        model.gate.set()
        assert_answers(model, rows(1, 1), patient.result())


def test_a_batch_that_is_too_large_for_the_memory_is_cut() -> None:
    model = models.Greedy()
    with mf.Replicas(model, devices="cpu", batch_size=32) as replicas:
        answer = replicas.submit("ada", rows(1, 50)).result()
    assert_answers(models_like(model), rows(1, 50), answer)
    assert replicas.stats().replicas["cpu"].rows == 50


def test_a_model_that_can_not_be_received_fails_the_requests_with_the_reason() -> None:
    with (
        mf.Replicas(models.Unloadable(), devices=TWO) as replicas,
        pytest.raises(mf.FleetError, match=r"no replica is left.*the weights' file is not on this machine"),
    ):
        replicas.submit("ada", rows(1, 3)).result()  # the replicas may have failed before
    assert all(replica.broken for replica in replicas.stats().replicas.values())


# --- where the weights are, and how exactly it is computed ----------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_alone_are_shared_by_the_replicas_of_a_machine(dtype: torch.dtype) -> None:
    with mf.Replicas(models.Where(dtype), devices=TWO, batch_size=1) as replicas:
        found = replicas.submit("ada", rows(1, 20)).result()
    np.testing.assert_array_equal(found, np.broadcast_to([1, 0, 0], (20, 3)))


def test_a_model_in_lower_precision_takes_rows_of_any() -> None:
    model = nn.Linear(4, 2).bfloat16()
    x = torch.randn(3, 4)
    with mf.Replicas(model, devices="cpu") as replicas, torch.no_grad():
        expected = model(x.bfloat16()).float().numpy()
        for given in (x, x.bfloat16(), x.numpy()):
            np.testing.assert_array_equal(replicas.submit("ada", given).result(), expected)


def test_lower_precision_where_it_is_asked_for() -> None:
    model, x = models.Marked(), rows(1, 64)
    with mf.Replicas(model, devices="cpu", precision="bf16") as replicas:
        answer = replicas.submit("ada", x).result()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = direct(model, x[:, :])
    np.testing.assert_array_equal(answer, expected)
    assert np.abs(answer - direct(model, x)).max() > 1e-4


# --- what can't be --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": "cuda:7"}, "device 'cuda:7' does not exist"),
        ({"devices": "gpu"}, "unknown kind of device in 'gpu'"),
        ({"balance": "random"}, "unknown balance 'random'"),
        ({"isolation": "user"}, "unknown isolation 'user'"),
        ({"precision": "int8"}, "unknown precision 'int8'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_queue": -1}, "max_queue=-1"),
        ({"timeout": 0}, "timeout=0"),
    ],
)
def test_options_are_checked_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(mf.InputError, match=re.escape(words)):
        mf.Replicas(models.Marked(), **options)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (3.0, "expected numbers with the rows first"),
        ("text", "expected numbers"),
        (None, "gave no arrays"),
        ({"a": np.ones((2, 1)), "b": np.ones((3, 1))}, "different numbers of rows: a (2, 1), b (3, 1)"),
        ([[1.0], [1.0, 2.0]], "made an array"),
    ],
)
def test_data_that_are_no_rows_are_refused(x: Any, words: str) -> None:
    with (
        mf.Replicas(models.Marked(), devices="cpu") as replicas,
        pytest.raises(mf.InputError, match=re.escape(words)),
    ):
        replicas.submit("ada", x)


def test_no_memory_for_even_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELFLEET_MEMORY", "1kB")
    with pytest.raises(mf.InputError, match=r"the weights take 32\.8 kB, and 1 kB are free"):
        mf.Replicas(models.Where(), devices="cpu")


def test_a_model_that_can_not_be_sent_says_how_to_write_one() -> None:
    model = models.Gated()  # it holds events, which belong to this process
    with pytest.raises(mf.StrategyError, match=r"the model can't be sent .* at the top of a module.* locks"):
        mf.Replicas(model, devices=TWO)


def test_a_model_whose_outputs_are_not_by_row_is_refused_with_the_shapes() -> None:
    with mf.Replicas(nn.Flatten(0), devices="cpu") as replicas:
        future = replicas.submit("ada", rows(1, 3))
        with pytest.raises(mf.RowsError, match=re.escape("expected one answer per row, (1, …)")):
            future.result()


def test_a_function_may_make_the_model() -> None:
    with mf.Replicas(make, devices="cpu") as replicas:
        assert replicas.submit("ada", rows(1, 3)).result().shape == (3, 2)


def make() -> nn.Module:
    return models.Marked()


def test_closing_without_waiting_does_not_wait_for_a_hung_replica() -> None:
    model = models.Hanging()
    replicas = mf.Replicas(model, devices=TWO, batch_size=1)
    fine = replicas.submit("fine", rows(2, 1))
    fine.result()  # a replica is up
    hung = replicas.submit("hung", poisoned(1, 1, 0))
    replicas.close(wait=False)  # its timeout is two minutes
    assert hung.cancelled()


@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1"])
def test_replicas_can_be_closed_in_a_future_s_callback(devices: str) -> None:
    replicas = mf.Replicas(lambda x: 2 * x, devices=devices)
    future = replicas.submit("ada", np.ones((2, 1)))
    future.add_done_callback(lambda _: replicas.close())
    np.testing.assert_array_equal(future.result(), [[2.0], [2.0]])
    replicas.close()
    with pytest.raises(mf.ClosedError):
        replicas.submit("ada", np.ones((2, 1)))
