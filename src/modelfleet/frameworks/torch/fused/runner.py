"""A program that runs, and what is known about compiling it."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from modelfleet.frameworks.engine import Pace
from modelfleet.frameworks.torch.compiling.compiler import Compiler
from modelfleet.frameworks.torch.tracing.trace import Program


@dataclass(eq=False)
class Runner:
    """A program of one width, and what is known about compiling it."""

    program: Program
    compiler: Compiler
    others: "ByWidth"
    """Runners of the same step by width, this one included."""
    followers: dict[Hashable, "Runner"] = field(default_factory=dict)
    """Runners of the second part of a step, by the slice of members and the parameters that share numbers."""
    shape: Hashable = None
    """What tells train steps on such batches apart, for `ShapeTimes`."""
    used: int = 0
    """Number of the last lookup of this program, for `Programs`, which drops those that nobody uses."""
    calls: int = 0
    seconds: float = 0.0

    def record(self, seconds: float) -> None:
        """Record a call to predict. Compile once that would pay if as many calls came again."""
        self.calls += 1
        self.seconds += seconds
        if self.program.compiled:
            return
        self.compiler.consider(self.calls, self.seconds / self.calls)
        if self.program.any_width:
            for width, other in list(self.others.items()):
                if width > 1 and other is not self:
                    other.compiler.stop()
                    self.others[width] = self


ByWidth = dict[int, Runner]


def for_any_width(programs: ByWidth, width: int) -> Runner | None:
    """Return a program that was compiled for any width, if there is one."""
    return next((runner for runner in programs.values() if runner.program.any_width and width > 1), None)


class ShapeTimes:
    """Records how often each shape of batch comes, and how long its steps take without tracing.

    A run's batches may have many shapes, such as sequence lengths. A program serves one of them, so what compiling
    it saves depends on the steps of that shape only.
    """

    def __init__(self) -> None:
        self._counts: dict[Hashable, int] = {}
        self._seconds: dict[Hashable, float] = {}  # of the quickest step
        self._total = 0

    def add(self, shape: Hashable, seconds: float) -> None:
        """Record an uncompiled step."""
        self._total += 1
        self._counts[shape] = self._counts.get(shape, 0) + 1
        self._seconds[shape] = min(seconds, self._seconds.get(shape, seconds))

    def of(self, shape: Hashable, pace: Pace) -> Pace:
        """Return how many of the steps that are left have this shape, and their seconds. `pace` is that of all."""
        if pace[1] is None or shape not in self._counts:
            return 0, None
        return round(pace[0] * self._counts[shape] / self._total), min(pace[1], self._seconds[shape])
