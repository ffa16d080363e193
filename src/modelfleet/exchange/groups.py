"""Groups of members that exchange among themselves."""

from collections.abc import Iterable, Sequence

from modelfleet.errors import InputError
from modelfleet.unknown_names import unknown

Groups = Sequence[Sequence[str]]


class MemberGroups:
    """Groups of members, by name. Without any, all members are one group.

    Args:
        given: The groups, or None.
        kind: The name of the exchange, for errors.

    Raises:
        InputError: `given` is no list of lists, or has a member twice.
    """

    def __init__(self, given: Groups | None, kind: str) -> None:
        self._kind = kind
        if given is None:
            self._groups: list[list[str]] | None = None
            return
        if isinstance(given, str) or not all(_is_list(group) for group in given):
            raise InputError(f'{kind}: groups is {given!r}; expected lists of names: groups=[["a", "b"], ["c"]].')
        self._groups = [[str(name) for name in group] for group in given]
        names = [name for group in self._groups for name in group]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{kind}: groups has {twice!r} twice. A member can be in one group only.")

    def check(self, names: Sequence[str]) -> None:
        """Raise InputError if a name is not one of the fleet."""
        for name in (name for group in self._groups or () for name in group):
            if name not in names:
                raise unknown(f"member in the groups of {self._kind}", name, names)

    def of(self, names: Sequence[str]) -> list[list[str]]:
        """Return these members by group, without those that are in none."""
        if self._groups is None:
            return [list(names)]
        there = set(names)
        return [[name for name in group if name in there] for group in self._groups]


def _is_list(group: object) -> bool:
    return isinstance(group, Iterable) and not isinstance(group, str)
