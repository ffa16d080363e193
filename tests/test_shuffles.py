import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelfleet.shuffles import permutations, threefry

SEEDS = st.integers(-(2**63), 2**63 - 1)


def one(seed: int, epoch: int, length: int) -> np.ndarray:
    return permutations(np.array([seed]), epoch, np.array([length]))[0]


@settings(deadline=None)
@given(st.lists(st.tuples(SEEDS, st.integers(1, 40)), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_every_row_is_the_members_own_permutation(members: list[tuple[int, int]], epoch: int) -> None:
    seeds, lengths = (np.array(column, dtype=np.int64) for column in zip(*members, strict=True))
    orders = permutations(seeds, epoch, lengths)
    assert orders.dtype == np.int64
    assert orders.shape == (len(members), lengths.max())
    for order, (seed, length) in zip(orders, members, strict=True):
        assert sorted(order[:length]) == list(range(length))
        np.testing.assert_array_equal(order[:length], one(seed, epoch, length))
        np.testing.assert_array_equal(order, np.resize(order[:length], len(order)))


def test_no_rows_are_no_order() -> None:
    assert permutations(np.array([1, 2]), 0, np.array([0, 0])).shape == (2, 0)


@pytest.mark.parametrize("bit", [0, 1, 31, 32, 33, 62])
def test_every_bit_of_the_seed_counts(bit: int) -> None:
    assert (one(5, 0, 50) != one(5 ^ (1 << bit), 0, 50)).any()


def test_epochs_differ_and_repeat() -> None:
    orders = [tuple(one(7, epoch, 50)) for epoch in range(100)]
    assert len(set(orders)) == 100
    assert orders == [tuple(one(7, epoch, 50)) for epoch in range(100)]


def test_every_member_may_have_its_own_epoch() -> None:
    orders = permutations(np.array([7, 7, 8]), np.array([0, 3, 3]), np.array([50, 50, 20]))
    for order, (seed, epoch, length) in zip(orders, [(7, 0, 50), (7, 3, 50), (8, 3, 20)], strict=True):
        np.testing.assert_array_equal(order[:length], one(seed, epoch, length))


def test_a_seed_and_an_epoch_are_not_interchangeable() -> None:
    assert (one(3, 4, 50) != one(4, 3, 50)).any()


@pytest.mark.parametrize("vary", ["seed", "epoch"])
def test_every_row_is_equally_likely_at_every_place(vary: str) -> None:
    """Neighbouring seeds and epochs are the hard case. Chi-square with 81 degrees of freedom, five sigmas."""
    draws, length = 5_000, 10
    if vary == "seed":
        orders = permutations(np.arange(draws), 0, np.full(draws, length))
    else:
        orders = np.array([one(1, epoch, length) for epoch in range(draws)])
    seen = np.zeros((length, length))
    for place in range(length):
        seen[place] = np.bincount(orders[:, place], minlength=length)
    expected = draws / length
    assert ((seen - expected) ** 2 / expected).sum() < 81 + 5 * np.sqrt(2 * 81)


def test_neighbouring_places_are_independent() -> None:
    orders = permutations(np.arange(20_000), 3, np.full(20_000, 5))
    pairs = np.bincount(orders[:, 0] * 5 + orders[:, 1], minlength=25).reshape(5, 5)
    assert (np.diag(pairs) == 0).all()
    off = pairs[~np.eye(5, dtype=bool)]
    assert ((off - 1000) ** 2 / 1000).sum() < 19 + 5 * np.sqrt(2 * 19)


def test_members_do_not_resemble_each_other() -> None:
    orders = permutations(np.arange(500), 0, np.full(500, 100)).astype(float)
    correlation = np.corrcoef(orders)[~np.eye(500, dtype=bool)]
    assert abs(correlation).max() < 0.55
    assert correlation.std() == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("seed", [0, 12345678901234567, -1])
def test_the_order_is_that_of_the_documented_words(seed: int) -> None:
    """The definition in docs/how-fusing-works.md again, a word at a time."""
    epoch, length = 6, 30
    low, high = seed % 2**32, (seed % 2**64 // 2**32 + 2**31) % 2**32
    words = []
    for row in range(length):
        left, right = threefry(*(np.array([word], dtype=np.uint32) for word in (low, high, row, epoch)))
        words.append(int(left[0]) * 2**32 + int(right[0]))
    assert one(seed, epoch, length).tolist() == sorted(range(length), key=lambda row: words[row])


def test_of_equal_keys_the_first_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(first: np.ndarray, second: np.ndarray, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, ...]:
        words = np.broadcast_to(left % np.uint32(3), (len(first), len(left)))
        return words, np.zeros_like(words)

    monkeypatch.setattr("modelfleet.shuffles.threefry", few)
    for order, length in zip(permutations(np.arange(2), 0, np.array([300, 200])), (300, 200), strict=True):
        expected = sorted(range(length), key=lambda row: row % 3)
        assert order[:length].tolist() == expected
