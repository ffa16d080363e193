"""Steps that each parameter has taken, and the optimizer's numbers for the next steps.

torch counts per parameter: one that was frozen for a while, or takes no part in some steps, is behind the others.
Parameters with the same counts share their numbers. Usually all parameters do.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from modelfleet.frameworks.torch.optimizers.coefficients import widest
from modelfleet.frameworks.torch.optimizers.rules import STEP
from modelfleet.frameworks.torch.optimizers.slices import Rule, Rules, Slice
from modelfleet.types import State

STEPS_AHEAD = 64  # steps whose numbers are computed at a time

CoefficientsByParameter = dict[tuple[str, ...], dict[str, Tensor]]
"""Numbers `(member,)` by name, for each tuple of parameters that share them."""
CoefficientsBySlice = dict[Slice, CoefficientsByParameter]
"""Numbers of the members of each slice."""
Classes = list[tuple[str, ...]]
"""Parameters that have the same numbers at every step, together."""


class CoefficientsAhead:
    """Computes the numbers of many steps at a time, while the same members step with known hyperparameters.

    They are computed outside of the program, because a compiler would compute these few numbers again for every
    element that they scale. The counts are not read at every step, because a GPU would have to wait for that.

    Args:
        rules: The rules of the lane's members. All have slots at first.
        skips: True if a step may be skipped, as with float16. The counts are then read at every step.
    """

    def __init__(self, rules: Rules, *, skips: bool) -> None:
        self._rules = rules
        self._skips = skips
        self._positions = np.arange(len(rules.numbers))
        self._slices = rules.slices(self._positions)
        self._unused: frozenset[str] | None = frozenset()  # parameters unused in the last step; None if not known
        self._classes: dict[Slice, Classes] | None = None
        self._expected: Sequence[Mapping[str, Tensor]] = ()
        self._computed: _Ahead | None = None

    def give_slots(self, positions: Sequence[int] | np.ndarray) -> None:
        """Compute the numbers of these members from now on, in this order."""
        self._positions = np.asarray(positions, np.int64)
        self._slices = self._rules.slices(self._positions)
        self.forget()

    def forget(self) -> None:
        """Read the counts again before the next step, because they may have been changed."""
        self._classes = self._computed = None

    def expect(self, hypers: Sequence[Mapping[str, Tensor]]) -> None:
        """Take note of the hyperparameters that `next` will be given for the next steps."""
        self._expected = hypers

    def stepped(self, unused: frozenset[str] | None) -> None:
        """Record a step, and the parameters that took no part in it; None if they are not known."""
        if unused is None or unused != self._unused:
            self._unused = unused
            self.forget()

    def next(self, state: State, hyper: Mapping[str, Tensor], active: Tensor) -> CoefficientsBySlice:
        """Return the numbers of the next step of these members."""
        known = self._computed
        found = None if known is None or known.active is not active else known.take(hyper)
        if found is not None:
            return found
        steps = 1 if self._unused is None or self._skips else STEPS_AHEAD
        if self._classes is None:
            self._classes = self._find_classes(state, self._slices)
        hypers = self._following(hyper, steps)
        self._computed = ahead = _Ahead(active, hypers, self._compute(state, hypers, self._classes))
        found = ahead.take(hyper)
        assert found is not None
        return found

    def _following(self, hyper: Mapping[str, Tensor], steps: int) -> Sequence[Mapping[str, Tensor]]:
        """Return the hyperparameters of this step and of the next ones, as far as they are known."""
        for number, expected in enumerate(self._expected):
            if expected is hyper:
                return self._expected[number : number + steps]
        return [hyper] * steps

    def one(
        self, state: State, hyper: Mapping[str, Tensor], slots: np.ndarray | None = None
    ) -> CoefficientsBySlice:
        """Return the numbers of one step of a state of the members in some slots; None for all."""
        slices = self._slices if slots is None else self._rules.slices(self._positions[slots])
        return self._compute(state, [hyper], self._find_classes(state, slices))[0]

    def _find_classes(self, state: State, slices: Sequence[Slice]) -> dict[Slice, Classes]:
        return {own: self._classes_of(own, state) for own in slices}

    def _classes_of(self, own: Slice, state: State) -> Classes:
        names, unused = list(state["params"]), self._unused or frozenset()
        if not self._rules.all[own.rule].optimizer.counts or not names:
            return [tuple(names)]
        table = torch.stack([own.of(state["optimizer"][f"{STEP}/{name}"]) for name in names]).tolist()
        classes: dict[tuple[bool, tuple[float, ...]], list[str]] = {}
        for name, row in zip(names, table, strict=True):
            classes.setdefault((name in unused, tuple(row)), []).append(name)
        return [tuple(found) for found in classes.values()]

    def _compute(
        self, state: State, hypers: Sequence[Mapping[str, Tensor]], classes: Mapping[Slice, Classes]
    ) -> list[CoefficientsBySlice]:
        """Return the numbers of some steps, from the hyperparameters of each."""
        found = []
        for own, together in classes.items():
            hyper: Mapping[str, Tensor] = own.of(hypers[0])
            if any(one is not hypers[0] for one in hypers):  # (step, member) each
                each = [own.of(one) for one in hypers]
                hyper = {name: torch.stack([one[name] for one in each]) for name in hyper}
            rule = self._rules.all[own.rule]
            found.append((own, self._compute_slice(rule, own.state(state), hyper, len(hypers), together)))
        return [{own: by_step[step] for own, by_step in found} for step in range(len(hypers))]

    def _compute_slice(
        self, rule: Rule, state: State, hyper: Mapping[str, Tensor], steps: int, classes: Classes
    ) -> list[CoefficientsByParameter]:
        optimizer, member = rule.optimizer, state["member"]["step"]
        counts = state["optimizer"] if STEP in optimizer.tensor_names else {}
        done = torch.stack([counts.get(f"{STEP}/{names[0]}", member) for names in classes]).unsqueeze(1)
        # (class, step, member). A parameter that takes no part in the next steps does not count them.
        passing = torch.arange(1, steps + 1, dtype=done.dtype, device=done.device).reshape(1, -1, 1)
        taking = [names[0] not in (self._unused or ()) for names in classes]
        if not all(taking):
            there = torch.tensor(taking, device=done.device).reshape(-1, 1, 1)
            passing = torch.where(there, passing, 1.0)
        numbers = done + passing
        found = optimizer.coefficients(hyper, numbers)
        if rule.clip:
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
                for row, names in enumerate(classes)
            }
            for step in range(steps)
        ]


class _Ahead:
    """Numbers that were computed for some steps, to be taken in their order."""

    def __init__(
        self, active: Tensor, hypers: Sequence[Mapping[str, Tensor]], numbers: Sequence[CoefficientsBySlice]
    ) -> None:
        self.active = active
        self._hypers, self._numbers = hypers, numbers
        self._taken = 0

    def take(self, hyper: Mapping[str, Tensor]) -> CoefficientsBySlice | None:
        """Return the numbers of the next step; None if there are none for these hyperparameters."""
        if self._taken == len(self._hypers) or self._hypers[self._taken] is not hyper:
            return None
        self._taken += 1
        return self._numbers[self._taken - 1]
