"""The arrays of a `Data`, by NumPy, and how they are cut into batches."""

from collections.abc import Iterator

import numpy as np
from tests.fuzz.programs import Data

FEATURES, CLASSES, LENGTH, SIDE, WORDS = 4, 3, 5, 4, 7
SHAPES = {"vector": (FEATURES,), "sequence": (LENGTH, FEATURES), "image": (FEATURES, SIDE, SIDE)}
Arrays = tuple[np.ndarray, np.ndarray]


def arrays(data: Data, member: int | None, kind: str, task: str, dtype: str) -> Arrays:
    """Inputs and targets: of all members, or of one with data of its own."""
    rows = data.rows if member is None or data.own is None else data.own[member % len(data.own)]
    generator = np.random.default_rng([data.seed, 0 if member is None else member + 1])
    if kind == "tokens":
        x = generator.integers(0, WORDS, size=(rows, LENGTH))
    else:
        x = generator.normal(size=(rows, *SHAPES[kind])).astype(dtype)
    flat = x.reshape(rows, -1)[:, :CLASSES].astype(dtype)
    if task == "classes":
        return x, np.argmax(flat + 0.3 * generator.normal(size=flat.shape), axis=1)
    return x, (np.tanh(flat) + 0.1 * generator.normal(size=flat.shape)).astype(dtype)


def cuts(rows: int, batch: int, *, uneven: bool) -> Iterator[slice]:
    """Where batches begin and end."""
    start, number = 0, 0
    while start < rows:
        size = max(1, batch - number % 2) if uneven else batch
        yield slice(start, start + size)
        start, number = start + size, number + 1
