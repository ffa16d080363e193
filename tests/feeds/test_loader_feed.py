import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from modelfleet.each import each
from modelfleet.errors import InputError
from modelfleet.feeds import Batch, Feed, make_feed
from modelfleet.feeds.reading import read_ahead
from modelfleet.frameworks.torch import arrays


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "modelfleet-feed"] == []


def feed_of(data: Any, members: int, **options: Any) -> Feed:
    names = [f"m{member}" for member in range(members)]
    options = {"batch_size": None, "shuffle": True, **options}
    return make_feed(data, names=names, seeds=range(members), device="cpu", arrays=arrays, **options)


def loader_of(length: int, batch_size: int = 4, first: int = 0) -> DataLoader:
    y = torch.arange(first, first + length)
    return DataLoader(TensorDataset(torch.stack([y, -y], dim=1).float(), y), batch_size=batch_size)


def labels(batches: Any) -> list[Any]:
    return [batch.data[1].tolist() for batch in batches]


def batches_of(*lengths: int) -> Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]:
    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for length in lengths:
            yield np.ones((length, 2)), np.full(length, length)

    return read


def failing_after(good: int, error: BaseException) -> Callable[[], Iterator[Any]]:
    def read() -> Iterator[Any]:
        yield from batches_of(*[4] * good)()
        raise error

    return read


# One loader for all


def test_one_loader_is_read_once_and_shared() -> None:
    feed = feed_of(loader_of(10), 3)
    assert feed.shared
    assert feed.rows is None
    assert feed.steps is not None
    assert feed.steps.tolist() == [3, 3, 3]
    batches = list(feed.epoch(0))
    assert labels(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [batch.counts.tolist() for batch in batches] == [[4] * 3, [4] * 3, [2] * 3]
    assert all(batch.shared and batch.full for batch in batches)
    assert labels(feed.epoch(1)) == labels(batches)
    assert feed.select([2, 0]).first().counts.tolist() == [4, 4]


@pytest.mark.parametrize(
    "data",
    [
        batches_of(2, 3),
        lambda: [(np.ones((2, 2)), [2, 2]), (np.ones((3, 2)), [3, 3, 3])],
        [(np.ones((2, 2)), np.full(2, 2)), (np.ones((3, 2)), np.full(3, 3))],
        [[np.ones((2, 2)), np.full(2, 2)], [np.ones((3, 2)), np.full(3, 3)]],
    ],
    ids=["generator function", "function that returns a list", "list of tuples", "list of lists"],
)
def test_whatever_yields_batches_is_a_loader(data: Any) -> None:
    feed = feed_of(data, 2)
    for epoch in range(2):
        batches = list(feed.epoch(epoch))
        assert labels(batches) == [[2, 2], [3, 3, 3]]
        assert batches[0].data[0].dtype == torch.float32


def test_hugging_face_batches_come_as_dicts() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.ones(2, 3, dtype=torch.long)})
    data = feed_of(lambda: iter([batch]), 2).first().data
    assert type(data) is dict
    assert data["input_ids"].shape == (2, 3)


def test_a_loader_may_use_its_memory_again() -> None:
    def read() -> Iterator[np.ndarray]:
        buffer = np.zeros(2, dtype=np.float32)
        for value in range(5):
            buffer[:] = value
            yield buffer

    batches = list(feed_of(read, 2).epoch(0))
    assert [batch.data.tolist() for batch in batches] == [[value] * 2 for value in range(5)]


def test_looking_at_the_first_batch_does_not_consume_it() -> None:
    opened = []

    def read() -> Iterator[Any]:
        opened.append(len(opened))
        yield from batches_of(2, 3)()

    for data, members in ((read, 2), (each([read]), 1)):
        opened.clear()
        feed = feed_of(data, members)
        assert feed.first().size == feed.first().size == 2
        assert [batch.size for batch in feed.epoch(0)] == [2, 3]
        assert opened == [0]
        assert [batch.size for batch in feed.epoch(1)] == [2, 3]
        assert opened == [0, 1]


def test_a_resumed_epoch_skips_what_was_done() -> None:
    feed = feed_of(loader_of(18), 2)
    assert labels(feed.epoch(0, start=3)) == [[12, 13, 14, 15], [16, 17]]
    assert labels(feed.epoch(0, start=9)) == []
    feed = feed_of(each([loader_of(18), loader_of(6)]), 2)
    assert [batch.counts.tolist() for batch in feed.epoch(0, start=1)] == [[4, 2], [4, 0], [4, 0], [2, 0]]


