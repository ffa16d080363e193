"""`map` and `imap`: a model over the data of many users."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import threads
from tests.replicas import models
from tests.replicas.test_pool import TWO, assert_answers, direct, poisoned, rows

import modelfleet as mf
from modelfleet.replicas.pool import Replicas
from modelfleet.workers import NoRoomError
from modelfleet.workers.inline import InlineWorker
from modelfleet.workers.process import hired_pids


@pytest.mark.parametrize("devices", ["cpu", TWO])
def test_every_users_rows_in_their_order(devices: str) -> None:
    model = models.Marked()
    data = {f"user {mark}": rows(mark, 7 * mark) for mark in range(12)}
    answers = mf.map(model, mf.each(data), devices=devices, batch_size=16)
    assert list(answers) == list(data)
    assert answers.failed == {}
    assert answers["user 0"].shape == (0, 2)
    for user, x in data.items():
        assert_answers(model, x, answers[user])


def test_arrays_of_other_kinds() -> None:
    model = models.Marked()
    data = {"torch": torch.from_numpy(rows(1, 5)), "list": rows(2, 5).tolist()}
    answers = mf.map(model, data, devices="cpu")
    for mark, user in enumerate(data, 1):
        assert_answers(model, rows(mark, 5), answers[user])


def test_a_user_in_trouble_is_named_and_the_rest_go_on() -> None:
    model = models.Refusing()
    data: dict[str, Any] = {
        "wrong": np.ones((40, 2)),
        "poison": poisoned(1, 9, 4),
        "text": "x",
        "fine": rows(2, 50),
    }
    answers = mf.map(model, mf.each(data), devices="cpu")
    assert list(answers) == ["fine"]
    assert set(answers.failed) == {"wrong", "poison", "text"}
    poison = answers.failed["poison"]
    assert isinstance(poison, mf.RowsError)
    assert poison.kept == (0, 1, 2, 3, 5, 6, 7, 8)
    assert len(poison.answers) == 8
    with pytest.raises(mf.FleetError, match="user 'poison' has no answers: 1 of 9 rows"):
        answers["poison"]
    with pytest.raises(KeyError):
        answers["nobody"]


def test_answers_come_as_they_are_done() -> None:
    model = models.Gated()
    data = {"large": rows(1, 64), "small": rows(2, 1)}
    stream = mf.imap(model, data, devices="cpu", batch_size=8)
    threading.Thread(target=lambda: (model.asked.wait(), model.gate.set())).start()
    first, second = list(stream)
    assert (first[0], second[0]) == ("small", "large")
    assert_answers(model, data["large"], second[1])


def test_only_a_few_users_wait_at_a_time() -> None:
    model = models.Gated()
    data = {mark: rows(mark, 64) for mark in range(100)}
    stream: Any = mf.imap(model, data, devices="cpu", batch_size=8)
    first: list[Any] = []
    asking = threading.Thread(target=lambda: first.append(next(stream)))
    asking.start()
    model.asked.wait()
    assert stream._replicas.stats().submitted < 10  # the others would only finish together with these
    model.gate.set()
    asking.join()
    found = dict([*first, *stream])
    assert len(found) == 100
    for mark, x in data.items():
        assert_answers(model, x, found[mark])


def test_a_stream_that_is_dropped_ends_its_replicas() -> None:
    before = threads()
    stream = mf.imap(models.Marked(), {"ada": rows(1, 5)}, devices="cpu")
    assert threads() > before
    del stream
    assert threads() == before


def test_where_no_replica_can_be_had_nothing_is_answered() -> None:
    with pytest.raises(mf.FleetError, match=r"no replica is left.*the weights' file is not on this machine"):
        mf.map(models.Unloadable(), {"ada": rows(1, 3), "bob": rows(2, 3)}, devices="cpu:0,cpu:1")


def test_users_of_whom_nothing_can_be_sent_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    send = InlineWorker.answer

    def refuse(self: Any, value: Any = None) -> None:
        if isinstance(value, np.ndarray) and value[0, 0] == 1:
            raise NoRoomError("too large")
        send(self, value)

    monkeypatch.setattr(InlineWorker, "answer", refuse)
    found = mf.map(models.Marked(), {"bad": rows(1, 2000), "good": rows(2, 3000)}, devices="cpu", batch_size=8)
    assert list(found) == ["good"]
    assert isinstance(found.failed["bad"], mf.RowsError)


PROMPT = """
import numpy as np
from torch import nn
import modelfleet as mf

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = lambda x: 2 * x

    def forward(self, x):
        return self.scale(x)

