"""What is measured beside the rows of equal torch networks: Keras models against `fit`, and the planner's choice.

A contest names its peers, each a module of `benchmarks.peers` with its arguments and environment, and the ratios
that modelfleet is to reach against them. Knows no framework.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

FLEET = "modelfleet"
FIT = "keras fit, one after the other"
LOOP = "tf.function loop by hand"
ALONE = "one by one"
STRATEGIES = ("interleaved", "threads", "processes")
BACKENDS = ("tensorflow", "jax", "torch")
MIXES = {
    "mlps": "12 torch MLPs of two widths",
    "convs": "4 equal torch CNNs",
    "unlike": "a torch MLP, a CNN and an LSTM",
    "keras": "three unlike Keras models on JAX",
    "mixed": "8 torch MLPs and two Keras models on JAX",
}


@dataclass(frozen=True)
class Entrant:
    """A peer of a contest."""

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contest:
    """One table: who takes part, and what modelfleet is to reach against whom."""

    name: str
    title: str
    entrants: Mapping[str, Entrant]
    bars: Mapping[str, float]

    def bar(self, peer: str) -> float | None:
        """The ratio to reach against a peer, if there is one."""
        return self.bars.get(peer)


def _three(backend: str, over_fit: float) -> Contest:
    environment = {"KERAS_BACKEND": backend}
    entrants = {
        FLEET: Entrant("keras_fleet", ("three",), environment),
        FIT: Entrant("keras_fit", ("three",), environment),
    }
    bars = {FIT: over_fit}
    if backend == "tensorflow":
        entrants[LOOP] = Entrant("keras_loop", ("three",), environment)
        bars[LOOP] = 1.5
    return Contest(
        f"three-{backend}", f"three unlike Keras models on {backend}: own data, optimizers, epochs", entrants, bars
    )


def _equal(backend: str, over_fit: float) -> Contest:
    environment = {"KERAS_BACKEND": backend}
    entrants = {
        FLEET: Entrant("keras_fleet", ("equal",), environment),
        FIT: Entrant("keras_fit", ("equal",), environment),
    }
    return Contest(f"keras-{backend}", f"32 equal Keras MLPs on {backend}", entrants, {FIT: over_fit})


def _mix(name: str) -> Contest:
    environment = {"KERAS_BACKEND": "jax", "MODELFLEET_COMPILE": "now"}
    # The fixed strategies warm up first: what their runs have taken is then known to the planner.
    strategies = [*(["fused"] if name == "convs" else []), *STRATEGIES]  # the others can't all be fused
    entrants = {strategy: Entrant("mixes", (name, strategy), environment) for strategy in strategies}
    entrants[ALONE] = Entrant("mixes", (name, ALONE), environment)
    entrants[FLEET] = Entrant("mixes", (name, "auto"), environment)
    bars = {label: 0.9 for label in entrants if label != FLEET}
    return Contest(f"auto-{name}", f'strategy="auto": {MIXES[name]}', entrants, bars)


CONTESTS: dict[str, Contest] = {
    contest.name: contest
    for contest in (
        _three("tensorflow", 4),
        _three("jax", 2),
        _three("torch", 4),
        _equal("tensorflow", 30),
        _equal("jax", 8),
        _equal("torch", 25),
        *(_mix(name) for name in MIXES),
    )
}
