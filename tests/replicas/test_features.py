"""What replicas offer: waiting for room, priorities, full batches, updates, checks, partial answers."""

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.replicas import models
from tests.replicas.test_faults import LONG, ready, restarts, until
from tests.replicas.test_pool import TWO, assert_answers, gated, no_idle_workers, poisoned, rows
from tests.replicas.test_reading import batches, breaking

import modelfleet as mf
from modelfleet.replicas import reading

__all__ = ["gated", "no_idle_workers"]


# --- submit ---------------------------------------------------------------------------------------------------


def test_a_submit_may_wait_for_room(gated: tuple[models.Gated, mf.Replicas]) -> None:
    model, replicas = gated
    for mark in (1, 2):
        replicas.submit(mark, rows(mark, 3))
    with pytest.raises(mf.QueueFullError):
        replicas.submit("hasty", rows(3, 3), block=True, timeout=0.05)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(replicas.submit("patient", rows(3, 3), block=True)))
    waiting.start()
    assert not found
    model.gate.set()
    waiting.join(LONG)
    assert_answers(model, rows(3, 3), found[0].result(LONG))


def test_who_waits_for_room_hears_of_the_end(gated: tuple[models.Gated, mf.Replicas]) -> None:
    model, replicas = gated
    for mark in (1, 2):
        replicas.submit(mark, rows(mark, 3))
    found: list[Any] = []

    def ask() -> None:
        try:
            replicas.submit("late", rows(3, 3), block=True)
        except mf.ClosedError as error:
            found.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    until(lambda: replicas._state.room._waiters, "it waits")  # pyrefly: ignore
    model.gate.set()
    replicas.close(wait=False)
    waiting.join(LONG)
    assert "submitted rows after the replicas were closed" in str(found[0])


@pytest.mark.parametrize("options", [{"timeout": 1}, {"block": True, "timeout": -1}, {"priority": 0.5}])
def test_options_of_submit_are_checked(options: dict[str, Any]) -> None:
    name = "priority" if "priority" in options else "timeout"
    with mf.Replicas(models.Marked(), devices="cpu") as replicas, pytest.raises(mf.InputError, match=f"{name}="):
        replicas.submit("ada", rows(1, 1), **options)


def test_rows_of_higher_priority_come_first() -> None:
    model = models.Gated()
    with mf.Replicas(model, devices="cpu", batch_size=1) as replicas:
        replicas.submit("first", rows(0, 1))  # its model is asked twice for the first rows
        model.asked.wait()
        until(lambda: replicas.stats().running_rows == 1, "it is at the first")
        for mark, priority in ((1, 0), (2, -1), (3, 5), (4, 0), (5, 5)):
            replicas.submit(mark, rows(mark, 1), priority=priority)
        model.gate.set()
    # The replica may have been given a row ahead.
    assert [mark for mark in model.marks if mark > 1] == [3, 5, 4, 2]
    assert model.marks.index(1) < model.marks.index(4)


def test_a_batch_may_wait_until_it_is_full() -> None:
    model = models.Gated()
    model.gate.set()
    with mf.Replicas(model, devices="cpu", batch_size=4, batch_wait=3600.0) as replicas:
        futures = [replicas.submit(mark, rows(mark, 1)) for mark in range(4)]
        assert [future.result(LONG)[0, 0] for future in futures] == [0, 1, 2, 3]
        last = replicas.submit("last", rows(9, 3))
    assert len(last.result(LONG)) == 3  # the end does not wait for it to fill
    assert model.batches[-2:] == [4, 3]


def test_a_batch_that_is_not_full_goes_when_its_time_has_come() -> None:
    model = models.Gated()
    model.gate.set()
    with mf.Replicas(model, devices="cpu", batch_size=4, batch_wait=0.05) as replicas:
        for mark in range(3):
            assert replicas.submit(mark, rows(mark, 2)).result(LONG)[0, 0] == mark
    assert model.batches[-3:] == [2, 2, 2]


