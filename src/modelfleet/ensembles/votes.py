"""Votes of members for classes, in parts that can be merged: the votes for each class."""

from dataclasses import dataclass

import numpy as np

from modelfleet.ensembles.parts import Answer, Outputs, Part, merge_trees, weights_of, wide
from modelfleet.errors import InputError
from modelfleet.trees import map_tree


@dataclass(frozen=True, eq=False)
class LeafVotes:
    """Votes `(row, …, class)` of some members, and the sum of the members' weights."""

    weight: float
    counts: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the scores `(row, …, class)` of one member."""
        return self.counts.shape


@dataclass(frozen=True)
class Vote:
    """The class that most members give the highest score. Of several such classes, the lowest.

    With `shares`, the answer is the share of the votes for every class. Otherwise it is the label, with its own
    share of the votes beside it.
    """

    shares: bool = False
    weights: dict[str, float] | None = None

    def part(self, outputs: Outputs) -> Part:
        """Return the part of some members."""
        weights = weights_of(outputs.names, self.weights)
        tree = map_tree(lambda leaf: _votes(leaf, weights, outputs.names[0]), outputs.tree)
        return Part(outputs.names[0], len(outputs.names), tree)

    def merged(self, one: Part, other: Part) -> Part:
        """Return the part of the members of both."""
        return merge_trees(_merged, one, other)

    def answer(self, part: Part) -> Answer:
        """Return the labels and their shares, or the shares of all classes."""
        shares = map_tree(lambda leaf: leaf.counts / leaf.weight, part.tree)
        if self.shares:
            return Answer(shares)
        return Answer(
            map_tree(lambda leaf: leaf.counts.argmax(-1), part.tree), map_tree(lambda own: own.max(-1), shares)
        )


def _votes(leaf: np.ndarray, weights: np.ndarray, member: str) -> LeafVotes:
    wide(leaf.dtype, "a vote")
    if leaf.ndim < 3 or leaf.shape[-1] < 2:
        raise InputError(
            f"a vote needs a score for every class, (row, …, class), and member {member!r} returns "
            f"{leaf.shape[1:]}. Use combine='mean', and compare the mean with a threshold."
        )
    classes, places = leaf.shape[-1], leaf.shape[1:-1]
    count = int(np.prod(places, dtype=np.int64))
    labels = leaf.argmax(-1).reshape(len(leaf), count)
    index = (labels + np.arange(count) * classes).ravel()
    counts = np.bincount(index, np.repeat(weights, count), count * classes)
    return LeafVotes(float(weights.sum()), counts.reshape(*places, classes))


def _merged(one: LeafVotes, other: LeafVotes) -> LeafVotes:
    return LeafVotes(one.weight + other.weight, one.counts + other.counts)
