import tracemalloc
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelfleet.each import Each, each
from modelfleet.errors import InputError
from modelfleet.feeds import Feed, StoredArrays, make_feed
from modelfleet.feeds import arrays as array_feed
from modelfleet.feeds.orders import OrderAhead, order_of
from modelfleet.frameworks.torch import arrays


def feed_of(
    data: Any,
    members: int,
    *,
    batch_size: int | Each | None = None,
    shuffle: bool = True,
    seeds: Sequence[int] | None = None,
    epochs_done: np.ndarray | None = None,
) -> Feed:
    return make_feed(
        data,
        names=[f"m{member}" for member in range(members)],
        seeds=seeds or range(members),
        batch_size=batch_size,
        shuffle=shuffle,
        device="cpu",
        arrays=arrays,
        epochs_done=epochs_done,
    )


def rows_of(length: int, member: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Data whose every value tells the member and the row."""
    row = np.arange(length) + 1_000 * member
    return np.stack([row, -row], axis=1).astype(np.float32), row


def seen(feed: Feed, member: int, epoch: int = 0, start: int = 0) -> list[list[int]]:
    """The real rows of one member, batch by batch."""
    batches = []
    for batch in feed.epoch(epoch, start=start):
        x, y = batch.data
        assert (x[..., 0] == y).all()
        assert (x[..., 1] == -y).all()
        y = y if batch.shared else y[member]
        batches.append(y[: batch.counts[member]].tolist())
    return batches


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 17), st.booleans())
def test_every_member_sees_exactly_its_own_rows_as_if_alone(
    lengths: list[int], batch_size: int, shuffle: bool
) -> None:
    members = len(lengths)
    data = each([rows_of(length, member) for member, length in enumerate(lengths)])
    feed = feed_of(data, members, batch_size=batch_size, shuffle=shuffle)
    assert feed.rows is not None
    assert feed.rows.tolist() == lengths
    assert feed.steps is not None
    assert feed.steps.tolist() == [-(-length // batch_size) for length in lengths]
    assert len(list(feed.epoch(1))) == feed.steps.max()
    for member, length in enumerate(lengths):
        own = seen(feed, member, epoch=1)
        assert sorted(chain(*own)) == list(range(1_000 * member, 1_000 * member + length))
        alone = feed_of(rows_of(length, member), 1, batch_size=batch_size, shuffle=shuffle, seeds=[member])
        assert own[: feed.steps[member]] == seen(alone, 0, epoch=1)
        assert not any(own[feed.steps[member] :])
    for batch in feed.epoch(1):
        assert batch.size == batch.counts.max() <= batch_size
        assert batch.full == all(batch.counts == batch.size)
        if not batch.shared:
            for member, length in enumerate(lengths):  # padding too is the member's own
                assert set(batch.data[1][member].tolist()) <= set(rows_of(length, member)[1].tolist())


def test_shared_data_is_shuffled_for_every_member() -> None:
    feed = feed_of(rows_of(50), 3, batch_size=8)
    assert not feed.shared
    orders = {tuple(chain(*seen(feed, member, epoch))) for member in range(3) for epoch in range(2)}
    assert len(orders) == 6
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(50))}


def test_without_shuffling_all_share_batches_that_are_nobodys_memory() -> None:
    x = torch.arange(10.0)
    feed = feed_of({"x": x}, 3, batch_size=4, shuffle=False)
    batches = list(feed.epoch(0))
    assert feed.shared
    assert [batch.data["x"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [batch.counts.tolist() for batch in batches] == [[4] * 3, [4] * 3, [2] * 3]
    assert all(batch.full for batch in batches)
    batches[0].data["x"].fill_(7)  # as a model may that writes into its input
    assert x.tolist() == list(range(10))
    assert feed.first().data["x"].tolist() == [0, 1, 2, 3]


def test_an_array_given_to_several_members_is_stored_once() -> None:
    x = np.arange(20, dtype=np.float32)
    data = each([(x, x * 1), (x, x * 2), (x, x * 3)])
    feed = feed_of(data, 3, batch_size=6)
    assert isinstance(feed, array_feed.ArrayFeed)
    assert [len(leaf) for leaf in feed._stored] == [20, 60]
    for batch in feed.epoch(0):
        x_rows, y_rows = batch.data
        for member in range(3):
            assert torch.equal(y_rows[member], x_rows[member] * (member + 1))


def test_the_same_data_set_for_each_is_shared() -> None:
    data = rows_of(10)
    assert feed_of(each([data, data]), 2, shuffle=False).shared
    assert not feed_of(each([data, rows_of(10)]), 2, shuffle=False).shared


def test_any_tree_of_arrays() -> None:
    data = ({"a": np.zeros((6, 2)), "b": None}, [torch.ones(6, dtype=torch.float64), [1, 2, 3, 4, 5, 6]])
    batch = feed_of(data, 2, batch_size=4).first()
    inputs, (ones, numbers) = batch.data
    assert inputs["a"].shape == (2, 4, 2)
    assert inputs["b"] is None
    assert ones.dtype == torch.float64
    assert numbers.dtype == torch.int64


def test_tables_as_arrays() -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    data = (pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]}), polars.Series([5, 6]))
    x, y = feed_of(data, 1, shuffle=False).first().data
    assert x.tolist() == [[1, 3], [2, 4]]
    assert y.tolist() == [5, 6]


def test_the_batch_size_is_32_unless_given() -> None:
    assert [batch.size for batch in feed_of(rows_of(70), 2).epoch(0)] == [32, 32, 6]
    assert feed_of(rows_of(7), 2).first().size == 7


def test_a_batch_size_for_each() -> None:
    feed = feed_of(rows_of(10), 2, batch_size=each([2, 5]))
    assert [batch.counts.tolist() for batch in feed.epoch(0)] == [[2, 5], [2, 5], [2, 0], [2, 0], [2, 0]]
    for member, size in enumerate([2, 5]):
        alone = feed_of(rows_of(10), 1, batch_size=size, seeds=[member])
        assert [rows for rows in seen(feed, member) if rows] == seen(alone, 0)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_resumed_epoch_goes_on_where_it_was(shuffle: bool) -> None:
    feed = feed_of(rows_of(30), 2, batch_size=4, shuffle=shuffle)
    assert seen(feed, 1, epoch=3, start=5) == seen(feed, 1, epoch=3)[5:]
    assert seen(feed, 1, epoch=3, start=8) == []


def test_selected_members_see_what_they_would_have_seen() -> None:
    data = each([rows_of(length, member) for member, length in enumerate([9, 30, 4])])
    feed = feed_of(data, 3, batch_size=4)
    chosen = feed.select([2, 0])
    assert chosen.rows is not None
    assert chosen.rows.tolist() == [4, 9]
    assert chosen.steps is not None
    assert chosen.steps.tolist() == [1, 3]
    assert len(list(chosen.epoch(2))) == 3
    assert seen(chosen, 0, epoch=2)[0] == seen(feed, 2, epoch=2)[0]
    assert seen(chosen, 1, epoch=2) == seen(feed, 0, epoch=2)[:3]
    again = chosen.select([1])
    assert seen(again, 0, epoch=2) == seen(feed, 0, epoch=2)[:3]
    assert not again.shared


@pytest.mark.parametrize("lengths", [[9, 9, 9], [9, 30, 4]])
def test_shuffles_count_on_from_the_epochs_a_member_has_done(lengths: list[int]) -> None:
    data = each([rows_of(length, member) for member, length in enumerate(lengths)])
    fresh = feed_of(data, 3, batch_size=4)
    later = feed_of(data, 3, batch_size=4, epochs_done=np.array([0, 2, 5]))
    for member, done in enumerate([0, 2, 5]):
        assert seen(later, member, epoch=1) == seen(fresh, member, epoch=1 + done)
    assert seen(later.select([2]), 0, epoch=1) == [rows for rows in seen(fresh, 2, epoch=6) if rows]


def test_the_first_batch_has_the_shapes_of_the_epoch() -> None:
    for shuffle in (True, False):
        feed = feed_of(rows_of(9), 2, batch_size=4, shuffle=shuffle)
        first, real = feed.first(), next(feed.epoch(0))
        assert [leaf.shape for leaf in first.data] == [leaf.shape for leaf in real.data]
        assert (first.shared, first.counts.tolist()) == (real.shared, real.counts.tolist())


def test_long_epochs_upload_their_indices_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = feed_of(rows_of(30), 3, batch_size=4)
    whole = seen(feed, 2)
    monkeypatch.setattr(array_feed, "_MAX_INDICES", 30)
    assert seen(feed, 2) == whole
    assert seen(feed, 2, start=3) == whole[3:]


def test_one_long_member_does_not_widen_the_shuffles_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_feed, "_MAX_INDICES", 1)
    feed = feed_of(each([rows_of(100_000), *(rows_of(10) for _ in range(200))]), 201, batch_size=8)
    tracemalloc.start()
    next(feed.epoch(0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6  # 201 shuffles of 100,000 rows are 161 MB


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((np.zeros((4, 2)), np.zeros(3)), r"^data: \[1\] has 3 rows, but \[0\] has 4\."),
        ({"x": np.zeros(4), "y": {"z": np.zeros(5)}}, r"^data: y\.z has 5 rows, but x has 4\."),
        ((np.zeros((0, 2)), np.zeros(0)), r"^data has no rows"),
        (np.zeros(0), r"^data has no rows"),
        ((np.zeros(2), np.array([1, None])), r"^data: \[1\] has dtype object"),
        ((np.zeros(2), ["cat", "dog"]), r"^data: \[1\] has dtype <U3"),
        (([[1.0, 2.0], [3.0]], [0, 1]), r"^data: \[0\] is a list whose rows differ in length"),
        ((np.zeros(2), 3), r"^data: \[1\] is of type int"),
        ((np.zeros(2), np.array(3.0)), r"^data: \[1\] is a single number"),
        ((None, {}), r"^data holds no arrays"),
        ([], r"^data holds no arrays"),
    ],
)
def test_arrays_that_do_not_fit(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        feed_of(data, 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((np.zeros((3, 2)), np.zeros(2)), r"^data of member 'm1': \[1\] has 2 rows, but \[0\] has 3\."),
        ((np.zeros((0, 2)), np.zeros(0)), r"^data of member 'm1' has no rows"),
        (
            (np.zeros((3, 4)), np.zeros(3)),
            r"'m1' does not fit .*'m0': a row of \[0\] is \(4,\), expected \(2,\)",
        ),
        ((np.zeros((3, 2)), np.zeros(3, int)), r"'m1' .*\[1\] is torch.int64, expected torch.float32"),
        ({"x": np.zeros((3, 2))}, r"'m1' .*it holds x, expected \[0\], \[1\]"),
    ],
)
def test_one_members_arrays_do_not_fit(wrong: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        feed_of(each([(np.zeros((3, 2)), np.zeros(3)), wrong]), 2)


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, True, "32"])
def test_a_batch_size_that_is_none(batch_size: Any) -> None:
    with pytest.raises(InputError, match=r"^batch_size is .* whole number"):
        feed_of(rows_of(3), 2, batch_size=batch_size)
    with pytest.raises(InputError, match=r"^batch_size of member 'm1' is"):
        feed_of(rows_of(3), 2, batch_size=each([1, batch_size]))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("several", [1, 3])
def test_data_that_the_device_has_no_room_for_give_the_same_batches(
    shuffle: bool, several: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [rows_of(20), each({f"m{n}": rows_of(20 + 3 * n, n) for n in range(3)})]
    for data in kinds:
        stored = feed_of(data, 3, batch_size=6, shuffle=shuffle)
        with monkeypatch.context() as patched:
            patched.setattr(arrays, "room", lambda device: 10)
            sent = feed_of(data, 3, batch_size=6, shuffle=shuffle)
        for feed in (sent, sent.select([2, 0])):
            expected = stored if feed is sent else stored.select([2, 0])
            pairs = zip(feed.epoch(1, several=several), expected.epoch(1, several=several), strict=True)
            for mine, other in chain([(feed.first(), expected.first())], pairs):
                assert (mine.shared, mine.steps) == (other.shared, other.steps)
                assert (mine.counts == other.counts).all()
                assert all(map(torch.equal, mine.data, other.data))


def test_arrays_that_several_feeds_of_a_verb_have_are_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[Any] = []
    place = arrays.place

    def spied(leaf: Any, device: Any, **options: Any) -> torch.Tensor:
        if device is not None and leaf.shape[:1] == (20,):
            placed.append(leaf)
        return place(leaf, device, **options)

    monkeypatch.setattr(arrays, "place", spied)
    data, stored = rows_of(20), StoredArrays()
    for _ in range(3):
        make_feed(
            data,
            names=["a"],
            seeds=[0],
            batch_size=4,
            shuffle=True,
            device="cpu",
            arrays=arrays,
            stored=stored,
        )
    assert len(placed) == 2


def test_an_order_is_worked_out_ahead_for_its_own_epoch_only() -> None:
    seeds, rows = np.arange(3), np.array([7, 9, 8])
    epochs = np.array([4, 4, 5])
    ahead = OrderAhead(seeds, epochs, rows)
    found = ahead.take(epochs)
    assert found is not None
    assert (found == order_of(seeds, epochs, rows)).all()
    assert ahead.take(epochs + 1) is None
