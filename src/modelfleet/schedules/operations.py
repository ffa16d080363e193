"""Operations, and schedules: the operations of every rank, in order."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from modelfleet.errors import InputError
from modelfleet.formatting import count

Kind = Literal[
    "forward", "backward", "backward_input", "backward_weight", "send", "receive", "sum", "apply", "free"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
BACKWARDS: frozenset[Kind] = frozenset({"backward", "backward_input", "backward_weight"})
COMPUTATIONS: frozenset[Kind] = frozenset({"forward", *BACKWARDS})
TRANSFERS: frozenset[Kind] = frozenset({"send", "receive"})

# How a schedule's table shows a computation.
_SHORT: dict[Kind, str] = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


@dataclass(frozen=True, slots=True)
class Operation:
    """Says one thing that a rank does.

    Attributes:
        kind: What it does.
        node: For computations, `apply` and `free` the node. For `sum` what is summed: the gradients of a node's
            replicas, or the numbers of the "step".
        micro: The micro-batch.
        edge: For `send`, `receive` and `free` the name of the edge.
        gradient: Whether a `send`, `receive` or `free` is about the gradient of the edge, which goes from the
            edge's target to its source.
        peer: For `send` and `receive` the other rank.
        ranks: For `sum` the ranks that take part.
        with_previous: Whether a `send` or `receive` runs at once with the transfer before it. The rank goes on
            when both are done. So a row of transfers can be a group, as torch's `batch_isend_irecv` makes one.
    """

    kind: Kind
    node: str = ""
    micro: int = -1
    edge: str = ""
    gradient: bool = False
    peer: int = -1
    ranks: tuple[int, ...] = ()
    with_previous: bool = False

    def describe(self, names: Sequence[str] | None = None) -> str:
        """Return the operation in words: `send encoder→head[3] to cpu:1`.

        Args:
            names: The names of the devices, by rank. Without them, ranks are shown as numbers.
        """
        if self.kind in COMPUTATIONS:
            return f"{self.kind} {self.node}[{self.micro}]"
        if self.kind == "sum":
            return f"sum {self.node} over {', '.join(_name(rank, names) for rank in self.ranks)}"
        if self.kind == "apply":
            return f"apply {self.node}"
        tensor = f"{'gradient of ' if self.gradient else ''}{self.edge}[{self.micro}]"
        if self.kind == "free":
            return f"free {tensor}"
        return f"{self.kind} {tensor} {'to' if self.kind == 'send' else 'from'} {_name(self.peer, names)}"

    def __str__(self) -> str:
        return self.describe()


def _name(rank: int, names: Sequence[str] | None) -> str:
    return names[rank] if names is not None and 0 <= rank < len(names) else f"rank {rank}"


@dataclass(frozen=True)
class Schedule:
    """Holds the operations of every rank, in the order in which the rank goes through them.

    Attributes:
        name: How it was made, such as "1f1b".
        devices: The device of every rank.
        micro_batches: The number of micro-batches that a batch is cut into.
        operations: The operations by rank.
    """

    name: str
    devices: tuple[str, ...]
    micro_batches: int
    operations: tuple[tuple[Operation, ...], ...]

    def __post_init__(self) -> None:
        if len(self.operations) != len(self.devices):
            raise InputError(
                f"The schedule has operations for {count(len(self.operations), 'rank')}, but "
                f"{count(len(self.devices), 'device')}. Give every device a tuple of operations; it may be empty."
            )

    def then(self, other: "Schedule") -> "Schedule":
        """Return the schedule that goes through this one, and then through another one on the same ranks.

        So what happens between steps can be checked together with them.

        Raises:
            InputError: If the schedules have different devices.
        """
        if other.devices != self.devices:
            raise InputError(
                f"The schedules '{self.name}' and '{other.name}' are for different devices: {self.devices} and "
                f"{other.devices}. Build both for the same devices, in the same order."
            )
        return Schedule(
            f"{self.name}, then {other.name}",
            self.devices,
            max(self.micro_batches, other.micro_batches),
            tuple(own + then for own, then in zip(self.operations, other.operations, strict=True)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the schedule as values that JSON can hold, for `from_dict`."""
        return {
            "name": self.name,
            "devices": list(self.devices),
            "micro_batches": self.micro_batches,
            "operations": [[_to_dict(operation) for operation in own] for own in self.operations],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Schedule":
        """Return the schedule that `to_dict` was called on.

        Raises:
            InputError: If the values are not those of a schedule.
        """
        try:
            return cls(
                str(values["name"]),
                tuple(str(device) for device in values["devices"]),
                int(values["micro_batches"]),
                tuple(tuple(_from_dict(operation) for operation in own) for own in values["operations"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"These values are not those of a schedule: {error!r}. Pass what Schedule.to_dict() returned."
            ) from error

    def __str__(self) -> str:
        """Return a line per rank with its computations: `F3` is the forward of micro-batch 3, `B3` its backward.

        `I3` and `W3` are the two halves of a backward, for the inputs and for the weights.
        """
        micro = f"{self.micro_batches:,} micro-batch{'' if self.micro_batches == 1 else 'es'}"
        width = max((len(device) for device in self.devices), default=0)
        lines = [f"{self.name}: {micro} on {count(len(self.devices), 'device')}"]
        for device, operations in zip(self.devices, self.operations, strict=True):
            lines.append(f"{device:<{width}}  {_row(operations)}".rstrip())
        return "\n".join(lines)


def _row(operations: Sequence[Operation]) -> str:
    """Return the computations and sums of a rank, with a node's name wherever the node changes."""
    words, node = [], None
    for operation in operations:
        if operation.kind in COMPUTATIONS:
            if operation.node != node:
                node = operation.node
                words.append(f"{node}:")
            words.append(f"{_SHORT[operation.kind]}{operation.micro}")
        elif operation.kind in ("sum", "apply"):
            words.append(f"{operation.kind}({operation.node})")
    return " ".join(words)


# A field without a default is always written, because no operation has the kind "".
_DEFAULTS: dict[str, Any] = {
    field.name: "" if field.default is dataclasses.MISSING else field.default
    for field in dataclasses.fields(Operation)
}


def _to_dict(operation: Operation) -> dict[str, Any]:
    values = {name: getattr(operation, name) for name in _DEFAULTS}
    changed = {name: value for name, value in values.items() if value != _DEFAULTS[name]}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}


def _from_dict(values: Mapping[str, Any]) -> Operation:
    if values["kind"] not in KINDS:
        raise ValueError(f"unknown kind {values['kind']!r}")
    arguments: dict[str, Any] = {**values, "ranks": tuple(values.get("ranks", ()))}
    operation = Operation(**arguments)
    for name, default in _DEFAULTS.items():
        if not isinstance(getattr(operation, name), type(default)):
            raise TypeError(f"{name}={getattr(operation, name)!r}")
    return operation
