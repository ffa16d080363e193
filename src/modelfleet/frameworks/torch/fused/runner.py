"""A program that runs, and what is known about compiling it."""

from dataclasses import dataclass, field

from modelfleet.frameworks.torch.compiling.compiler import Compiler
from modelfleet.frameworks.torch.tracing.trace import Program


@dataclass(eq=False)
class Runner:
    """A program of one width, and what is known about compiling it."""

    program: Program
    compiler: Compiler
    others: "ByWidth"
    """Runners of the same step by width, this one included."""
    followers: dict[tuple[tuple[str, ...], ...], "Runner"] = field(default_factory=dict)
    """Runners of the second part of a step, by the parameters that share numbers."""
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
