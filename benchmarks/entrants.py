"""What a contest is: who takes part, in which cases, and the ratios to reach. Knows no framework."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

FLEET = "modelfleet"
ALONE = "one by one"
PLAIN = "a plain torch loop"
ROUNDS = 5


@dataclass(frozen=True)
class Entrant:
    """A peer of a contest: a module of `benchmarks.peers` with its arguments and environment."""

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    apart: bool = False
    """Whether it is measured when the others are done: what it starts never rests, and would slow them."""


@dataclass(frozen=True)
class Contest:
    """One table: who takes part, and what modelfleet is to reach against whom."""

    name: str
    title: str
    entrants: Mapping[str, Entrant]
    bars: Mapping[str, float]
    unit: str = "member-steps"
    cases: tuple[str, ...] = ("",)
    """What the peers are asked for, one line of the table each; a contest of one thing has one unnamed case."""
    case_bars: Mapping[str, float] = field(default_factory=dict)
    """Ratios of single cases, where they differ from `bars`."""
    rounds: int = ROUNDS
    fresh: bool = False
    """Whether every round is a new process with empty caches: so the first run counts, not the steady state."""
    either: tuple[str, ...] = ()
    """Peers of which one bar is enough: the lower one counts."""
    most_seconds: float | None = None
    """How long a case may take, for work that has no peer."""

    @property
    def case(self) -> str:
        """The case of a contest that has only one."""
        (case,) = self.cases
        return case

    def each_case(self) -> list["Contest"]:
        """This contest as one contest for each case."""
        return [
            replace(
                self,
                cases=(case,),
                bars=dict.fromkeys(self.bars, self.case_bars[case]) if case in self.case_bars else self.bars,
            )
            for case in self.cases
        ]

    def bar(self, peer: str) -> float | None:
        """The ratio to reach against a peer, if there is one."""
        return self.bars.get(peer)
