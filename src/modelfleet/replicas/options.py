"""Options of replicas, and their checks."""

from numbers import Integral, Real
from typing import Literal, get_args

from modelfleet.errors import InputError
from modelfleet.unknown_names import unknown

Balance = Literal["least-busy", "sticky"]
Isolation = Literal["rows", "batch", "device"]


def check_choice(name: str, value: object, choices: object) -> None:
    """Raise InputError if `value` is not one of the strings of a Literal."""
    if value not in get_args(choices):
        raise unknown(name, value, get_args(choices))


def check_positive(name: str, value: object) -> None:
    """Raise InputError if `value` is not a whole number of at least 1."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name}={value!r}. Give a whole number, at least 1.")


def check_seconds(name: str, value: object, meaning: str) -> None:
    """Raise InputError if `value` is not a number of seconds above 0."""
    if not isinstance(value, Real) or not float(value) > 0:
        raise InputError(f"{name}={value!r}. Give the seconds that {meaning}, more than 0.")


def check_batch_wait(value: object) -> None:
    """Raise InputError if `value` is not a finite number of seconds."""
    if not isinstance(value, Real) or not 0 <= float(value) < float("inf"):
        raise InputError(f"batch_wait={value!r}. Give the seconds that a batch may take to fill, or 0.")


def check_request(user: object, deadline: float | None, priority: object) -> None:
    """Raise InputError if a request's user, deadline or priority can't be used."""
    try:
        hash(user)
    except TypeError as error:
        raise InputError(
            f"a user is named by a {type(user).__name__}, {user!r}, which can't be a key of a dict. "
            f"Name users by strings, numbers or tuples of them."
        ) from error
    if not isinstance(priority, Integral):
        raise InputError(f"priority={priority!r} of user {user!r}. Give a whole number; higher ones come first.")
    if deadline is not None and deadline != deadline:
        raise InputError(f"the deadline of user {user!r} is {deadline}. Give seconds, or None for no deadline.")
