"""Objects whose Python the members of several lanes run, so that the lanes can't run in two threads."""

from collections.abc import Sequence

from modelfleet.lanes.lane import Lane


def find_shared_object(lanes: Sequence[Lane]) -> tuple[str, str, str] | None:
    """Return two members of different lanes that run the Python of one object, and the object's name.

    Such lanes must not run in two threads: a step sets the mode of its model's modules and restores it afterwards,
    while the other member may be running one of them.
    """
    owners: dict[int, list[tuple[int, str, bool]]] = {}
    for number, lane in enumerate(lanes):
        runs_python = not lane.engine.fused or lane.engine.untraced is not None
        for name, one in lane.engine.objects():
            known = owners.setdefault(id(one), [])
            for other, member, other_runs_python in known:
                if other != number and (runs_python or other_runs_python):
                    return member, lane.names[0], name
            known.append((number, lane.names[0], runs_python))
    return None
