"""Building schedules: what each rank does in one step, in which order."""

from collections.abc import Sequence
from typing import Literal, get_args

from modelfleet.errors import InputError
from modelfleet.schedules.checking import check
from modelfleet.schedules.clock import Clock
from modelfleet.schedules.operations import Operation, Schedule
from modelfleet.schedules.rules import GPipe, Interleaved, OneForwardOneBackward, Rule, check_interleaved
from modelfleet.schedules.spec import GraphSpec
from modelfleet.schedules.tensors import with_frees

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]


def build(
    spec: GraphSpec,
    devices: Sequence[str],
    *,
    micro_batches: int,
    schedule: ScheduleName = "1f1b",
    train: bool = True,
) -> Schedule:
    """Build the schedule of one step.

    A list scheduler plays the step with the times of the spec. A step of training ends with one sum over all ranks
    and the optimizers' steps; the gradients of a node's replicas are summed before, as soon as they are whole.

    Args:
        spec: The nodes, where they are, what they cost, and the edges between them.
        devices: The device of every rank.
        micro_batches: The number of micro-batches. Fewer than ranks are allowed, but leave devices idle:
            `simulate` says how long.
        schedule: "gpipe" does all forwards, then all backwards. "1f1b" does backwards as soon as it can, and keeps
            fewer activations. "interleaved" is "1f1b" for a chain with several stages on each rank, with less idle
            time. "zero-bubble" splits backwards, and fills idle time with the halves that nobody waits for.
        train: Whether the step trains. If not, it has forwards and transfers only.

    Returns:
        The schedule. It has been checked: it ends even if every send waits for its receiver.

    Raises:
        InputError: If the schedule is unknown, a node is on a rank that there is not, there are fewer
            micro-batches than replicas of a node, or "interleaved" was given for what is not a chain with its
            stages dealt out in turn.

    Example:
        >>> from modelfleet.schedules import EdgeSpec, GraphSpec, NodeSpec, build
        >>> spec = GraphSpec((NodeSpec("a", (0,)), NodeSpec("b", (1,))), (EdgeSpec("a→b", "a", "b"),))
        >>> print(build(spec, ["cpu:0", "cpu:1"], micro_batches=2))
        1f1b: 2 micro-batches on 2 devices
        cpu:0  a: F0 F1 B0 B1 sum(step) apply(a)
        cpu:1  b: F0 B0 F1 B1 sum(step) apply(b)
    """
    if schedule not in get_args(ScheduleName):
        raise InputError(f"schedule={schedule!r} is unknown. Choose one of {', '.join(get_args(ScheduleName))}.")
    _check(spec, devices, micro_batches)
    if not train:
        spec = spec.untrained()
    rule = _rule(spec, schedule, micro_batches, len(devices))
    lists = Clock(spec, len(devices), micro_batches, rule, halves=schedule == "zero-bubble").play()
    if train:
        lists = tuple(own + _ending(spec, rank, len(devices)) for rank, own in enumerate(lists))
    built = Schedule(schedule, tuple(devices), micro_batches, tuple(with_frees(own, spec) for own in lists))
    check(built)
    return built


def _rule(spec: GraphSpec, schedule: ScheduleName, micro_batches: int, ranks: int) -> Rule:
    if schedule == "gpipe":
        return GPipe(spec, micro_batches)
    if schedule == "interleaved":
        check_interleaved(spec, ranks)
        if len(spec.nodes) > ranks:  # with one stage for each rank, 1F1B is as fast and keeps less
            return Interleaved(spec, micro_batches, ranks)
    return OneForwardOneBackward(spec, micro_batches, zero_bubble=schedule == "zero-bubble")


def _ending(spec: GraphSpec, rank: int, ranks: int) -> tuple[Operation, ...]:
    """Return how a rank ends a step of training: the numbers of the step, then the optimizers' steps."""
    own = [node.name for node in spec.nodes if node.trained and rank in node.ranks]
    return (
        Operation("sum", "step", ranks=tuple(range(ranks))),
        *(Operation("apply", name) for name in own),
    )


def _check(spec: GraphSpec, devices: Sequence[str], micro_batches: int) -> None:
    if not spec.nodes:
        raise InputError("The graph has no nodes. Give it at least one.")
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise InputError(f"micro_batches={micro_batches!r} was given. Pass a positive whole number.")
    for node in spec.nodes:
        absent = [rank for rank in node.ranks if not 0 <= rank < len(devices)]
        if absent:
            raise InputError(
                f"Node '{node.name}' is on rank {absent[0]}, but the ranks are 0 to {len(devices) - 1}. Give a "
                "device for every rank, or place the node on another one."
            )
        if micro_batches < len(node.ranks):
            raise InputError(
                f"Node '{node.name}' has {len(node.ranks)} replicas, but micro_batches={micro_batches}, so some "
                f"replicas would get none. Use at least {len(node.ranks)} micro-batches, or fewer replicas."
            )