def test_a_list_of_batches_that_a_model_can_not_take_as_inputs_says_what_to_give() -> None:
    batches = [rows(1, 4), rows(2, 4)]
    answers = mf.map(lambda x: x.mean(1), {"ada": batches, "bob": iter(batches)}, progress=False)
    assert answers["bob"].shape == (8,)
    message = str(answers.failed["ada"])
    assert "The model was given a list of 2 as that many inputs. If these are batches, give iter(them)" in message


def test_what_a_stream_raised_ends_with_one_full_stop() -> None:
    def raising() -> Iterator[Any]:
        yield rows(1, 4)
        raise ValueError("there are no more batches.")

    answers = mf.map(lambda x: x, {"ada": raising}, progress=False)
    assert "ValueError after 4 rows: there are no more batches. Fix the loader" in str(answers.failed["ada"])


# --- updates and checks ---------------------------------------------------------------------------------------


def weights(replicas: mf.Replicas, users: int = 8) -> set[float]:
    futures = [replicas.submit(user, rows(user, 3)) for user in range(users)]
    return {float(weight) for future in futures for weight in future.result(LONG).ravel()}


@pytest.mark.parametrize("devices", ["cpu", TWO])
def test_an_update_changes_the_model_of_every_replica(devices: str) -> None:
    with mf.Replicas(models.Weighing(1.0), devices=devices, isolation="device", batch_size=4) as replicas:
        until(lambda: ready(replicas), "all are ready")
        assert weights(replicas) == {1.0}
        for weight in (2.0, 3.0):
            replicas.update(models.Weighing(weight))
            assert weights(replicas) == {weight}
        other = models.Marked()
        replicas.update(other)
        for user in range(4):
            assert_answers(other, rows(user, 3), replicas.submit(user, rows(user, 3)).result(LONG))


def test_a_request_under_way_at_an_update_that_two_models_answer_unlike_says_so() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def narrow(x: Any) -> Any:
        begun.set()
        go_on.wait(LONG)
        if (
            replicas._drivers[0].models.spare is not None
        ):  # so that the new model is used before all rows are answered
            until(lambda: replicas._state.version is not old, "the new model is there")
        return np.ones((len(x), 2))

    with mf.Replicas(narrow, devices="cpu", batch_size=4) as replicas:
        old = replicas._state.version
        future = replicas.submit("ada", rows(1, 4000))
        assert begun.wait(LONG)
        updating = threading.Thread(target=replicas.update, args=(lambda x: np.ones((len(x), 3)),))
        updating.start()
        until(lambda: replicas._state.next_version is not None, "the update is on its way")
        go_on.set()
        with pytest.raises(
            mf.InputError, match=r"model was replaced while the request was under way.*submit the request again"
        ):
            future.result(LONG)
        updating.join(LONG)
        assert replicas.submit("ada", rows(1, 9)).result(LONG).shape == (9, 3)


def test_no_batch_is_answered_by_two_models_while_one_takes_the_others_place() -> None:
    with mf.Replicas(
        models.Weighing(0.0), devices=TWO, isolation="batch", batch_size=8, max_queue=None
    ) as replicas:
        found: list[Any] = []
        stop = threading.Event()

        def ask(user: int) -> None:
            while not stop.is_set():
                found.append(replicas.submit(user, rows(user, 8)).result(LONG))

        asking = [threading.Thread(target=ask, args=(user,)) for user in range(4)]
        for thread in asking:
            thread.start()
        for weight in range(1, 6):
            replicas.update(models.Weighing(float(weight)))
            assert weights(replicas) == {float(weight)}
        stop.set()
        for thread in asking:
            thread.join(LONG)
    assert found
    assert all(len(np.unique(answer)) == 1 for answer in found)


