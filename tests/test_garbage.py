"""Full garbage collections wait while many objects are made, and come back afterwards."""

import gc
from collections.abc import Iterator

import pytest

from modelfleet.garbage import without_full_collections


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_young_objects_are_still_collected(thresholds: tuple[int, int, int]) -> None:
    with without_full_collections():
        assert gc.isenabled()
        assert gc.get_threshold()[:2] == thresholds[:2]
        assert gc.get_threshold()[2] > 1_000_000
    assert gc.get_threshold() == thresholds


def test_contexts_within_each_other_end_with_the_outermost(thresholds: tuple[int, int, int]) -> None:
    with without_full_collections():
        with without_full_collections():
            pass
        assert gc.get_threshold()[2] > 1_000_000
    assert gc.get_threshold() == thresholds


def test_an_error_brings_them_back(thresholds: tuple[int, int, int]) -> None:
    with pytest.raises(KeyError), without_full_collections():
        raise KeyError
    assert gc.get_threshold() == thresholds


def test_thresholds_that_somebody_sets_meanwhile_stay() -> None:
    with without_full_collections():
        gc.set_threshold(500, 5, 5)
    assert gc.get_threshold() == (500, 5, 5)
