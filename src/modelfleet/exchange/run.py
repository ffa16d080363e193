"""Run as an exchange sees it: the members that train, and their state to read and write."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from modelfleet.callbacks import Run
from modelfleet.frameworks.stacked import WEIGHTS
from modelfleet.members import member_seed
from modelfleet.shuffles import permutations, threefry, words
from modelfleet.types import Arrays, State

CHANGING = ("params", "buffers")


class Members(Protocol):
    """Access to the state of a fit's members, wherever their steps are taken (`runs/member_access.py`)."""

    def training(self) -> tuple[str, ...]:
        """Return the members that are training and have not failed."""
        ...

    def read(self, names: Sequence[str], parts: Collection[str]) -> dict[str, Arrays]:
        """Return a copy of some parts of the state, `(member, …)` by part and name."""
        ...

    def write(self, names: Sequence[str], state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Replace some of the state."""
        ...

    def hyperparameters(self, name: str) -> dict[str, float]:
        """Return the hyperparameters that a member has now."""
        ...

    def change_hyperparameters(self, name: str, values: Mapping[str, float]) -> None:
        """Give a member other hyperparameters."""
        ...

    def rows(self, name: str) -> int | None:
        """Return the number of rows in a member's data, if it is known."""
        ...

    def as_snapshot(self, name: str, parts: dict[str, Arrays], /) -> State:
        """Return arrays as tensors of a member's framework, which a checkpoint can hold."""
        ...

    def from_snapshot(self, name: str, snapshot: State, /) -> dict[str, Arrays]:
        """Return the arrays of `as_snapshot`."""
        ...


class RunWithMembers(Run, Protocol):
    """Running fit with access to its members."""

    members: Members


class ExchangeRun:
    """What an exchange gets: the members that train now, and their state to read and write.

    Arrays are NumPy's, on the host, with the member as the first axis: `(member, …)` in the order of the names
    that were asked for. They have the layout that the parameters have in the models.

    Args:
        run: The running fit.
        kind: The name of the exchange, for its draws.
        number: How many exchanges there were before.

    Attributes:
        active: The members that are training. Those that have failed, stopped or finished are not among them.
        number: How many exchanges there were before this one, had there been one at every turn.
    """

    def __init__(self, run: RunWithMembers, kind: str, number: int) -> None:
        self._run, self._kind = run, kind
        self.number = number
        self.active = run.members.training()

    @property
    def fleet(self) -> Any:
        """Return the `Fleet` that is trained."""
        return self._run.fleet

    @property
    def history(self) -> Any:
        """Return the `History` of the fit."""
        return self._run.history

    @property
    def epoch(self) -> int:
        """Return the number of finished epochs."""
        return self._run.epoch

    @property
    def epochs(self) -> int:
        """Return the number of the last epoch."""
        return self._run.epochs

    @property
    def step(self) -> int:
        """Return the number of steps taken in this fit."""
        return self._run.step

    def weights(self, names: Sequence[str], *, buffers: bool = True) -> Arrays:
        """Return the trained weights of some members, `(member, …)` by name, and their buffers.

        Args:
            names: The members.
            buffers: False leaves out what is not trained, such as BatchNorm's running statistics.

        Raises:
            InputError: The members do not have the same structure. The message names the first difference.
        """
        parts = CHANGING if buffers else CHANGING[:1]
        found = self._run.members.read(names, parts)
        return {name: array for part in parts for name, array in found[part].items()}

    def write(self, names: Sequence[str], weights: Mapping[str, np.ndarray]) -> None:
        """Replace weights or buffers of some members by arrays as `weights` returns them. The others stay.

        Raises:
            InputError: The members have no weight or buffer of a name.
        """
        self._run.members.write(names, {part: dict(weights) for part in CHANGING})

    def optimizer_state(self, names: Sequence[str]) -> Arrays:
        """Return the optimizer's state of some members, by names such as `exp_avg/0.weight`.

        Raises:
            InputError: The members do not have the same structure and optimizer.
        """
        return self._run.members.read(names, ["optimizer"])["optimizer"]

    def write_optimizer_state(self, names: Sequence[str], state: Mapping[str, np.ndarray]) -> None:
        """Replace the optimizer's state of some members."""
        self._run.members.write(names, {"optimizer": dict(state)})

    def copy(self, source: str, target: str) -> None:
        """Give a member the weights, buffers, optimizer state and hyperparameters of another one.

        Its random numbers stay its own: shuffles, dropout.

        Raises:
            InputError: The members do not have the same structure and optimizer.
        """
        parts = (*WEIGHTS, "optimizer")
        both = self._run.members.read([source, target], parts)
        state = {part: {name: array[:1] for name, array in own.items()} for part, own in both.items()}
        self._run.members.write([target], state)
        self.set_hyperparameters(target, self.hyperparameters(source))

    def hyperparameters(self, name: str) -> dict[str, float]:
        """Return the hyperparameters that a member has now, such as `lr`, before its schedule.

        Those of a torch member are all numbers of its optimizer; that of a Keras member is the learning rate;
        those of a JAX member are the learning rate, and what was given to `compile` by `mf.each`.
        """
        return self._run.members.hyperparameters(name)

    def set_hyperparameters(self, name: str, values: Mapping[str, float]) -> None:
        """Give a member other hyperparameters for the rest of the fit. Its schedule continues from them.

        Raises:
            InputError: There is no such hyperparameter, or it was compiled as 0.
        """
        self._run.members.change_hyperparameters(name, values)

    def rows(self, name: str) -> int | None:
        """Return the number of rows in a member's data; None if only its loader knows."""
        return self._run.members.rows(name)

    def as_snapshot(self, name: str, parts: dict[str, Arrays]) -> State:
        """Return arrays by part and name as a snapshot, which `arrays` of a callback may return for a member."""
        return self._run.members.as_snapshot(name, parts)

    def from_snapshot(self, name: str, snapshot: State) -> dict[str, Arrays]:
        """Return the arrays of a snapshot that `as_snapshot` made."""
        return self._run.members.from_snapshot(name, snapshot)

    def permutation(self, count: int) -> np.ndarray:
        """Return a permutation of `range(count)`, drawn for this exchange from the fleet's seed."""
        return permutations(self._seed, self.number, np.array([count]))[0]

    def uniform(self, count: int) -> np.ndarray:
        """Return numbers from 0 up to 1 `(count,)`, drawn for this exchange from the fleet's seed."""
        low, high = words(self._seed)
        left, right = threefry(
            low, high, np.arange(count, dtype=np.uint32), np.full(count, self.number, np.uint32)
        )
        return ((left.astype(np.uint64) << np.uint64(21)) ^ (right >> np.uint32(11))).astype(np.float64) / 2.0**53

    @property
    def _seed(self) -> np.ndarray:
        return np.array([member_seed(self._run.fleet.seed, f"exchange/{self._kind}")])
