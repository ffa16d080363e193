"""How many steps each parameter has taken, and the optimizer's numbers for the steps to come.

torch counts per parameter: one that was frozen for a while, or takes no part in some steps, is behind the others.
The parameters that have counted the same steps share their numbers. Usually those are all of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from modelfleet.frameworks.torch.algorithms import STEP
from modelfleet.frameworks.torch.coefficients import computing
from modelfleet.frameworks.torch.task import Task
from modelfleet.types import State

STEPS_AHEAD = 64  # for which the optimizer's numbers are worked out at a time

# By the parameters that they are for: numbers `(member,)` by name.
Coefficients = dict[tuple[str, ...], dict[str, Tensor]]


class CoefficientsAhead:
    """Works out the numbers of many steps at a time, while the same members step with the same hyperparameters.

    Outside of the program: a compiler would work out these few numbers again for every element they scale. And
    without a look at the counts at every step, which a GPU would have to wait for.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._unused: frozenset[str] | None = frozenset()  # in the last step; None: not known
        self._alike: list[tuple[str, ...]] | None = None  # the parameters that have counted the same steps
        self._coming: tuple[tuple[Any, Tensor], Iterator[Coefficients]] | None = None

    def forget(self) -> None:
        """Look at the counts again before the next step: somebody else may have changed them."""
        self._alike = self._coming = None

    def stepped(self, unused: frozenset[str] | None) -> None:
        """Take note of a step and of the parameters that took no part in it; None: that is not known."""
        if unused is None or unused != self._unused:
            self._unused = unused
            self.forget()

    def next(self, state: State, hyper: dict[str, Tensor], active: Tensor) -> Coefficients:
        """The numbers of the next step of these members."""
        known = self._coming
        if known is None or known[0][0] is not hyper or known[0][1] is not active:
            # With float16 a step may be skipped, so there each step must look.
            many = 1 if self._unused is None or self._task.precision == "fp16" else STEPS_AHEAD
            known = self._coming = (hyper, active), iter(self._work_out(state, hyper, many))
        found = next(known[1], None)
        if found is None:
            self._coming = None
            return self.next(state, hyper, active)
        return found

    def one(self, state: State, hyper: dict[str, Tensor]) -> Coefficients:
        """The numbers of one step of a state of some of the members."""
        return self._work_out(state, hyper, 1)[0]

    def _work_out(self, state: State, hyper: Mapping[str, Tensor], steps: int) -> list[Coefficients]:
        optimizer, member = self._task.optimizer, state["member"]["step"]
        if self._alike is None:
            self._alike = _alike(state, self._unused or frozenset(), counts=optimizer.counts)
        counts = state["optimizer"]
        done = torch.stack([counts.get(f"{STEP}/{names[0]}", member) for names in self._alike]).unsqueeze(1)
        # (class, step, member). What takes no part in the steps to come does not count them.
        passing = torch.arange(1, steps + 1, dtype=done.dtype, device=done.device).reshape(1, -1, 1)
        taking = [names[0] not in (self._unused or ()) for names in self._alike]
        if not all(taking):
            there = torch.tensor(taking, device=done.device).reshape(-1, 1, 1)
            passing = torch.where(there, passing, 1.0)
        numbers = done + passing
        found = optimizer.coefficients(hyper, numbers)
        if self._task.clip:
            found["clip_norm"] = hyper["clip_norm"]
        dtype = _computing(state["params"].values())
        table = [
            (value if name in optimizer.precise else value.to(dtype)).expand(numbers.shape).contiguous()
            for name, value in found.items()
        ]
        by_step = [[column.unbind(0) for column in own.unbind(0)] for own in table]
        return [
            {
                names: {name: by_step[k][row][step] for k, name in enumerate(found)}
                for row, names in enumerate(self._alike)
            }
            for step in range(steps)
        ]


def _alike(state: State, unused: frozenset[str], *, counts: bool) -> list[tuple[str, ...]]:
    """The parameters in classes: those whose numbers are the same at every step to come."""
    names = list(state["params"])
    if not counts or not names:
        return [tuple(names)]
    table = torch.stack([state["optimizer"][f"{STEP}/{name}"] for name in names]).tolist()
    classes: dict[Any, list[str]] = {}
    for name, row in zip(names, table, strict=True):
        classes.setdefault((name in unused, tuple(row)), []).append(name)
    return [tuple(own) for own in classes.values()]


def _computing(params: Iterable[Tensor]) -> torch.dtype:
    """The dtype that holds the numbers for every parameter: one that the widest of them computes in."""
    dtype = torch.float32
    for parameter in params:
        dtype = torch.promote_types(dtype, computing(parameter.dtype))
    return dtype
