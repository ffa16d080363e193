"""Rows of several batches become one array by their names, and no number is changed by it."""

from typing import Any

import numpy as np
import pytest

from modelfleet.joining import alike, joined


def test_batches_are_joined_by_key() -> None:
    found = joined([{"mean": np.zeros(2), "max": np.ones(2)}, {"max": np.ones(1), "mean": np.zeros(1)}])
    assert found["mean"].tolist() == [0, 0, 0]
    assert found["max"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([np.array([1, 2]), np.array([0.5])], [1.0, 2.0, 0.5]),
        ([np.array([1.5]), np.array([1j])], [1.5, 1j]),
        ([np.array([np.nan], np.float32), np.array([0.1])], [np.nan, 0.1]),
        ([np.array(["a"]), np.array(["long"])], ["a", "long"]),
        ([np.array([None, 1], dtype=object), np.array([2.5])], [None, 1, 2.5]),
        ([np.array([True]), np.array([7])], [1, 7]),
    ],
)
def test_dtypes_that_hold_the_same_numbers_are_joined(parts: list[np.ndarray], expected: list[Any]) -> None:
    np.testing.assert_array_equal(joined(parts), expected)


@pytest.mark.parametrize(
    "parts",
    [
        [np.array([2**60 + 1]), np.array([0.5])],
        [np.array([2**63], np.uint64), np.array([-(2**62) - 1])],
        [np.array([1]), np.array(["1"])],
        [np.array([1.5]), np.array([b"1"])],
    ],
)
def test_dtypes_that_would_change_an_answer_are_refused(parts: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match="they are"):
        joined(parts)


def test_only_batches_of_one_form_are_alike() -> None:
    one = {"a": np.zeros((2, 3))}
    assert alike([one, {"a": np.ones((5, 3))}])
    for other in ({"a": np.zeros((2, 3), np.float32)}, {"a": np.zeros((2, 4))}, {"b": np.zeros((2, 3))}):
        assert not alike([one, other])
