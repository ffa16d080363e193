"""Global random generators that loaders may draw from: Python's, NumPy's and those of the frameworks."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from modelfleet import frameworks

State = dict[str, np.ndarray]


def state() -> State:
    """Return the state of Python's generator, NumPy's, and those of the frameworks that are imported."""
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    inner = legacy["state"]
    found = {
        "python/words": np.array([version, *words], dtype=np.int64),
        "python/gauss": np.array([np.nan if gauss is None else gauss]),
        "numpy/key": np.array(inner["key"]),
        "numpy/numbers": np.array([inner["pos"], legacy["has_gauss"]], dtype=np.int64),
        "numpy/gauss": np.array([legacy["gauss"]]),
    }
    for framework in frameworks.imported_adapters():
        own = framework.randomness()
        if own is not None:
            found[framework.NAME] = np.array(framework.arrays.host(own))
    return found


def restore(state: Mapping[str, np.ndarray]) -> None:
    """Restore the generators that `state` contains. The others stay as they are."""
    if "python/words" in state:
        version, *words = (int(word) for word in state["python/words"])
        gauss = float(state["python/gauss"][0])
        random.setstate((version, tuple(words), None if np.isnan(gauss) else gauss))
    if "numpy/key" in state:
        position, has_gauss = (int(number) for number in state["numpy/numbers"])
        np.random.set_state(("MT19937", state["numpy/key"], position, has_gauss, float(state["numpy/gauss"][0])))
    for framework in frameworks.imported_adapters():
        if framework.NAME in state:
            framework.restore_randomness(framework.arrays.place(state[framework.NAME], None, copy=True))


@contextmanager
def kept() -> Iterator[None]:
    """Restore the generators when this context ends."""
    before = state()
    try:
        yield
    finally:
        restore(before)
