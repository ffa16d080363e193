"""Averaging: members that train on their own data, and average their weights now and then."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from modelfleet.callbacks import Run, Snapshot
from modelfleet.each import Each, per_member
from modelfleet.errors import InputError
from modelfleet.exchange.base import Exchange
from modelfleet.exchange.groups import Groups, MemberGroups
from modelfleet.exchange.run import ExchangeRun
from modelfleet.types import Arrays


@dataclass(frozen=True)
class Outer:
    """Outer optimizer of `Average`: SGD with Nesterov momentum on what the members have moved by, as in DiLoCo.

    Before each exchange, all members of a group have the weights `w`. After it, with `d` the (weighted) mean of
    `w` minus each member's weights, the momentum is `m = momentum * m + d`, and all members have the weights
    `w - lr * (d + momentum * m)`. With `lr=1` and `momentum=0`, that is the plain average.

    Args:
        lr: The outer learning rate.
        momentum: The outer momentum.

    Raises:
        InputError: A number is out of range.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise InputError(f"Outer: lr is {self.lr!r}, expected a number above 0.")
        if not 0 <= self.momentum < 1:
            raise InputError(f"Outer: momentum is {self.momentum!r}, expected a number from 0 up to 1.")


class Average(Exchange):
    """Average the members' weights every few steps or epochs: federated averaging, local SGD, DiLoCo.

        fleet.fit(mf.each(data_of_client), epochs=20, exchange=mf.Average(every=1, weights="rows"))

    Every member then continues from the average. Floating-point buffers, such as BatchNorm's running statistics,
    are averaged as well; integer buffers, frozen weights and the optimizer's state stay each member's own.
    Members that have failed, stopped or finished take no part, and keep their weights.

    Args:
        every: Average after this many epochs. By default, after every one.
        every_steps: Average after this many steps instead.
        weights: A member's part in the average: `mf.each(...)` of numbers, or "rows" for the number of rows in its
            data. All count alike by default.
        outer: An outer optimizer, such as `mf.Outer(lr=0.7, momentum=0.9)`. None takes the average itself.
        groups: Lists of names. Members average within their group; those in no group stay alone. By default, all
            members are one group.

    Raises:
        InputError: An argument is out of range. `fit` raises it before the first step if members of a group do not
            have the same structure, or their rows are not known.
    """

    def __init__(
        self,
        every: int | None = None,
        *,
        every_steps: int | None = None,
        weights: Each | Literal["rows"] | None = None,
        outer: Outer | None = None,
        groups: Groups | None = None,
    ) -> None:
        super().__init__(every, every_steps=every_steps)
        if not (weights is None or weights == "rows" or isinstance(weights, Each)):
            raise InputError(
                f'Average: weights is {weights!r}; expected mf.each(...) of numbers, "rows", or None for equal '
                f"weights."
            )
        if not (outer is None or isinstance(outer, Outer)):
            raise InputError(f"Average: outer is {outer!r}; expected mf.Outer(lr=0.7, momentum=0.9), or None.")
        self.weights = weights
        self.outer = outer
        self.groups = MemberGroups(groups, "Average")
        self._shares: dict[str, float] = {}
        self._outer_state: dict[str, dict[str, Arrays]] = {}  # by group's first member: "weights" and "momentum"
        self._snapshots: Mapping[str, Snapshot] = {}
        self._run: ExchangeRun | None = None

    def start(self, run: ExchangeRun, *, resumed: bool) -> None:
        """Check that the members of each group can be averaged."""
        names = run.fleet.names
        self.groups.check(names)
        self._shares = dict(zip(names, self._parts(run, names), strict=True))
        for group in self.groups.of(names) if isinstance(self.weights, Each) else ():
            if not any(self._shares[name] for name in group):
                raise InputError(
                    f"Average: the weights of {', '.join(map(repr, group))} are all 0, so they have no average. "
                    f"Give one of them a weight above 0."
                )
        self._run = run
        self._outer_state = {}
        for group in self.groups.of(names):
            own = [name for name in group if name in run.active]
            if not own:
                continue
            weights = run.weights(own, buffers=self.outer is None)
            if self.outer is not None and resumed:
                self._outer_state[group[0]] = run.from_snapshot(group[0], self._snapshots[group[0]])
            elif self.outer is not None:
                start = {name: self._mean(own, array) for name, array in weights.items()}
                zeros = {name: np.zeros_like(array) for name, array in start.items()}
                self._outer_state[group[0]] = {"weights": start, "momentum": zeros}
        self._snapshots = {}

    def exchange(self, run: ExchangeRun) -> None:
        """Average the members of each group."""
        for group in self.groups.of(run.fleet.names):
            own = [name for name in group if name in run.active]
            if not own or sum(self._shares[name] for name in own) == 0:
                continue
            weights = {
                name: self._mean(own, array) for name, array in run.weights(own).items() if array.dtype.kind == "f"
            }
            if self.outer is not None:
                weights |= self._outer_step(self.outer, self._outer_state[group[0]], weights)
            run.write(own, {name: _for_all(array, len(own)) for name, array in weights.items()})

    def on_fit_end(self, run: Run) -> None:
        """Forget the members."""
        self._run = None

    def arrays(self) -> dict[str, Snapshot]:
        """Return the outer optimizer's state, by the first member of each group."""
        run = self._run
        if run is None:
            return {}
        return {first: run.as_snapshot(first, state) for first, state in self._outer_state.items()}

    def restore_arrays(self, arrays: Mapping[str, Snapshot]) -> None:
        """Restore what `arrays` returned, when the run starts."""
        self._snapshots = arrays

    def _outer_step(self, outer: Outer, state: dict[str, Arrays], average: Arrays) -> Arrays:
        """Take a step of the outer optimizer from the last common weights towards the average."""
        for name, before in state["weights"].items():
            moved = before - average[name]
            momentum = state["momentum"][name] = outer.momentum * state["momentum"][name] + moved
            state["weights"][name] = before - outer.lr * (moved + outer.momentum * momentum)
        return state["weights"]

    def _mean(self, names: Sequence[str], array: np.ndarray) -> np.ndarray:
        """Return the weighted mean over the members, computed in float64."""
        shares = np.array([self._shares[name] for name in names])
        return np.tensordot(shares / shares.sum(), array, axes=1).astype(array.dtype)

    def _parts(self, run: ExchangeRun, names: Sequence[str]) -> list[float]:
        if isinstance(self.weights, Each):
            return [_number(value, name) for value, name in zip(self._given(names), names, strict=True)]
        return [1.0 if self.weights is None else _rows(run, name) for name in names]

    def _given(self, names: Sequence[str]) -> list[object]:
        return per_member(self.weights, names, "weights of Average")


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 <= value < math.inf:
        raise InputError(f"Average: the weight of member {name!r} is {value!r}, expected a number of at least 0.")
    return float(value)


def _rows(run: ExchangeRun, name: str) -> float:
    rows = run.rows(name)
    if rows is None:
        raise InputError(
            f'Average: weights="rows" needs the number of rows of member {name!r}, which its loader does not say. '
            f"Give the numbers: weights=mf.each([...])."
        )
    return float(rows)


def _for_all(array: np.ndarray, count: int) -> np.ndarray:
    return np.broadcast_to(array, (count, *array.shape))
