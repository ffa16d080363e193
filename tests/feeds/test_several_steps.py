"""Several steps in one batch."""

from collections.abc import Iterator

import numpy as np
import pytest

from modelfleet.feeds import Batch
from modelfleet.feeds.several_steps import group_steps
from modelfleet.frameworks.jax import arrays


def test_what_was_read_before_a_loader_raised_is_handed_on() -> None:
    def batches() -> Iterator[Batch]:
        for number in range(15):
            yield Batch(np.full((1, 4), number), False, np.array([4]))
        raise OSError("the disk is gone")

    found = group_steps(batches(), 16, arrays)
    joined = next(found)
    assert joined.steps == 15
    np.testing.assert_array_equal(joined.data[:, 0, 0], np.arange(15))
    with pytest.raises(OSError, match="the disk is gone"):
        next(found)
