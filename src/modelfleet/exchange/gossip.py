"""Gossip: pairs of members, drawn at random, average their weights."""

from collections.abc import Sequence

import numpy as np

from modelfleet.exchange.base import Exchange
from modelfleet.exchange.groups import Groups, MemberGroups
from modelfleet.exchange.run import ExchangeRun


class Gossip(Exchange):
    """Average the weights of pairs of members, drawn at random: decentralized learning without a server.

        fleet.fit(mf.each(data_of_node), epochs=50, exchange=mf.Gossip(every=1))

    Every time, the members that train are divided into pairs, and both members of a pair continue from the mean
    of their weights and floating-point buffers. If their number is odd, one of them stays alone. The pairs follow
    from the fleet's seed and the number of the exchange, so a run can be repeated and resumed.

    Args:
        every: Exchange after this many epochs. By default, after every one.
        every_steps: Exchange after this many steps instead.
        groups: Lists of names, of which pairs are drawn. By default, all members are one group.

    Raises:
        InputError: An argument is out of range. `fit` raises it before the first step if members of a group do not
            have the same structure.
    """

    def __init__(
        self, every: int | None = None, *, every_steps: int | None = None, groups: Groups | None = None
    ) -> None:
        super().__init__(every, every_steps=every_steps)
        self.groups = MemberGroups(groups, "Gossip")

    def start(self, run: ExchangeRun, *, resumed: bool) -> None:
        """Check that the members of each group can be averaged."""
        self.groups.check(run.fleet.names)
        for group in self.groups.of(run.active):
            if group:
                run.weights(group)

    def exchange(self, run: ExchangeRun) -> None:
        """Draw pairs in each group, and average them."""
        for group in self.groups.of(run.active):
            if len(group) < 2:
                continue
            order = pairs(group, run.permutation(len(group)))
            weights = run.weights(order)
            run.write(order, {name: _mean(own) for name, own in weights.items() if own.dtype.kind == "f"})


def pairs(names: Sequence[str], permutation: np.ndarray) -> list[str]:
    """Return members in a random order, an even number of them: neighbours are pairs."""
    return [names[place] for place in permutation[: len(names) // 2 * 2].tolist()]


def _mean(array: np.ndarray) -> np.ndarray:
    """Return the mean of each pair of neighbours, for both of them."""
    both = array.reshape(len(array) // 2, 2, *array.shape[1:])
    return both.mean(axis=1, dtype=np.float64).astype(array.dtype).repeat(2, axis=0)
