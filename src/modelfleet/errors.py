"""Errors that modelfleet raises: what came, what was expected, what to do now."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class FleetError(Exception):
    """Base of every error that modelfleet raises on purpose."""


class FleetWarning(UserWarning):
    """Warning that a fleet does something you may not expect. The message says what, and what to do."""


class InputError(FleetError, ValueError):
    """Raised if an argument does not fit: data, names, hyperparameters or models."""


class StrategyError(FleetError, ValueError):
    """Raised if the given strategy can't be used with these members."""


class BusyError(FleetError, RuntimeError):
    """Raised if a verb is called while the fleet is busy with another one."""


class AllFailedError(FleetError):
    """Raised if all members of a fit failed.

    Attributes:
        history: The `History` of the fit, with the reason of every failure.
    """

    def __init__(self, message: str, history: Any = None) -> None:
        super().__init__(message)
        self.history = history


class StoreError(FleetError):
    """Raised if a saved folder can't be read or written."""


class QueueFullError(FleetError):
    """Raised if the queue of requests is full.

    Attributes:
        wait: The suggested number of seconds until the next attempt.
    """

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


class DeadlineError(FleetError, TimeoutError):
    """Raised if a request was not answered before its deadline."""


class ClosedError(FleetError):
    """Raised if an object has been closed and takes no more requests."""


class RowsError(FleetError):
    """Raised if some rows of a request failed. The answers of the other rows are kept.

    Attributes:
        rows: The exception of every row that failed, by row number.
        kept: The numbers of the other rows.
        answers: The answers of these rows, in the same order; None if there are none.
    """

    # The defaults are for pickle, which calls with the message alone and then sets the attributes.
    def __init__(
        self,
        message: str,
        rows: Mapping[int, Exception] | None = None,
        answers: Any = None,
        kept: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.rows: dict[int, Exception] = dict(rows or {})
        self.answers = answers
        self.kept = tuple(kept)


class RankLostError(FleetError):
    """Raised if a process has waited too long for others of its group. The message names them, and the step."""


class DeadlockError(FleetError):
    """Raised if the ranks of a schedule would wait for each other forever.

    Attributes:
        circle: Who waits for whom, as (rank, first, then): the rank comes to its operation number `then` only
            after its operation number `first`. The next entry's `first` is the other rank's part of that `then`.
            Empty if an operation waits for one that no rank has.
    """

    def __init__(self, message: str, circle: Sequence[tuple[int, int, int]] = ()) -> None:
        super().__init__(message)
        self.circle = tuple(circle)


class MissingExtraError(FleetError, ImportError):
    """Raised if a package that is needed is not installed. The message has the pip command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Install it with: pip install 'modelfleet[{extra}]'"
        )


def refuse_masked(value: Any) -> None:
    """Raise `InputError` for a NumPy array with masked numbers. Models would compute with the hidden numbers."""
    # Whoever has made one has imported numpy.ma. It takes 10 ms.
    if "numpy.ma" in sys.modules and np.ma.is_masked(value):
        raise InputError(
            f"{np.ma.count_masked(value)} of {np.size(value)} numbers of a masked array are masked, which no "
            f"model would notice. Fill them, as in x.filled(0.0), or leave out their rows."
        )
