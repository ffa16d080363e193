"""Steps that each parameter has taken, and the optimizer's numbers for the next steps.

torch counts per parameter: one that was frozen for a while, or takes no part in some steps, is behind the others.
Parameters with the same counts share their numbers. Usually all parameters do.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from modelfleet.frameworks.torch.optimizers.coefficients import widest
from modelfleet.frameworks.torch.optimizers.rules import STEP
from modelfleet.frameworks.torch.task import Task
from modelfleet.types import State

STEPS_AHEAD = 64  # steps whose numbers are computed at a time

CoefficientsByParameter = dict[tuple[str, ...], dict[str, Tensor]]
"""Numbers `(member,)` by name, for each tuple of parameters that share them."""


class CoefficientsAhead:
    """Computes the numbers of many steps at a time, while the same members step with the same hyperparameters.

    They are computed outside of the program, because a compiler would compute these few numbers again for every
    element that they scale. The counts are not read at every step, because a GPU would have to wait for that.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._unused: frozenset[str] | None = frozenset()  # parameters unused in the last step; None if not known
        self._classes: list[tuple[str, ...]] | None = None  # parameters with the same counts
        self._computed: tuple[tuple[Mapping[str, Tensor], Tensor], Iterator[CoefficientsByParameter]] | None = None

    def forget(self) -> None:
        """Read the counts again before the next step, because they may have been changed."""
        self._classes = self._computed = None

    def stepped(self, unused: frozenset[str] | None) -> None:
        """Record a step, and the parameters that took no part in it; None if they are not known."""
        if unused is None or unused != self._unused:
            self._unused = unused
            self.forget()

    def next(self, state: State, hyper: Mapping[str, Tensor], active: Tensor) -> CoefficientsByParameter:
        """Return the numbers of the next step of these members."""
        known = self._computed
        if known is None or known[0][0] is not hyper or known[0][1] is not active:
            # With float16 a step may be skipped, so the counts are read at every step.
            steps = 1 if self._unused is None or self._task.precision == "fp16" else STEPS_AHEAD
            known = self._computed = (hyper, active), iter(self._compute(state, hyper, steps))
        found = next(known[1], None)
        if found is None:
            self._computed = None
            return self.next(state, hyper, active)
        return found

    def one(self, state: State, hyper: Mapping[str, Tensor]) -> CoefficientsByParameter:
        """Return the numbers of one step of a state of some members."""
        return self._compute(state, hyper, 1)[0]

    def _compute(self, state: State, hyper: Mapping[str, Tensor], steps: int) -> list[CoefficientsByParameter]:
        optimizer, member = self._task.optimizer, state["member"]["step"]
        if self._classes is None:
            self._classes = _classes(state, self._unused or frozenset(), counts=optimizer.counts)
        counts = state["optimizer"]
        done = torch.stack([counts.get(f"{STEP}/{names[0]}", member) for names in self._classes]).unsqueeze(1)
        # (class, step, member). A parameter that takes no part in the next steps does not count them.
        passing = torch.arange(1, steps + 1, dtype=done.dtype, device=done.device).reshape(1, -1, 1)
        taking = [names[0] not in (self._unused or ()) for names in self._classes]
        if not all(taking):
            there = torch.tensor(taking, device=done.device).reshape(-1, 1, 1)
            passing = torch.where(there, passing, 1.0)
        numbers = done + passing
        found = optimizer.coefficients(hyper, numbers)
        if self._task.clip:
            found["clip_norm"] = hyper["clip_norm"]
        dtype = widest(state["params"].values())
        table = [
            (value if name in optimizer.precise else value.to(dtype)).expand(numbers.shape).contiguous()
            for name, value in found.items()
        ]
        by_step = [[column.unbind(0) for column in own.unbind(0)] for own in table]
        return [
            {
                names: {name: by_step[k][row][step] for k, name in enumerate(found)}
                for row, names in enumerate(self._classes)
            }
            for step in range(steps)
        ]


def _classes(state: State, unused: frozenset[str], *, counts: bool) -> list[tuple[str, ...]]:
    """Return the parameters in classes. A class has the same numbers at every step."""
    names = list(state["params"])
    if not counts or not names:
        return [tuple(names)]
    table = torch.stack([state["optimizer"][f"{STEP}/{name}"] for name in names]).tolist()
    classes: dict[tuple[bool, tuple[float, ...]], list[str]] = {}
    for name, row in zip(names, table, strict=True):
        classes.setdefault((name in unused, tuple(row)), []).append(name)
    return [tuple(own) for own in classes.values()]