def test_what_can_not_be_taken_leaves_the_old_model_everywhere() -> None:
    with mf.Replicas(models.Weighing(1.0), devices=TWO, isolation="device") as replicas:
        until(lambda: ready(replicas), "both are ready")
        with pytest.raises(mf.FleetError, match=r"could not be loaded, and the old one stays: OSError"):
            replicas.update(models.Unloadable())
        with pytest.raises(mf.StrategyError, match="can't be sent"):
            replicas.update(models.Gated())
        with pytest.raises(mf.InputError, match=r"is of python, and the replicas are of torch.*old model stays"):
            replicas.update(double)
        assert weights(replicas) == {1.0}
        replicas.update(models.Weighing(2.0))
        assert weights(replicas) == {2.0}
        assert restarts(replicas) == 0
    with pytest.raises(mf.ClosedError):
        replicas.update(models.Weighing(3.0))


def double(x: np.ndarray) -> np.ndarray:
    return 2 * x


def test_a_replica_that_starts_later_has_the_new_model() -> None:
    with mf.Replicas(models.Process(), devices=TWO, isolation="device") as replicas:
        until(lambda: ready(replicas), "both are ready")
        victims = {int(replicas.submit(user, rows(user, 1)).result(LONG)[0, 1]) for user in range(2)}
        replicas.update(models.Weighing(7.0))
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        until(lambda: restarts(replicas) == 2 and ready(replicas), "they are back")
        assert weights(replicas) == {7.0}


def test_a_check_tells_how_each_replica_is(gated: tuple[models.Gated, mf.Replicas]) -> None:
    model, replicas = gated
    assert replicas.check()["cpu"].state == "busy"
    assert all(replicas.check().values())
    model.gate.set()
    until(lambda: replicas.check()["cpu"].state == "ready", "it is ready")
    with mf.Replicas(models.Unloadable(), devices=TWO) as lost:
        until(lambda: all(h.state == "given up" for h in lost.check().values()), "they are given up")
        assert "the weights' file is not on this machine" in lost.check()["cpu:1"].reason
        assert not any(lost.check().values())
    with pytest.raises(mf.ClosedError):
        lost.check()


# --- partial answers ------------------------------------------------------------------------------------------


def test_endless_streams_have_answers() -> None:
    model = models.Marked()
    read = [0] * 12

    def endless(mark: int) -> Iterator[np.ndarray]:
        for number in itertools.count():
            read[mark] += 1
            yield rows(100 * mark + number % 50, 8)

    users = {mark: lambda mark=mark: endless(mark) for mark in range(12)}  # more than are read at once otherwise
    assert len(users) > reading.MAX_READERS
    given = [0] * 12
    stream: Any = mf.imap(model, users, devices="cpu", batch_size=4, partial=True)
    while min(given) < 20:
        mark, answer = next(stream)
        assert_answers(model, rows(100 * mark + given[mark] % 50, 8), answer)
        given[mark] += 1
        assert read[mark] - given[mark] <= 10  # a slow consumer holds it up
    stream.close()


def test_partial_answers_tell_errors_and_ends() -> None:
    model = models.Refusing()
    data: dict[str, Any] = {
        "array": rows(1, 10),
        "poison": lambda: batches(poisoned(2, 20, 9), 4),
        "broken": lambda: breaking(rows(3, 8)),
        "text": "x",
        "empty": lambda: iter(()),
    }
    found: dict[str, list[Any]] = {user: [] for user in data}
    for user, answer in mf.imap(model, data, devices="cpu", batch_size=4, partial=True):
        found[str(user)].append(answer)
    assert all(answers.pop() is None for answers in found.values())
    assert_answers(model, rows(1, 10), found["array"][0])
    assert found["empty"] == []
    assert [type(answer) for answer in found["text"]] == [mf.InputError]
    first, second, third, *rest = found["poison"]
    assert_answers(model, poisoned(2, 20, 9)[:8], np.concatenate([first, second]))
    assert isinstance(third, mf.RowsError)
    assert (list(third.rows), third.kept) == ([9], (8, 10, 11))
    assert_answers(model, poisoned(2, 20, 9)[12:], np.concatenate(rest))
    *answers, error = found["broken"]
    assert_answers(model, rows(3, 8), np.concatenate(answers))
    assert isinstance(error.__cause__, OSError)
