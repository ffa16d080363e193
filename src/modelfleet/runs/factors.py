"""Factors of hyperparameters, by which members differ from what they were compiled with."""

from collections.abc import Mapping, Sequence

import numpy as np

from modelfleet.errors import InputError

Columns = Mapping[str, np.ndarray]
"""Hyperparameters by name, `(member,)` each."""


class Factors:
    """What the hyperparameters of a lane's members are multiplied by during a fit, after their schedules.

    Args:
        names: The names of the members.
        compiled: The hyperparameters as compiled.
    """

    def __init__(self, names: Sequence[str], compiled: Columns) -> None:
        self._names, self._compiled = names, compiled
        self._factors: dict[str, np.ndarray] = {}
        self.changes = 0
        """How often the factors have changed."""
        self._last: tuple[Columns, Columns] | None = None  # the columns that were given last, and the result

    def of(self, position: int) -> dict[str, float]:
        """Return a member's hyperparameters as a constant schedule would have them now."""
        found = {name: float(column[position]) for name, column in self._compiled.items()}
        found.update({name: found[name] * float(own[position]) for name, own in self._factors.items()})
        return {name: value for name, value in found.items() if np.isfinite(value)}

    def change(self, position: int, values: Mapping[str, float]) -> None:
        """Give a member other hyperparameters.

        Raises:
            InputError: The member has no such hyperparameter, or it is 0, which no factor changes.
        """
        known = self.of(position)
        for name, value in values.items():
            member = self._names[position]
            if name not in known:
                raise InputError(
                    f"member {member!r} has no hyperparameter {name!r} that can change during a fit. "
                    f"Those that can: {', '.join(known) or 'none'}."
                )
            if not np.isfinite(value):
                raise InputError(f"{name} of member {member!r} would become {value}; expected a finite number.")
            compiled = float(self._compiled[name][position])
            if value < 0 <= compiled:
                raise InputError(f"{name} of member {member!r} would become {value}; expected 0 or more.")
            if compiled == 0 and value != 0:
                raise InputError(
                    f"{name} of member {member!r} would become {value}, but was compiled as 0, and a schedule "
                    f"multiplies what was compiled. Give compile a small {name} above 0."
                )
            column = self._factors.setdefault(name, np.ones(len(self._names)))
            column[position] = value / compiled if compiled else 1.0
        self._last = None
        self.changes += 1

    def applied(self, columns: Columns) -> Columns:
        """Return columns with the factors applied; the same object as for the last call if nothing changed."""
        if not self._factors:
            return columns
        if self._last is None or self._last[0] is not columns:
            changed = {name: columns[name] * own for name, own in self._factors.items()}
            self._last = columns, {**columns, **changed}
        return self._last[1]

    def state(self) -> dict[str, list[float]]:
        """Return the factors as JSON."""
        return {name: own.tolist() for name, own in self._factors.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue with what `state` returned."""
        known = {name: own for name, own in state.items() if name in self._compiled}
        self._factors = {name: np.array(own, dtype=np.float64) for name, own in known.items()}
        self._last = None
        self.changes += 1

    def select(self, positions: np.ndarray) -> dict[str, list[float]]:
        """Return the state for some of the members."""
        return {name: own[positions].tolist() for name, own in self._factors.items()}
