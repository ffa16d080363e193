"""`map` and `imap` over users' streams: loaders, iterables of batches, functions that return an iterator."""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import threads
from tests.replicas import models
from tests.replicas.test_pool import assert_answers, poisoned, rows
from torch.utils.data import DataLoader, TensorDataset

import modelfleet as mf
from modelfleet.replicas.mapping import STREAM_ROWS_AHEAD
from modelfleet.replicas.reading import MAX_READERS, MAX_UNCLAIMED_USERS
from modelfleet.replicas.row_limit import MAX_BATCHES


def batches(x: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (x[start : start + size] for start in range(0, len(x), size))


class Again:
    """Batches that can be read again and again, each in the memory of the one before."""

    def __init__(self, x: np.ndarray, size: int) -> None:
        self.x, self.size = x, size

    def __len__(self) -> int:
        raise OSError("nobody knows")

    def __iter__(self) -> Iterator[tuple[np.ndarray]]:
        memory = np.empty_like(self.x[: self.size])
        for batch in batches(self.x, self.size):
            part = memory[: len(batch)]
            part[:] = batch
            yield (part,)


def test_streams_of_every_kind_give_what_arrays_give() -> None:
    model = models.Marked()
    x = {mark: rows(mark, 20 + 7 * mark) for mark in range(10)}
    y = torch.arange(1000)
    data: dict[int, Any] = {
        0: lambda: iter(()),
        1: x[1],
        2: DataLoader(TensorDataset(torch.from_numpy(x[2]), y[: len(x[2])]), batch_size=7),
        3: DataLoader(TensorDataset(torch.from_numpy(x[3])), batch_size=100),
        4: [(batch, len(batch) * ["a label"]) for batch in batches(x[4], 9)],
        5: [{"x": batch} for batch in batches(x[5], 9)],
        6: lambda: batches(x[6], 1),
        7: batches(x[7], 30),
        8: Again(x[8], 5),
        9: lambda: [[batch, None] for batch in (x[9][:3], x[9][:0], x[9][3:])],
    }
    answers = mf.map(model, data, devices="cpu", batch_size=16)
    assert answers.failed == {}
    assert list(answers) == list(data)
    assert answers[0].shape == (0, 2)
    for mark in range(1, 10):
        assert_answers(model, x[mark], answers[mark])


def test_only_few_rows_are_read_ahead() -> None:
    model = models.Gated()
    size, large = 4, 20
    room = STREAM_ROWS_AHEAD * size * MAX_BATCHES
    read = itertools.count(1)
    most = 0

    def stream(mark: int) -> Iterator[np.ndarray]:
        nonlocal most
        for batch in batches(rows(mark, 600), large):
            ahead = large * next(read) - sum(model.batches)
            most = max(most, ahead)
            if ahead >= room:
                model.gate.set()
            yield batch

    data = {mark: lambda mark=mark: stream(mark) for mark in range(3)}
    answers = mf.map(model, data, devices="cpu", batch_size=size)
    assert [len(answer) for answer in answers.values()] == [600] * 3
    assert most <= room + len(data) * large


def test_a_slow_loader_stops_nobody() -> None:
    go_on = threading.Event()

    def slow() -> Iterator[np.ndarray]:
        yield rows(0, 3)
        assert go_on.wait(600), "nobody else was answered"
        yield rows(0, 2)

    model = models.Marked()
    fine = {mark: lambda mark=mark: batches(rows(mark, 50), 8) for mark in range(1, 3 * MAX_READERS)}
    came = []
    for user, answer in mf.imap(model, {"slow": slow, **fine}, devices="cpu", batch_size=8):
        came.append(user)
        if len(came) == len(fine):
            go_on.set()
        assert len(answer) == (5 if user == "slow" else 50)
    assert came[-1] == "slow"
    assert set(came) == {"slow", *fine}


def breaking(x: np.ndarray) -> Iterator[np.ndarray]:
    yield from batches(x, 4)
    raise OSError("the disk is gone")


def test_a_loader_that_raises_fails_its_user_alone_and_what_was_computed_is_kept() -> None:
    model = models.Marked()
    x = rows(1, 10)
    data: dict[str, Any] = {
        "broken": lambda: breaking(x),
        "at once": lambda: 1 / 0,
        "a number": lambda: 7,
        "no arrays": [(batch, 1) for batch in ({"x": "text"}, {"x": "more"})],
        "fine": lambda: batches(rows(2, 50), 8),
    }
    answers = mf.map(model, mf.each(data), devices="cpu", batch_size=8)
    assert_answers(model, rows(2, 50), answers["fine"])
    assert set(answers.failed) == set(data) - {"fine"}
    broken = answers.failed["broken"]
    assert isinstance(broken, mf.RowsError)
    assert isinstance(broken.__cause__, OSError)
    assert "the data of user 'broken' raised OSError after 10 rows: the disk is gone." in str(broken)
    assert broken.kept == tuple(range(10))
    assert_answers(model, x, broken.answers)
    assert isinstance(answers.failed["at once"].__cause__, ZeroDivisionError)
    assert "is a function that returned int" in str(answers.failed["a number"])
    assert "the data of user 'no arrays' raised InputError" in str(answers.failed["no arrays"])


def test_rows_that_fail_are_numbered_from_the_first_of_the_stream() -> None:
    model = models.Refusing()
    x = poisoned(1, 40, 3, 21)
    wrong = np.ones((2, 3), np.float32)  # too narrow
    data = {
        "poison": lambda: batches(x, 9),
        "wrong": lambda: iter([rows(2, 5), wrong, rows(2, 5)]),
        "fine": rows(3, 50),
    }
    answers = mf.map(model, data, devices="cpu", batch_size=16)
    assert list(answers) == ["fine"]
    poison, narrow = answers.failed["poison"], answers.failed["wrong"]
    assert isinstance(poison, mf.RowsError)
    assert isinstance(narrow, mf.RowsError)
    assert list(poison.rows) == [3, 21]
    assert poison.kept == tuple(row for row in range(40) if row not in (3, 21))
    assert_answers(model, x[list(poison.kept)], poison.answers)
    assert "2 of 40 rows of user 'poison' failed: row 3 (ValueError: poison), row 21" in str(poison)
    assert (list(narrow.rows), len(narrow.kept)) == ([5, 6], 10)


def test_every_row_of_a_stream_is_tried_however_many_fail_first() -> None:
    def long() -> Iterator[np.ndarray]:
        for _ in range(30):
            yield np.ones((8, 3), np.float32)  # too narrow
        yield from batches(rows(2, 50), 8)

    model = models.Marked()
    answers = mf.map(model, {"wrong": long, "fine": rows(1, 5)}, devices="cpu", batch_size=8)
    assert list(answers) == ["fine"]
    error = answers.failed["wrong"]
    assert isinstance(error, mf.RowsError)
    assert list(error.rows) == list(range(240))
    assert error.kept == tuple(range(240, 290))
    assert_answers(model, rows(2, 50), error.answers)


def test_streams_are_begun_as_answers_are_taken_and_closed_when_nobody_takes_more() -> None:
    before = threads()
    begun, closed = itertools.count(), itertools.count()
    many = threading.Event()

    def stream(mark: int) -> Iterator[np.ndarray]:
        if next(begun) >= MAX_READERS:
            many.set()
        try:
            yield from batches(rows(mark, 5), 2)
        finally:
            next(closed)

    data = {mark: lambda mark=mark: stream(mark) for mark in range(500)}
    answers = mf.imap(models.Marked(), data, devices="cpu")
    next(answers)
    assert many.wait(600)
    answers.close()  # type: ignore[attr-defined]
    assert threads() == before
    assert next(begun) == next(closed) <= 1 + MAX_UNCLAIMED_USERS


def test_the_rows_to_come_are_shown_as_far_as_they_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(TensorDataset(torch.from_numpy(rows(1, 40))), batch_size=8)
    data: dict[str, Any] = {"knows": loader, "does not": lambda: batches(rows(2, 20), 8), "array": rows(3, 5)}
    mf.map(models.Marked(), data, devices="cpu", progress=True)
    assert "65/65" in capsys.readouterr().out


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(TensorDataset(torch.ones(4, 5))),
        lambda: batches(rows(1, 5), 2),
        lambda: lambda: batches(rows(1, 5), 2),
    ],
)
def test_submit_takes_no_streams(make: Callable[[], Iterable[Any]]) -> None:
    with (
        mf.Replicas(models.Marked(), devices="cpu") as replicas,
        pytest.raises(mf.InputError, match=r"has to be read batch by batch; expected arrays .* mf\.map"),
    ):
        replicas.submit("ada", make())


def test_one_iterator_for_two_users_is_refused() -> None:
    batches = iter([rows(0, 3), rows(0, 4)])
    answers = mf.map(models.Marked(), {"ada": batches, "bob": batches}, devices="cpu", progress=False)
    assert len(answers["ada"]) == 7
    assert "'ada' and 'bob' have the same iterator" in str(answers.failed["bob"])
