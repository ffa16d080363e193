"""What is measured: the networks, their data, and the ratios to reach. Knows no framework."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

TORCH, JAX = "torch one by one", "jax.vmap by hand"
VOCABULARY = 100
TOKENS = 16
RECURRENT_STEPS = 20
RECURRENT_INPUT = 16
IMAGE = (1, 28, 28)

Dataset = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Row:
    """One line of the table: `members` networks of one structure, trained by Adam on cross-entropy.

    A round of the peers that train all members together is `epochs` epochs of everyone. A round of the
    one-by-one peers is one epoch of `alone` members: there, a member costs the same however many follow.
    """

    name: str
    title: str
    net: Literal["mlp", "cnn", "transformer", "lstm"]
    members: int
    batch: int
    examples: int
    epochs: int
    alone: int
    over_torch: float
    over_jax: float | None = None
    widths: tuple[int, ...] = ()
    own_data: bool = False
    own_rates: bool = False
    unit: str = "member-steps"

    @property
    def classes(self) -> int:
        """How many labels there are."""
        return self.widths[-1] if self.widths else 10

    @property
    def steps(self) -> int:
        """The batches of an epoch; all of them are full."""
        return self.examples // self.batch

    def bar(self, peer: str) -> float | None:
        """The ratio to reach against a peer, if there is one."""
        return {TORCH: self.over_torch, JAX: self.over_jax}.get(peer)

    def rates(self) -> np.ndarray:
        """The learning rate of each member."""
        if self.own_rates:
            return np.logspace(-4, -2, self.members, dtype=np.float32)
        return np.full(self.members, 1e-3, np.float32)

    def quick(self) -> "Row":
        """The same row, small enough for a smoke test."""
        return replace(self, members=min(self.members, 4), examples=2 * self.batch, epochs=1, alone=2)


MLP_64 = Row(
    name="mlp-64",
    title="64 × MLP 32-64-64-10, batch 32, lr per member",
    net="mlp",
    widths=(32, 64, 64, 10),
    members=64,
    batch=32,
    examples=1024,
    epochs=24,
    alone=12,
    own_rates=True,
    over_torch=35,
    over_jax=1.3,
)
MLP_2000 = Row(
    name="mlp-2000",
    title="2,000 × MLP 16-32-32-4, batch 16, own data each",
    net="mlp",
    widths=(16, 32, 32, 4),
    members=2000,
    batch=16,
    examples=128,
    epochs=30,
    alone=50,
    own_data=True,
    over_torch=100,
    over_jax=1.3,
)
ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        MLP_64,
        MLP_2000,
        Row(
            name="mlp-wide",
            title="32 × MLP 784-256-256-10, batch 64",
            net="mlp",
            widths=(784, 256, 256, 10),
            members=32,
            batch=64,
            examples=1024,
            epochs=3,
            alone=12,
            over_torch=1.8,
            over_jax=1.2,
        ),
        Row(
            name="cnn",
            title="16 × small CNN on 28×28, batch 16",
            net="cnn",
            members=16,
            batch=16,
            examples=256,
            epochs=2,
            alone=8,
            over_torch=2,
            over_jax=1,
        ),
        Row(
            name="transformer",
            title="16 × 2-layer transformer, d 32, 16 tokens, batch 16",
            net="transformer",
            members=16,
            batch=16,
            examples=256,
            epochs=6,
            alone=8,
            over_torch=6,
            over_jax=1.3,
        ),
        Row(
            name="lstm",
            title="16 × LSTM 32, 20 steps, batch 16",
            net="lstm",
            members=16,
            batch=16,
            examples=256,
            epochs=8,
            alone=8,
            over_torch=4.5,
            over_jax=1.3,
        ),
    )
}
COLD = replace(
    MLP_64,
    name="cold",
    title="cold start: 64 × MLP, 20 steps",
    examples=640,
    epochs=1,
    over_torch=2,
    over_jax=None,
)
GROWTH_SIZES = (16, 64, 256, 1_000, 4_000, 10_000)


def growth(members: int) -> Row:
    """The 2,000 row with another number of members, and enough epochs that a round can be timed."""
    return replace(MLP_2000, name="growth", members=members, epochs=max(10, 1_600 // members))


def datasets(row: Row) -> list[Dataset]:
    """The data as `(x, y)`: one set for each member, or a single one that all members share."""
    random = np.random.default_rng(0)
    return [_dataset(row, random) for _ in range(row.members if row.own_data else 1)]


def _dataset(row: Row, random: np.random.Generator) -> Dataset:
    y = random.integers(0, row.classes, row.examples)
    if row.net == "transformer":
        return random.integers(0, VOCABULARY, (row.examples, TOKENS)), y
    shape = {"cnn": IMAGE, "lstm": (RECURRENT_STEPS, RECURRENT_INPUT)}.get(row.net, row.widths[:1])
    return random.standard_normal((row.examples, *shape), dtype=np.float32), y
