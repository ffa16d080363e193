"""Hyperparameters of a lane's next steps, worked out together, so that they go to the device together."""

from collections.abc import Callable

import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.adapter_protocol import Schedules
from modelfleet.lanes.lane import Columns
from modelfleet.runs.factors import Factors

STEPS_AHEAD = 64


class ColumnsAhead:
    """Works out the hyperparameters of many steps at a time, for schedules that change them at every step.

    Args:
        schedules: The schedules of the lane's members.
        factors: What comes after the schedules.
        expect: Called with the hyperparameters of the next steps whenever they have been worked out.
    """

    def __init__(self, schedules: Schedules, factors: Factors, expect: Callable[[list[Columns]], None]) -> None:
        self._schedules, self._factors, self._expect = schedules, factors, expect
        self._columns: list[Columns] = []
        self._begun = self._stepping = np.empty(0)  # at the first of them: the members' steps, and who goes on
        self._changes = -1  # of the factors

    def forget(self) -> None:
        """Work them out again: the schedules, or the lane's slots, have changed."""
        self._columns = []

    def at(self, steps: np.ndarray, stepping: np.ndarray, left: int | None) -> Columns:
        """Return the hyperparameters of a step.

        Args:
            steps: `(member,)`: the steps that each member has taken.
            stepping: `(member,)`: True for each member that takes this one.
            left: How many steps the epoch has left, this one included; None if that is not known.
        """
        if self._columns and self._changes == self._factors.changes and np.array_equal(stepping, self._stepping):
            taken = (steps - self._begun)[stepping]
            number = int(taken[0])
            if 0 <= number < len(self._columns) and (taken == number).all():
                return self._columns[number]
        self._begun, self._stepping, self._changes = steps.copy(), stepping.copy(), self._factors.changes
        self._columns = [self._factors.applied(self._schedules.at(steps))]
        for number in range(1, min(STEPS_AHEAD, STEPS_AHEAD if left is None else left)):
            try:
                found = self._schedules.at(steps + number * stepping)
            except InputError:  # a scheduler ends before the fit does: said when that step comes
                break
            self._columns.append(self._factors.applied(found))
        self._expect(self._columns)
        return self._columns[0]
