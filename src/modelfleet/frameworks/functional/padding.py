"""Whether the rows of a batch feel padding beside them, found by trying.

A step on a padded batch is compared with one on its own rows alone: the loss, the gradients, what the model has
changed, and the metrics. The weights tried are random, since a model's own may hide what it does: a head, a scale
or a gate often begins at zero. The member's own are tried, too.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from modelfleet.frameworks.functional.contract import Backend, Definition, State
from modelfleet.trees import leaves, map_tree

BOUND = 1e-4  # of what is largest: the rounding of float32


def bears_padding(definition: Definition, backend: Backend, one: State, data: Any, real: int, size: int) -> bool:
    """Return True if a member's step on `real` rows is the same with rows behind them that weigh nothing.

    `one` is the member's state, without a member axis, and `data` are `(row, …)`.
    """
    few = map_tree(lambda leaf: leaf[:real], data)
    data = map_tree(lambda leaf: padded_otherwise(leaf, real), backend.exactly(data))
    weights = backend.tensor((np.arange(size) < real).astype(np.float32))
    program = backend.compile(definition.gradients)
    own = {name: backend.exactly(tensor) for name, tensor in one["params"].items()}
    try:
        for number in (1, 2, None):
            params = own if number is None else shaken(own, number)
            state = {**one, "params": map_tree(backend.tensor, params)}
            padded = backend.host(program(state, data, weights))
            alone = backend.host(program(state, few, None))
            if not all(alike(padded[part], alone[part], together=part == "gradients") for part in padded):
                return False
    except Exception:  # a model that needs whole batches feels padding
        return False
    return True


def rows_apart(definition: Definition, backend: Backend, one: State, inputs: Any) -> bool:
    """Return True if a member's output for a row of inputs `(row, …)` depends on that row alone."""
    rows = len(leaves(inputs)[0])
    few = map_tree(lambda leaf: leaf[: (rows + 1) // 2], inputs)
    program = backend.compile(lambda state, x: definition.predict(state, x)[0])
    own = {name: backend.exactly(tensor) for name, tensor in one["params"].items()}
    try:
        for number in (1, 2, None):
            params = own if number is None else shaken(own, number)
            state = {**one, "params": map_tree(backend.tensor, params)}
            whole, part = (backend.host(program(state, x)) for x in (inputs, few))
            if not rows_alike(whole, part, rows):
                return False
    except Exception:  # a model that needs whole batches feels padding
        return False
    return True


def rows_alike(whole: Any, part: Any, rows: int) -> bool:
    """Return True if the first half of so many rows has the outputs that it has without the other half."""
    half = (rows + 1) // 2
    by_row = [(w[:half], p) for w, p in zip(leaves(whole), leaves(part), strict=True) if w.ndim and len(w) == rows]
    return alike([w for w, _ in by_row], [p for _, p in by_row], together=False)


def shaken(params: Mapping[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
    """Return random weights of the size that fresh ones have."""
    generator = np.random.default_rng(number)
    found = {}
    for name, array in params.items():
        drawn = generator.normal(size=array.shape)
        size = max(int(np.prod(array.shape[:-1])), 1)
        drawn = drawn / size**0.5 if array.ndim > 1 else 1.0 + 0.3 * np.tanh(drawn)
        found[name] = np.asarray(drawn).astype(array.dtype)
    return found


def alike(padded: Any, alone: Any, *, together: bool) -> bool:
    """Return True if trees hold the same numbers, but for the rounding of the largest, of all or of each array."""
    pairs = [(np.asarray(p), np.asarray(a)) for p, a in zip(leaves(padded), leaves(alone), strict=True)]
    largest = [_largest(a) for _, a in pairs]
    for (p, a), own in zip(pairs, largest, strict=True):
        if p.shape != a.shape:
            return False
        if a.dtype.kind in "biu":
            if not np.array_equal(p, a):
                return False
            continue
        p, a = (array if array.dtype.kind == "c" else array.astype(np.float64) for array in (p, a))
        scale = max(largest) if together else own
        if not np.allclose(p, a, rtol=BOUND, atol=BOUND * max(scale, 1e-3), equal_nan=True):
            return False
    return True


def _largest(array: np.ndarray) -> float:
    sizes = np.abs(array if array.dtype.kind == "c" else array.astype(np.float64))
    return float(np.nan_to_num(sizes, nan=0.0, posinf=0.0).max(initial=0.0))


def padded_otherwise(leaf: np.ndarray, real: int) -> np.ndarray:
    """The rows of a batch with other padding: its own, real rows again, might leave means and variances alone."""
    leaf = np.array(leaf)
    leaf[real:] = leaf[0]
    if leaf.dtype.kind in "fcV":  # V: bfloat16
        leaf[real:] = (1.5 * leaf[real:] + 0.5).astype(leaf.dtype)
    return leaf
