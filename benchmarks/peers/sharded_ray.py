"""Ray actors by hand: two, each with half of the members and the data by the object store."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peers import Round, compete
from benchmarks.peers.map_ray import own_cluster
from benchmarks.variants import Data, Variant, by_hand, dataset, steps


class Trainer:
    """What an actor does."""

    def __init__(self, members: range, data: Data, quick: bool) -> None:
        torch.set_num_threads(1)
        self._members = [Variant(number, quick) for number in members]
        # What comes from the object store is read-only, which torch would warn of.
        self._data = [torch.from_numpy(part.copy()) for part in data]

    def train(self) -> list[float]:
        """An epoch of each; their losses."""
        x, y = self._data
        return [member.train_epoch(x, y) for member in self._members]


def prepare(quick: bool) -> Callable[[], Round]:
    ray = own_cluster()
    members, data = by_hand(quick), ray.put(dataset(quick))
    actor: Any = ray.remote(num_cpus=1)(Trainer)
    actors = [actor.remote(members[half::2], data, quick) for half in range(2)]

    def train_round() -> Round:
        losses = [loss for own in ray.get([one.train.remote() for one in actors]) for loss in own]
        return Round(len(members) * steps(quick), sum(losses) / len(losses))

    train_round()
    return train_round


if __name__ == "__main__":
    compete(prepare)