def test_a_shared_loaders_error_is_raised_where_it_occurs() -> None:
    feed = feed_of(failing_after(2, OSError("disk gone")), 2)
    batches = feed.epoch(0)
    assert [next(batches).size, next(batches).size] == [4, 4]
    with pytest.raises(OSError, match="disk gone"):
        next(batches)


def test_after_an_error_the_next_epoch_begins_anew() -> None:
    tries = []

    def read() -> Iterator[Any]:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("not yet")
        yield from batches_of(2)()

    feed = feed_of(read, 2)
    with pytest.raises(OSError, match="not yet"):
        feed.first()
    assert [batch.size for batch in feed.epoch(0)] == [2]


@pytest.mark.parametrize("data", [lambda: iter([]), DataLoader(TensorDataset(torch.zeros(0)))])
def test_an_epoch_without_batches_is_an_error(data: Any) -> None:
    with pytest.raises(InputError, match=r"^data has yielded no batch"):
        list(feed_of(data, 2).epoch(0))
    with pytest.raises(InputError, match=r"^data has yielded no batch"):
        feed_of(data, 2).first()


def test_an_iterator_that_a_function_returns_twice_is_an_error() -> None:
    once = batches_of(2)()
    feed = feed_of(lambda: once, 2)
    assert len(list(feed.epoch(0))) == 1
    with pytest.raises(InputError, match="a new iterator at every call"):
        list(feed.epoch(1))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (batches_of(2)(), r"^data is of type generator, .* pass a function that returns one"),
        (iter([]), "only once"),
        (TensorDataset(torch.zeros(3)), r"type TensorDataset.* goes into a DataLoader"),
        ("folder/data", r"^data is of type str"),
        (None, r"^data is of type NoneType"),
        (7, r"^data is of type int"),
    ],
)
def test_what_is_neither_arrays_nor_a_loader(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        feed_of(data, 2)


def test_a_function_must_return_batches() -> None:
    with pytest.raises(InputError, match=r"^data is a function that returned int"):
        feed_of(lambda: 3, 2).first()


def test_the_loader_decides_the_batch_size() -> None:
    with pytest.raises(InputError, match="decides the size of its batches"):
        feed_of(loader_of(4), 2, batch_size=4)


def test_a_batch_is_checked_like_arrays() -> None:
    with pytest.raises(InputError, match=r"^data: \[1\] has 3 rows, but \[0\] has 2"):
        list(feed_of(lambda: [(np.ones(2), np.ones(3))], 2).epoch(0))


def test_the_number_of_steps_may_be_unknown() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.arange(5.0))

    feed = feed_of(DataLoader(Stream(), batch_size=2), 2)
    assert feed.steps is None
    assert [batch.data.tolist() for batch in feed.epoch(0)] == [[0, 1], [2, 3], [4]]


# A loader for each


def test_each_member_reads_its_own_loader() -> None:
    feed = feed_of(each([loader_of(10), loader_of(3, first=100), loader_of(6, 3, first=200)]), 3)
    assert not feed.shared
    assert feed.steps is not None
    assert feed.steps.tolist() == [3, 1, 2]
    for _ in range(2):
        batches = list(feed.epoch(0))
        assert [batch.counts.tolist() for batch in batches] == [[4, 3, 3], [4, 0, 3], [2, 0, 0]]
        assert [batch.size for batch in batches] == [4, 4, 2]
        assert not any(batch.full for batch in batches)
        for member, expected in enumerate([range(10), range(100, 103), range(200, 206)]):
            rows = [batch.data[1][member, : batch.counts[member]].tolist() for batch in batches]
            assert list(chain(*rows)) == list(expected)
        assert batches[0].data[1][1].tolist() == [100, 101, 102, 100]
        assert all((batch.data[0][..., 0] == batch.data[1]).all() for batch in batches)
    assert feed.failures == {}


def test_one_members_error_stays_its_own() -> None:
    feed = feed_of(each([batches_of(4, 4, 4), failing_after(1, OSError("disk gone")), batches_of(4, 4)]), 3)
    steps = feed.epoch(0)
    assert next(steps).counts.tolist() == [4, 4, 4]
    assert feed.failures == {}
    assert [batch.counts.tolist() for batch in steps] == [[4, 0, 4], [4, 0, 0]]
    assert {member: str(error) for member, error in feed.failures.items()} == {1: "disk gone"}
    assert [batch.counts.tolist() for batch in feed.epoch(1)] == [[4, 0, 4], [4, 0, 4], [4, 0, 0]]