print(mf.map(Net(), {"ada": np.ones((3, 2), np.float32)}, devices="cpu:0,cpu:1")["ada"].sum())
"""


def test_classes_of_a_prompt_are_sent_with_their_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-"], input=PROMPT, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.stdout, done.stderr) == ("12.0\n", "")


def test_a_stream_that_is_left_ends_its_replicas() -> None:
    before = threads()
    stream = mf.imap(models.Marked(), {mark: rows(mark, 50) for mark in range(20)}, devices="cpu", batch_size=2)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    end = time.monotonic() + 60.0
    while threads() != before and time.monotonic() < end:  # one that computes is not waited for: it ends then
        time.sleep(0.01)
    assert threads() == before


@pytest.mark.parametrize(
    ("data", "words"),
    [(np.ones((3, 2)), "the data are a ndarray; expected mf.each"), ({}, "there are no users")],
)
def test_data_that_name_no_users_are_refused(data: Any, words: str) -> None:
    with pytest.raises(mf.InputError, match=words):
        mf.map(models.Marked(), data, devices="cpu")


def test_progress_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    mf.map(models.Marked(), {"ada": rows(1, 5)}, devices="cpu", progress=True)
    assert "5/5" in capsys.readouterr().out
    mf.map(models.Marked(), {"ada": rows(1, 5)}, devices="cpu", progress=False)
    assert capsys.readouterr().out == ""


def scale(params: Any, x: Any) -> Any:
    return x * params["w"]


@pytest.mark.parametrize("devices", ["cpu", TWO])
def test_models_of_jax(devices: str) -> None:
    jax_numpy = pytest.importorskip("jax.numpy")
    model = ({"w": jax_numpy.arange(5.0)}, scale)
    data = {mark: rows(mark, 9 + mark) for mark in range(5)}
    answers = mf.map(model, data, devices=devices, batch_size=8)
    for mark, x in data.items():
        np.testing.assert_allclose(answers[mark], x * np.arange(5.0), rtol=1e-6)


@pytest.mark.slow
def test_chaos_ten_thousand_rows_of_fifty_users_while_replicas_are_killed() -> None:
    model = models.Marked()
    data = {mark: rows(mark, 200) for mark in range(50)}
    kills: list[int] = []
    with Replicas(model, devices=TWO, max_queue=None, batch_size=16) as replicas:
        futures = {mark: replicas.submit(mark, x) for mark, x in data.items()}
        killer = threading.Thread(target=kill_every, args=(800, answered_rows(replicas), kills, futures))
        killer.start()
        for mark, x in data.items():
            answer = futures[mark].result()
            assert len(answer) == 200
            assert_answers(model, x, answer)
        killer.join()
    stats = replicas.stats()
    assert (stats.submitted, stats.answered, stats.failed, stats.cancelled) == (50, 50, 0, 0)
    assert sum(replica.rows for replica in stats.replicas.values()) == 10_000  # each row once
    assert len(kills) >= 10
    assert sum(replica.restarts for replica in stats.replicas.values()) >= len(kills) - 2


def answered_rows(replicas: Replicas) -> Callable[[], int]:
    return lambda: sum(replica.rows for replica in replicas.stats().replicas.values())


def kill_every(every: int, answered: Callable[[], int], kills: list[int], futures: dict[int, Any]) -> None:
    """Kill a worker, for real, whenever so many more rows were answered."""
    due = every
    while wait(futures.values(), timeout=0.01).not_done:
        if answered() >= due:
            workers = [pid for pid in hired_pids() if pid not in kills]  # one may be dead and not missed yet
            if workers:
                victim = workers[len(kills) % len(workers)]
                os.kill(victim, signal.SIGKILL)
                kills.append(victim)
                due += every


def test_plain_answers_for_plain_models() -> None:
    model = torch.nn.Linear(5, 2)
    answers = mf.map(model, mf.each([rows(1, 3), rows(2, 4)]), devices="cpu")
    assert list(answers) == ["0", "1"]
    np.testing.assert_allclose(answers["1"], direct(model, rows(2, 4)), rtol=1e-5)
