"""Trials that show if padding has an influence on the other rows of a batch.

A step on a padded batch is compared with a step on its real rows alone: the loss, the gradients, the changes by
the model, and the metrics. The trials use random weights, because a model's own weights may hide an influence: a
head, a scale or a gate often starts at zero. The member's own weights are tried, too.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from modelfleet.frameworks.functional.contract import Backend, Definition, State
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Tree

TOLERANCE = 1e-4  # relative to the largest number: the rounding of float32


def ignores_padding(
    definition: Definition, backend: Backend, members: Sequence[State], data: Tree, real: int, size: int
) -> bool:
    """Return True if members' steps on `real` rows stay the same with padding of weight 0 behind them.

    `members` are the states of single members, without a member axis, and `data` are `(row, …)`.
    """
    few = map_tree(lambda leaf: leaf[:real], data)
    data = map_tree(lambda leaf: padded_otherwise(leaf, real), backend.exactly(data))
    weights = backend.tensor((np.arange(size) < real).astype(np.float32))
    program = backend.compile(definition.gradients)
    states = _states_to_try(backend, members)
    try:
        for state in states:
            padded = backend.host(program(state, data, weights))
            alone = backend.host(program(state, few, None))
            if not all(alike(padded[part], alone[part], together=part == "gradients") for part in padded):
                return False
    except Exception:  # a model that accepts only batches of one size
        return False
    return True


def rows_are_independent(definition: Definition, backend: Backend, members: Sequence[State], inputs: Tree) -> bool:
    """Return True if members' outputs for a row of inputs `(row, …)` depend on that row alone."""
    rows = len(leaves(inputs)[0])
    few = map_tree(lambda leaf: leaf[: (rows + 1) // 2], inputs)
    program = backend.compile(lambda state, x: definition.predict(state, x)[0])
    states = _states_to_try(backend, members)
    try:
        for state in states:
            whole, part = (backend.host(program(state, x)) for x in (inputs, few))
            if not rows_alike(whole, part, rows):
                return False
    except Exception:  # a model that accepts only batches of one size
        return False
    return True


def _states_to_try(backend: Backend, members: Sequence[State]) -> Iterator[State]:
    """Yield the state of each member with random weights, twice, and then with its own."""
    for one in members:
        yield from _states_of(backend, one)


def _states_of(backend: Backend, one: State) -> Iterator[State]:
    own = {name: backend.exactly(tensor) for name, tensor in one["params"].items()}

    def state(number: int | None) -> State:
        params = own if number is None else random_weights(own, number)
        return {**one, "params": map_tree(backend.tensor, params)}

    return map(state, (1, 2, None))


def rows_alike(whole: Tree, part: Tree, rows: int) -> bool:
    """Return True if the first half of `rows` rows has the same outputs as without the other half."""
    half = (rows + 1) // 2
    by_row = [(w[:half], p) for w, p in zip(leaves(whole), leaves(part), strict=True) if w.ndim and len(w) == rows]
    return alike([w for w, _ in by_row], [p for _, p in by_row], together=False)


def random_weights(params: Mapping[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
    """Return random weights as large as newly initialized weights."""
    generator = np.random.default_rng(number)
    found = {}
    for name, array in params.items():
        drawn = generator.normal(size=array.shape)
        size = max(int(np.prod(array.shape[:-1])), 1)
        drawn = drawn / size**0.5 if array.ndim > 1 else 1.0 + 0.3 * np.tanh(drawn)
        found[name] = np.asarray(drawn).astype(array.dtype)
    return found


def alike(padded: Tree, alone: Tree, *, together: bool) -> bool:
    """Return True if two trees hold the same numbers, except for rounding.

    Rounding is relative to the largest number of each array; with `together`, of all arrays.
    """
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
        if not np.allclose(p, a, rtol=TOLERANCE, atol=TOLERANCE * max(scale, 1e-3), equal_nan=True):
            return False
    return True


def _largest(array: np.ndarray) -> float:
    sizes = np.abs(array if array.dtype.kind == "c" else array.astype(np.float64))
    return float(np.nan_to_num(sizes, nan=0.0, posinf=0.0).max(initial=0.0))


def padded_otherwise(leaf: np.ndarray, real: int) -> np.ndarray:
    """Return a batch with other padding. Its own padding repeats rows, which may leave means unchanged."""
    leaf = np.array(leaf)
    leaf[real:] = leaf[0]
    if leaf.dtype.kind in "fcV":  # V: bfloat16
        leaf[real:] = (1.5 * leaf[real:] + 0.5).astype(leaf.dtype)
    return leaf
