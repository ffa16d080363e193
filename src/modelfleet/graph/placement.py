"""Placement: which devices each node of a graph runs on."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from modelfleet.devices import parse_devices
from modelfleet.errors import InputError
from modelfleet.graph.topology import Topology
from modelfleet.unknown_names import unknown

DevicesLike: TypeAlias = str | Sequence[str] | Sequence[Sequence[str]] | Mapping[str, str | Sequence[str]]
Rows: TypeAlias = dict[str, tuple[str, ...]]
"""Devices of every node: one, or a row of replicas."""


def by_node(devices: DevicesLike, topology: Topology) -> Rows | None:
    """Return the row of each node if the user named them by node. None if `devices` is one list for all.

    Raises:
        InputError: There is not one row for every node, or a row is empty.
    """
    nodes = topology.nodes
    if isinstance(devices, Mapping):
        for name in devices:
            if name not in nodes:
                raise unknown("node", name, nodes)
        missing = [name for name in nodes if name not in devices]
        if missing:
            raise InputError(
                f"devices names none for {missing[0]!r}. Name a device, or a row of them, for every node."
            )
        return {name: _row(devices[name], name) for name in nodes}
    if isinstance(devices, str) or all(isinstance(one, str) for one in devices):
        return None
    if len(devices) != len(nodes):
        raise InputError(
            f"devices has {len(devices)} rows for {len(nodes)} nodes ({', '.join(nodes)}). Give one row for each."
        )
    return {name: _row(own, name) for name, own in zip(nodes, devices, strict=True)}


def _row(given: Any, name: str) -> tuple[str, ...]:
    found = parse_devices(given)
    if found is None:
        raise InputError(f'the row of {name!r} is "auto". Name its devices, as in ["cuda:0", "cuda:1"].')
    return tuple(map(str, found))


def spread(topology: Topology, devices: Sequence[str], seconds: Mapping[str, float], *, in_turn: bool) -> Rows:
    """Return one device for each node, so that the busiest device has as little to do as possible.

    Nodes that follow each other stay together, so that few tensors cross devices.

    Args:
        topology: The graph.
        devices: The devices to use.
        seconds: What each node takes.
        in_turn: Give the devices the nodes in turn, as the interleaved schedule needs it.
    """
    nodes = topology.nodes
    if in_turn:
        return {name: (devices[index % len(devices)],) for index, name in enumerate(nodes)}
    groups = min(len(devices), len(nodes))
    times = [seconds[name] for name in nodes]
    cuts = _cuts(times, groups)
    found: Rows = {}
    for device, start, stop in zip(devices, [0, *cuts], [*cuts, len(nodes)], strict=False):
        found.update(dict.fromkeys(nodes[start:stop], (device,)))
    return found


def _cuts(times: Sequence[float], groups: int) -> list[int]:
    """Return where to cut a row of times into groups, none of them empty, whose largest sum is smallest."""
    count = len(times)
    sums = [0.0]
    for value in times:
        sums.append(sums[-1] + value)
    best = [[float("inf")] * (count + 1) for _ in range(groups + 1)]
    came = [[0] * (count + 1) for _ in range(groups + 1)]
    best[0][0] = 0.0
    for group in range(1, groups + 1):
        for end in range(group, count + 1):
            for start in range(group - 1, end):
                value = max(best[group - 1][start], sums[end] - sums[start])
                if value < best[group][end]:
                    best[group][end], came[group][end] = value, start
    cuts, end = [], count
    for group in range(groups, 1, -1):
        end = came[group][end]
        cuts.append(end)
    return cuts[::-1]
