"""Checks of single arguments: what came, and what was expected."""

import math
import os
from numbers import Integral, Real

from modelfleet.errors import InputError


def check_whole(subject: str, value: object, *, least: int = 1, unit: str = "") -> None:
    """Raise InputError if a value is not a whole number of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        of = f" of {unit}" if unit else ""
        raise InputError(f"{subject} is {value!r}, expected a whole number{of}, {least} or more.")


def check_not_negative(subject: str, value: object) -> None:
    """Raise InputError if a value is not a finite number of at least 0."""
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= float(value) < math.inf:
        raise InputError(f"{subject} is {value!r}, expected a finite number, 0 or more.")


def check_flag(subject: str, value: object) -> None:
    """Raise InputError if a value is not True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{subject} is {value!r}, expected True or False.")


def check_path(subject: str, value: object) -> None:
    """Raise InputError if a value can't be the path of a folder."""
    if not isinstance(value, str | os.PathLike) or "\0" in os.fspath(value):
        raise InputError(f"{subject} is {value!r}, expected the path of a folder.")
