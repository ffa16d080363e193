"""The errors modelfleet raises: what came, what was expected, what to do now."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np


class FleetError(Exception):
    """The base of every error that modelfleet raises on purpose."""


class FleetWarning(UserWarning):
    """What a fleet does is not what you may expect; says what, and what to do."""


class InputError(FleetError, ValueError):
    """Something a caller passed does not fit: data, names, hyperparameters, models."""


class StrategyError(FleetError, ValueError):
    """A strategy was insisted on that these members can't have."""


class BusyError(FleetError, RuntimeError):
    """A verb was called while its fleet is at another one that does not bear it."""


class AllFailedError(FleetError):
    """All members of a fit failed; `history` has the reason of each."""

    def __init__(self, message: str, history: Any = None) -> None:
        super().__init__(message)
        self.history = history


class StoreError(FleetError):
    """A folder of weights can't be read or written."""


class QueueFullError(FleetError):
    """As many requests wait as may wait; `wait` is the suggested number of seconds until the next attempt."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


class DeadlineError(FleetError, TimeoutError):
    """A request was not answered before its deadline."""


class ClosedError(FleetError):
    """What was asked for has been closed."""


class RowsError(FleetError):
    """Some rows of a request failed; what was computed for the others is kept.

    `rows` has the exception of every row that failed, `kept` the numbers of the other rows, and `answers` their
    answers in this order (None if there are none).
    """

    # The defaults are for pickle, which calls with the message and then sets the attributes.
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


class GroupError(FleetError):
    """A rank of a group waited in vain for others; names them, and the step."""


class MissingExtraError(FleetError, ImportError):
    """A package is needed that is not installed; the message has the pip line that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Bring it with: pip install 'modelfleet[{extra}]'"
        )


def refuse_masked(value: Any) -> None:
    """Raise `InputError` for a NumPy array with masked numbers, whatever is computed with it."""
    if np.ma.is_masked(value):
        raise InputError(
            f"{np.ma.count_masked(value)} of {np.size(value)} numbers of a masked array are masked, which no "
            f"model would notice. Fill them, as in x.filled(0.0), or leave out their rows."
        )


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that a misspelt one resembles most, or None if it resembles none."""
    return next(iter(get_close_matches(str(name), list(known), n=1, cutoff=0.5)), None)


def unknown(kind: str, name: object, known: Iterable[str]) -> InputError:
    """Return the error for an unknown name, which suggests the nearest known one."""
    names = sorted(known)
    near = nearest(name, names)
    hint = f"Did you mean {near!r}? " if near else ""
    return InputError(f"unknown {kind} {name!r}. {hint}Known: {', '.join(names)}.")
