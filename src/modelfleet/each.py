"""`each`: one value per member."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from modelfleet.errors import InputError


class Each:
    """One value per member, in member order or by name. Made by `modelfleet.each`."""

    def __init__(self, values: Iterable[Any] | Mapping[str, Any]) -> None:
        self.values: dict[str, Any] | list[Any]
        if isinstance(values, Mapping):
            self.values = {str(name): value for name, value in values.items()}
            if len(self.values) != len(values):  # 1 and "1" are the same name
                raise InputError(f"each(...) names a member twice: its keys are {_some(list(values))}.")
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

    `values` is a sequence in member order, or a mapping by member name:

        fleet.compile("adam", "mse", lr=mf.each([1e-3, 1e-2]))
        fleet.fit(mf.each({"berlin": (xb, yb), "paris": (xp, yp)}))
    """
    return Each(values)


def spread(value: Any, names: Sequence[str], what: str) -> list[Any]:
    """The value of every member, in the order of `names`: `value` itself, or what `each` gives it."""
    if not isinstance(value, Each):
        return [value] * len(names)
    if isinstance(value.values, list):
        if len(value.values) != len(names):
            raise InputError(
                f"{what}: each(...) has {len(value.values)} values, but the fleet has {len(names)} members. "
                f"Give one value per member, or a mapping by member name."
            )
        return list(value.values)
    known = set(names)
    strangers = [name for name in value.values if name not in known]
    if strangers:
        raise InputError(
            f"{what}: each(...) names {_some(strangers)}, which the fleet does not have. "
            f"Its members are {_some(names)}."
        )
    missing = [name for name in names if name not in value.values]
    if missing:
        raise InputError(f"{what}: each(...) has no value for {_some(missing)}. Give every member one.")
    return [value.values[name] for name in names]


def _not_a_sequence(values: object) -> InputError:
    return InputError(
        f"each({values!r}) is given a {type(values).__name__}. "
        f"Give one value per member: a sequence in member order, or a mapping by member name."
    )


def _some(names: Sequence[object], most: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
