"""Parts of a mean and of a deviation merge into what NumPy computes of all members at once."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelfleet.ensembles.moments import Mean
from modelfleet.ensembles.parts import Merging, Outputs
from modelfleet.ensembles.votes import Vote
from modelfleet.errors import InputError


def merged(way: Merging, values: np.ndarray, cuts: list[int]) -> tuple[np.ndarray, np.ndarray | None]:
    """The answer of members that are reduced in several parts."""
    bounds = [0, *sorted(cuts), len(values)]
    names = tuple(map(str, range(len(values))))
    parts = [
        way.part(Outputs(names[start:end], values[start:end])) for start, end in pairwise(bounds) if end > start
    ]
    whole = parts.pop()
    while parts:
        whole = way.merged(parts.pop(0), whole)
    found = way.answer(whole)
    return found.output, found.spread


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 12),
    st.lists(st.integers(0, 12), max_size=4),
    st.sampled_from([1.0, 1e8]),
    st.booleans(),
)
def test_parts_merge_into_the_whole(
    seed: int, members: int, cuts: list[int], offset: float, weighted: bool
) -> None:
    random = np.random.default_rng(seed)
    values = offset + random.normal(size=(members, 3, 2))
    weights = random.integers(0, 4, members).astype(float)
    weights[0] = 1.0
    own = {str(number): weight for number, weight in enumerate(weights.tolist())} if weighted else None
    expected = np.average(values, axis=0, weights=weights if weighted else None)
    squares = np.average((values - expected) ** 2, axis=0, weights=weights if weighted else None)
    mean, deviation = merged(Mean(True, own), values, [min(cut, members) for cut in cuts])
    assert deviation is not None
    np.testing.assert_allclose(mean, expected, rtol=1e-14, atol=1e-14 * offset)
    # Sums of squares without an offset would lose all digits at 1e8.
    np.testing.assert_allclose(deviation, np.sqrt(squares), rtol=1e-6, atol=1e-14 * offset)


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 7), max_size=3))
def test_votes_merge_into_the_whole(seed: int, cuts: list[int]) -> None:
    scores = np.random.default_rng(seed).integers(0, 3, size=(7, 4, 2, 5)).astype(np.float32)
    labels, shares = merged(Vote(), scores, cuts)
    counts = (scores.argmax(-1)[..., None] == np.arange(5)).sum(0)
    np.testing.assert_array_equal(labels, counts.argmax(-1))
    np.testing.assert_array_equal(shares, counts.max(-1) / 7)


@pytest.mark.parametrize(
    ("dtype", "mean", "deviation"),
    [
        (np.float16, np.float16, np.float16),
        (np.float32, np.float32, np.float32),
        (np.int64, np.float64, np.float64),
        (np.bool_, np.float64, np.float64),
        (np.complex64, np.complex64, np.float32),
    ],
)
def test_the_answer_has_the_dtype_of_numpys_mean(dtype: type, mean: type, deviation: type) -> None:
    values = np.array([[0, 1], [1, 1], [1, 0]]).astype(dtype)
    found, spread = merged(Mean(True), values, [1])
    assert spread is not None
    assert (found.dtype, spread.dtype) == (mean, deviation)
    np.testing.assert_allclose(found, values.mean(0), rtol=1e-3)
    np.testing.assert_allclose(spread, values.std(0), rtol=1e-3)


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(InputError, match="the mean needs numbers"):
        merged(Mean(False), np.array([["a"], ["b"]]), [])
