"""Mean and standard deviation over members, in parts that can be merged.

A part is a weight, a mean and a sum of squares around that mean, in float64. Two parts become one by the formula
of Chan, Golub and LeVeque (1979), which subtracts no large numbers.
"""

from dataclasses import dataclass

import numpy as np

from modelfleet.ensembles.parts import Answer, Outputs, Part, merge_trees, narrow, weights_of, wide
from modelfleet.trees import map_tree


@dataclass(frozen=True, eq=False)
class LeafMoments:
    """Moments of one array of an output over some members."""

    weight: float
    mean: np.ndarray
    squares: np.ndarray | None
    """Weighted sum of the squared distances from the mean; None if the deviation was not asked for."""
    dtype: np.dtype
    """Dtype of the members' outputs."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape `(row, …)`."""
        return self.mean.shape


@dataclass(frozen=True)
class Mean:
    """The mean over members, weighted if weights are given, and their standard deviation if that is asked for."""

    std: bool
    weights: dict[str, float] | None = None

    def part(self, outputs: Outputs) -> Part:
        """Return the part of some members."""
        weights = weights_of(outputs.names, self.weights)
        tree = map_tree(lambda leaf: _moments(leaf, weights, self.std), outputs.tree)
        return Part(outputs.names[0], len(outputs.names), tree)

    def merged(self, one: Part, other: Part) -> Part:
        """Return the part of the members of both."""
        return merge_trees(_merged, one, other)

    def answer(self, part: Part) -> Answer:
        """Return the mean and the deviation, in the dtype that NumPy's mean has."""
        output = map_tree(lambda leaf: leaf.mean.astype(narrow(leaf.dtype)), part.tree)
        return Answer(output, map_tree(_deviation, part.tree) if self.std else None)


def _moments(leaf: np.ndarray, weights: np.ndarray, std: bool) -> LeafMoments:
    values = leaf.astype(wide(leaf.dtype, "the mean"), copy=False)
    total = float(weights.sum())
    mean = np.tensordot(weights, values, axes=1) / (total or 1.0)
    squares = np.tensordot(weights, np.abs(values - mean) ** 2, axes=1) if std else None
    return LeafMoments(total, mean, squares, leaf.dtype)


def _merged(one: LeafMoments, other: LeafMoments) -> LeafMoments:
    total = one.weight + other.weight
    share = other.weight / (total or 1.0)
    step = other.mean - one.mean
    squares = None
    if one.squares is not None and other.squares is not None:
        squares = one.squares + other.squares + np.abs(step) ** 2 * (one.weight * share)
    return LeafMoments(total, one.mean + step * share, squares, np.result_type(one.dtype, other.dtype))


def _deviation(leaf: LeafMoments) -> np.ndarray:
    assert leaf.squares is not None
    dtype = narrow(leaf.dtype)
    real = np.empty(0, dtype).real.dtype  # the deviation of complex numbers is real
    return np.sqrt(leaf.squares / leaf.weight).astype(real)