@pytest.mark.parametrize("bad", [lambda: iter([]), lambda: 3, failing_after(0, OSError())])
def test_a_member_whose_data_never_comes(bad: Any) -> None:
    looked, ran = (feed_of(each([bad, batches_of(4)]), 2) for _ in range(2))
    assert looked.first().counts.tolist() == [0, 4]
    assert [batch.counts.tolist() for batch in ran.epoch(0)] == [[0, 4]]
    assert list(looked.failures) == list(ran.failures) == [0]
    alone = feed_of(each([bad]), 1)
    with pytest.raises(InputError, match="no member's data could be read") as caught:
        alone.first()
    assert caught.value.__cause__ is alone.failures[0]
    assert list(feed_of(each([bad]), 1).epoch(0)) == []


def test_those_whose_rows_are_of_one_form_come_together() -> None:
    wide = [(np.ones((2, 3)), np.ones(2, int))]
    feed = feed_of(each([wide, batches_of(2), batches_of(2)]), 3)
    (batch,) = feed.epoch(0)
    assert [piece.counts.tolist() for piece in batch.by_shape] == [[0, 2, 2], [2, 0, 0]]
    assert [piece.data[0].shape for piece in batch.by_shape] == [(3, 2, 2), (3, 2, 3)]
    assert not feed.failures


def test_selected_members_keep_their_loaders_and_failures() -> None:
    feed = feed_of(each([failing_after(1, OSError("gone")), loader_of(5), loader_of(9, first=50)]), 3)
    list(feed.epoch(0))
    chosen = feed.select([2, 0])
    assert {member: str(error) for member, error in chosen.failures.items()} == {1: "gone"}
    batches = list(chosen.epoch(1))
    assert [batch.counts.tolist() for batch in batches] == [[4, 0], [4, 0], [1, 0]]
    assert batches[0].data[1][0].tolist() == [50, 51, 52, 53]
    last = feed.select([2])
    assert last.steps is not None
    assert last.steps.tolist() == [3]


def test_arrays_and_loaders_do_not_mix() -> None:
    with pytest.raises(InputError, match=r"^data of member 'm1' is a loader, but data of member 'm0' is arrays"):
        feed_of(each([(np.ones(2), np.ones(2)), loader_of(4)]), 2)


# Reading ahead


def test_reading_ahead_is_bounded() -> None:
    read: list[int] = []
    third = threading.Event()

    def source() -> Iterator[int]:
        for number in range(10):
            read.append(number)
            if number == 2:
                third.set()
            yield number

    items = read_ahead(source(), depth=2)
    assert next(items) == 0
    assert third.wait(timeout=600)  # while 0 is in use, 1 and 2 are made ready
    assert read == [0, 1, 2]
    assert list(items) == list(range(1, 10))


def test_ctrl_c_in_the_training_leaves_a_source_that_hangs() -> None:
    end = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        end.wait()

    def passed_on(items: Generator[int, None, None]) -> Generator[int, None, None]:
        with closing(items):
            yield from items

    def train() -> None:
        with closing(passed_on(read_ahead(source()))) as items:
            assert next(items) == 0
            raise KeyboardInterrupt  # a step was running, not the wait for a batch

    with pytest.raises(KeyboardInterrupt):
        train()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "modelfleet-feed")
    end.set()
    thread.join()


def test_what_is_not_begun_starts_no_thread() -> None:
    feed_of(loader_of(4), 2).epoch(0)
    read_ahead(iter([1]))


@pytest.mark.parametrize("own", [False, True])
def test_stopping_early_ends_the_thread_and_closes_the_loader(own: bool) -> None:
    closed: list[str] = []

    def read() -> Iterator[Any]:
        try:
            while True:
                yield np.ones(2), np.ones(2)
        finally:
            closed.append(threading.current_thread().name)

    batches = feed_of(each([read]) if own else read, 1).epoch(0)
    assert isinstance(next(batches), Batch)
    assert any(thread.name == "modelfleet-feed" for thread in threading.enumerate())
    batches.close()
    assert closed == ["modelfleet-feed"]
    assert not any(thread.name == "modelfleet-feed" for thread in threading.enumerate())


def test_even_an_exit_in_the_thread_reaches_the_reader() -> None:
    with pytest.raises(SystemExit):
        list(feed_of(failing_after(1, SystemExit()), 2).epoch(0))


def test_worker_processes() -> None:
    loader = DataLoader(torch.arange(6.0), batch_size=2, num_workers=1, multiprocessing_context="spawn")  # type: ignore[arg-type]
    batches = feed_of(loader, 2).epoch(0)
    assert next(batches).data.tolist() == [0, 1]
    batches.close()
