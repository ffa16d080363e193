"""Sixteen GRUs on batches of ten sequence lengths, from nothing: by one fleet, or one by one by a plain loop."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch._dynamo  # an import like the others: before the clock starts
import torch.nn.functional as F
from torch import Tensor, nn

import modelfleet as mf
from benchmarks.checking import accept
from benchmarks.entrants import FLEET
from benchmarks.peers import Round, compete

MEMBERS, BATCH, STEPS, FEATURES, CLASSES = 16, 16, 200, 8, 5
LENGTHS = range(5, 55, 5)


class Gru(nn.Module):
    """A GRU whose last state is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, 32, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(batch, class)` of `x` `(batch, step, feature)`."""
        return self.head(self.gru(x)[0][:, -1])


class Batches:
    """A loader whose batches have one of ten lengths each; the same in every pass."""

    def __init__(self, steps: int) -> None:
        random = np.random.default_rng(0)
        self._batches = [self._batch(random, LENGTHS[step % len(LENGTHS)]) for step in range(steps)]

    def _batch(self, random: np.random.Generator, length: int) -> tuple[Tensor, Tensor]:
        x = random.standard_normal((BATCH, length, FEATURES), dtype=np.float32)
        return torch.from_numpy(x), torch.from_numpy(random.integers(0, CLASSES, BATCH))

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches)


def train_alone(model: nn.Module, batches: Batches) -> float:
    """One pass; its mean loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    total = torch.zeros(())
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total.item() / len(batches)


def prepare(who: str, quick: bool) -> Callable[[], Round]:
    batches, members = Batches(20 if quick else STEPS), 3 if quick else MEMBERS

    def one_by_one() -> Round:
        losses = [train_alone(Gru(), batches) for _ in range(members)]
        return Round(members * len(batches), sum(losses) / members)

    def by_fleet() -> Round:
        started = time.perf_counter()
        fleet = mf.Fleet.build(Gru, members, seed=0)
        fleet.compile("adam", "cross_entropy", lr=1e-3)
        history = fleet.fit(batches, progress=False)
        seconds = time.perf_counter() - started
        losses = [history[name]["loss"][-1] for name in fleet.names]
        notes = {"largest difference to alone": differences(fleet)}
        return Round(members * len(batches), sum(losses) / members, seconds, notes)

    def differences(fleet: mf.Fleet) -> float:
        before = mf.Fleet.build(Gru, fleet.names[:3], seed=0)  # the same names, so the same initial weights
        for name in before:
            train_alone(before[name], batches)
        return max(accept(fleet, name, before[name]) for name in before)

    return by_fleet if who == FLEET else one_by_one


if __name__ == "__main__":
    compete(prepare)
