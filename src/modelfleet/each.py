"""`each`: one value per member."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from modelfleet.errors import InputError

_MAX_LISTED = 5  # names shown in an error


class Each:
    """One value per member, in member order or by name. `modelfleet.each` makes it.

    Attributes:
        values: A list in member order, or a dict by member name.
    """

    def __init__(self, values: Iterable[Any] | Mapping[str, Any]) -> None:
        self.values: dict[str, Any] | list[Any]
        if isinstance(values, Mapping):
            self.values = {str(name): value for name, value in values.items()}
            if len(self.values) != len(values):  # 1 and "1" are the same name
                raise InputError(f"each(...) names a member twice: its keys are {_listed(list(values))}.")
            return
        if isinstance(values, str | bytes | set | frozenset):
            raise _not_a_sequence(values)
        try:
            self.values = list(values)
        except TypeError as error:
            raise _not_a_sequence(values) from error

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"each({self.values!r})"


def each(values: Iterable[Any] | Mapping[str, Any]) -> Each:
    """Give every member its own value.

        fleet.compile("adam", "mse", lr=mf.each([1e-3, 1e-2]))
        fleet.fit(mf.each({"berlin": (xb, yb), "paris": (xp, yp)}))

    Args:
        values: A sequence in member order, or a mapping by member name.

    Returns:
        A value for `fit`, `compile` and the other verbs, wherever they take one value per member.

    Raises:
        InputError: If `values` is not a sequence or a mapping, or names a member twice.
    """
    return Each(values)


def per_member(value: Any, names: Sequence[str], argument: str) -> list[Any]:
    """Return the value of every member, in the order of `names`.

    Args:
        value: `each(...)`, or one value that all members have.
        names: The members.
        argument: The name of the argument, for errors.

    Raises:
        InputError: If `each(...)` does not have exactly one value for every member.
    """
    if not isinstance(value, Each):
        return [value] * len(names)
    if isinstance(value.values, list):
        if len(value.values) != len(names):
            raise InputError(
                f"{argument}: each(...) has {len(value.values)} values, but the fleet has {len(names)} members. "
                f"Give one value per member, or a mapping by member name."
            )
        return list(value.values)
    known = set(names)
    strangers = [name for name in value.values if name not in known]
    if strangers:
        raise InputError(
            f"{argument}: each(...) names {_listed(strangers)}, which the fleet does not have. "
            f"Its members are {_listed(names)}."
        )
    missing = [name for name in names if name not in value.values]
    if missing:
        raise InputError(f"{argument}: each(...) has no value for {_listed(missing)}. Give every member one.")
    return [value.values[name] for name in names]


def refuse_list(value: object, argument: str, names: Sequence[str]) -> None:
    """Raise `InputError` if an argument that takes one value was given several, without `each`.

    Args:
        value: The value to check. A mapping is refused if its keys are among `names`.
        argument: The name of the argument, for the error.
        names: The members.
    """
    if isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0:
        shown, form = f"a {type(value).__name__}", "[...]"
    elif isinstance(value, Mapping) and value and all(str(key) in names for key in value):
        shown, form = "a mapping by member", "{...}"
    else:
        return
    raise InputError(
        f"{argument} is {shown}, expected one value for all members. "
        f"To give every member its own, use mf.each: {argument}=mf.each({form})."
    )


def _not_a_sequence(values: object) -> InputError:
    return InputError(
        f"each({values!r}) got a {type(values).__name__}. "
        f"Give one value per member: a sequence in member order, or a mapping by member name."
    )


def _listed(names: Sequence[object]) -> str:
    shown = ", ".join(map(repr, names[:_MAX_LISTED]))
    return shown if len(names) <= _MAX_LISTED else f"{shown} and {len(names) - _MAX_LISTED} more"
