"""Numbers of members, such as a dropout rate, that callbacks have changed since a fit began."""

from collections.abc import Iterable, Mapping

from modelfleet.frameworks.lane_context import Task
from modelfleet.history import plain
from modelfleet.members import Member

Numbers = dict[str, float]
"""Numbers of a member by path, as its framework's `numbers_of` has them."""


class ChangedNumbers:
    """Numbers that are attributes of members' models and losses, compared with what they were.

    Only numbers that have changed are kept in a checkpoint. All others are those that a script gives, also when it
    resumes a run.

    Args:
        members: The members, with their tasks, before any callback was called.
    """

    def __init__(self, members: Iterable[tuple[Member, Task]]) -> None:
        own = [(member, task) for member, task in members if hasattr(member.framework, "numbers_of")]
        self._members = {member.name: (member, task) for member, task in own}
        self._given = {name: self._numbers(name) for name in self._members}

    def state(self, names: Iterable[str]) -> dict[str, dict[str, float | str]]:
        """Return the numbers of some members that have changed, by member and path, for JSON."""
        found: dict[str, dict[str, float | str]] = {}
        for name in names:
            if name not in self._members:
                continue
            given, now = self._given[name], self._numbers(name)
            changed = {path: plain(value) for path, value in now.items() if repr(value) != repr(given.get(path))}
            if changed:
                found[name] = changed
        return found

    def restore(self, stored: Mapping[str, Mapping[str, float | str]]) -> None:
        """Set the numbers that `state` returned."""
        for name, values in stored.items():
            if name in self._members:
                member, task = self._members[name]
                own = {path: float(value) if isinstance(value, str) else value for path, value in values.items()}
                member.framework.restore_numbers(member.model, task, own)  # pyrefly: ignore

    def _numbers(self, name: str) -> Numbers:
        member, task = self._members[name]
        return member.framework.numbers_of(member.model, task)  # pyrefly: ignore
