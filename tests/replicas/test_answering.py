"""What a worker makes of a batch: answers for the good rows, an error for each bad one, in few calls."""

from typing import Any

import numpy as np
import pytest

from modelfleet.replicas import answering
from modelfleet.replicas.answering import Answerer, Reply


class Model:
    """Raises if there is a bad row in a batch; notes how large the batches were."""

    def __init__(self, *bad: int, pads: bool = False, room: int = 10**6, words: str = "bad") -> None:
        self.bad, self.pads, self.room, self.words = set(bad), pads, room, words
        self.sizes: list[int] = []

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        self.sizes.append(len(rows))
        if len(rows) > self.room:
            raise MemoryError("no room")
        found = sorted(self.bad & set(rows.tolist()))
        if found:
            raise ValueError(self.words.format(*found))
        return 2 * rows

    def out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def broken(self, error: BaseException) -> bool:
        return False

    def close(self) -> None:
        pass


def answers(reply: Reply) -> list[int]:
    for start, stop, outputs in reply.parts:
        assert outputs.tolist() == [2 * row for row in range(start, stop)]
    return [row for start, stop, _ in reply.parts for row in range(start, stop)]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "SEARCH_SECONDS", 1e9)


def test_each_bad_row_has_an_error_and_all_others_their_answer() -> None:
    bad = {3, 17, 18, 31}
    model = Model(*bad)
    reply = Answerer(model, 32, whole=False).answer(np.arange(70))
    assert set(reply.errors) == bad
    assert answers(reply) == [row for row in range(70) if row not in bad]
    assert (reply.left, reply.too_many_rows, reply.rows) == ((), 0, 66)
    assert len(model.sizes) < 32


def test_after_a_whole_bad_batch_halves_are_not_tried() -> None:
    model = Model(*range(100))
    asked = Answerer(model, 32, whole=False)
    calls = []
    for start in range(0, 1000, 32):
        model.sizes.clear()
        rows = np.arange(start, min(start + 32, 1000))
        reply = asked.answer(rows)
        assert [start + row for row in reply.errors] == [row for row in rows if row < 100]
        calls.append(len(model.sizes))
    assert calls[0] == 63  # all halves
    assert calls[1:3] == [33, 33]  # one in vain, and each row alone
    assert set(calls[4:]) == {1}  # good rows behind bad ones cost nothing


def test_a_search_that_takes_long_leaves_the_rest_to_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "SEARCH_SECONDS", 0.0)
    model = Model(5)
    asked = Answerer(model, 16, whole=False)
    todo, errors, good, replies = [(0, 40)], {}, [], 0
    while todo:
        start, stop = todo.pop()
        reply = asked.answer(np.arange(start, stop))
        replies += 1
        errors |= {start + row: error for row, error in reply.errors.items()}
        good += [start + row for first, last, _ in reply.parts for row in range(first, last)]
        todo += [(start + first, start + last) for first, last in reply.left]
    assert list(errors) == [5]
    assert sorted(good) == [row for row in range(40) if row != 5]
    assert replies > 4


def test_equal_errors_are_one_object_and_keep_no_traceback() -> None:
    reply = Answerer(Model(*range(8)), 8, whole=False).answer(np.arange(8))
    (error,) = {id(error): error for error in reply.errors.values()}.values()
    assert (type(error), str(error)) == (ValueError, "bad")
    assert error.__traceback__ is None
    assert "in __call__" in error.__notes__[0]
    assert "raise ValueError" in error.__notes__[0]


def test_of_many_different_errors_one_has_a_traceback_as_text() -> None:
    reply = Answerer(Model(*range(8), words="row {0} is bad"), 8, whole=False).answer(np.arange(8))
    assert [str(error) for error in reply.errors.values()] == [f"row {row} is bad" for row in range(8)]
    assert all(error.__traceback__ is None for error in reply.errors.values())
    assert sum(hasattr(error, "__notes__") for error in reply.errors.values()) == 1


def test_want_of_memory_is_no_rows_fault() -> None:
    reply = Answerer(Model(room=8), 32, whole=False).answer(np.arange(40))
    assert (reply.too_many_rows, reply.left, reply.errors, reply.parts) == (32, ((0, 32), (32, 40)), {}, ())
    reply = Answerer(Model(room=0), 32, whole=False).answer(np.arange(1))
    assert isinstance(reply.errors[0], MemoryError)


@pytest.mark.parametrize("trouble", [{}, {"room": 4}])
def test_a_whole_batch_is_asked_once_as_it_is(trouble: dict[str, Any]) -> None:
    model = Model(2, pads=True, **trouble)
    reply = Answerer(model, 8, whole=True).answer(np.arange(5))
    assert list(reply.errors) == [0, 1, 2, 3, 4]
    assert len(set(map(id, reply.errors.values()))) == 1
    assert (reply.left, reply.too_many_rows) == ((), 0)
    assert model.sizes == [5]


def test_others_are_padded_to_few_sizes_where_each_is_compiled() -> None:
    model = Model(pads=True)
    asked = Answerer(model, 8, whole=False)
    assert answers(asked.answer(np.arange(5))) == [0, 1, 2, 3, 4]
    assert answers(asked.answer(np.arange(11))) == list(range(11))
    assert model.sizes == [8, 8, 4]
