"""Which operations of different ranks belong together: a send and its receive, and the parts of a collective."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from modelfleet.errors import DeadlockError, InputError
from modelfleet.schedules.operations import TRANSFERS, Operation, Schedule


class Place(NamedTuple):
    """Says where an operation is: its rank, its index in the rank's list, and the number of its group.

    Transfers that run at once are one group. Every other transfer or collective is a group of its own.
    """

    rank: int
    index: int
    group: int


class Meeting(NamedTuple):
    """Is one event in which several ranks take part: a transfer, or a collective.

    `places` has the operation of each rank; for a transfer first the send, then the receive.
    """

    places: tuple[Place, ...]


class _Channel(NamedTuple):
    """Names the tensors that are matched in their order: an edge, its direction, the sender and the receiver."""

    edge: str
    gradient: bool
    source: int
    target: int


def match(schedule: Schedule) -> tuple[Meeting, ...]:
    """Return the meetings of a schedule.

    The k-th send of a channel meets its k-th receive. The k-th time that a rank enters a sum of the same node over
    the same ranks, it meets the others' k-th time.

    Raises:
        DeadlockError: If an operation waits for one that no rank has.
        InputError: If an operation names a rank that there is not, or a group is not made of transfers.
    """
    sends: dict[_Channel, list[Place]] = defaultdict(list)
    receives: dict[_Channel, list[Place]] = defaultdict(list)
    sums: dict[tuple[str, tuple[int, ...]], dict[int, list[Place]]] = defaultdict(lambda: defaultdict(list))
    for rank, operations in enumerate(schedule.operations):
        for place in _places(schedule, rank, operations):
            operation = operations[place.index]
            if operation.kind == "sum":
                sums[operation.node, tuple(sorted(operation.ranks))][rank].append(place)
            elif operation.kind == "send":
                sends[_Channel(operation.edge, operation.gradient, rank, operation.peer)].append(place)
            else:
                receives[_Channel(operation.edge, operation.gradient, operation.peer, rank)].append(place)

    meetings = []
    for channel in dict.fromkeys([*sends, *receives]):
        given, taken = sends[channel], receives[channel]
        for send, receive in zip(given, taken, strict=False):
            meetings.append(Meeting((send, receive)))
        for place in [*given[len(taken) :], *taken[len(given) :]]:
            _raise_alone(schedule, place)
    for (_, ranks), entered in sums.items():
        times = max(map(len, entered.values()))
        for k in range(times):
            absent = [rank for rank in ranks if len(entered[rank]) <= k]
            if absent:
                _raise_absent(schedule, next(own[k] for own in entered.values() if len(own) > k), absent)
            meetings.append(Meeting(tuple(entered[rank][k] for rank in ranks)))
    return tuple(sorted(meetings, key=lambda meeting: meeting.places))


def _places(schedule: Schedule, rank: int, operations: Sequence[Operation]) -> list[Place]:
    """Return the places of a rank's transfers and collectives, checked."""
    places: list[Place] = []
    group = -1
    for index, operation in enumerate(operations):
        if operation.with_previous and not (
            operation.kind in TRANSFERS and index > 0 and operations[index - 1].kind in TRANSFERS
        ):
            raise InputError(
                f"'{operation.describe(schedule.devices)}' of {schedule.devices[rank]} is to run at once with the "
                "operation before it, but only a send or a receive right after another one can. Leave out "
                "with_previous."
            )
        if operation.kind not in TRANSFERS and operation.kind != "sum":
            continue
        _check_ranks(schedule, rank, operation)
        group += not operation.with_previous
        places.append(Place(rank, index, group))
    return places


def _check_ranks(schedule: Schedule, rank: int, operation: Operation) -> None:
    devices = schedule.devices
    ranks = operation.ranks if operation.kind == "sum" else (operation.peer,)
    if not all(0 <= other < len(devices) for other in ranks):
        raise InputError(
            f"'{operation.describe(devices)}' of {devices[rank]} names a rank that there is not. The ranks are "
            f"0 to {len(devices) - 1}."
        )
    if operation.kind == "sum" and (rank not in ranks or len(set(ranks)) < len(ranks)):
        raise InputError(
            f"{devices[rank]} has '{operation.describe(devices)}'. Name every rank that takes part once, and "
            f"{devices[rank]} among them."
        )


def _raise_alone(schedule: Schedule, place: Place) -> None:
    operation = schedule.operations[place.rank][place.index]
    other = schedule.devices[operation.peer]
    does = "never receives it" if operation.kind == "send" else "never sends it"
    raise DeadlockError(
        f"The schedule '{schedule.name}' can't end: {schedule.devices[place.rank]} {doing(operation, schedule)}, "
        f"but {other} {does}. Give {other} one '{'receive' if operation.kind == 'send' else 'send'}' of "
        f"`{operation.edge}` for each of them."
    )


def _raise_absent(schedule: Schedule, place: Place, absent: Sequence[int]) -> None:
    operation = schedule.operations[place.rank][place.index]
    names = ", ".join(schedule.devices[rank] for rank in absent)
    raise DeadlockError(
        f"The schedule '{schedule.name}' can't end: {schedule.devices[place.rank]} {doing(operation, schedule)}, "
        f"which {names} {'never enters' if len(absent) == 1 else 'never enter'} as often. Give all ranks of a sum "
        "the same number of them, with the same ranks in the same order."
    )


def doing(operation: Operation, schedule: Schedule, *, done: bool = False) -> str:
    """Return what a rank does in a transfer or a collective, as a predicate: `sends … to cpu:1`, or `sent …`."""
    if operation.kind == "sum":
        ranks = ", ".join(schedule.devices[rank] for rank in operation.ranks)
        return f"{'entered' if done else 'enters'} the sum of `{operation.node}` over {ranks}"
    what = "the gradient of " if operation.gradient else ""
    other = schedule.devices[operation.peer]
    verb, way = (
        ("sent" if done else "sends", "to")
        if operation.kind == "send"
        else ("received" if done else "receives", "from")
    )
    return f"{verb} {what}micro-batch {operation.micro} of `{operation.edge}` {way} {other}"
