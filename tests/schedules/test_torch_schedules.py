"""The schedules of torch.distributed.pipelining are accepted."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
from tests.schedules.specs import devices
from tests.schedules.threads import MicroBatches, run
from torch.distributed.pipelining import schedules as torch_schedules

from modelfleet.errors import DeadlockError
from modelfleet.schedules import Operation, Schedule, check

SEVERAL_STAGES = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
CAN_DEFER = "defer_pp_recv" in signature(torch_schedules.ScheduleLoopedBFS).parameters
KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


class Stage:
    """Stands for a stage of torch's, and notes which operations a schedule asks it for."""

    def __init__(self, index: int, stages: int, rank: int, ranks: int, log: list[Operation]) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = rank, ranks
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward = True
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.submod = None
        self.log = log

    def get_fwd_recv_ops(self, micro: int) -> list[Operation]:
        before = self.stage_index - 1
        return [] if self.is_first else [transfer("receive", before, micro, before)]

    def get_fwd_send_ops(self, micro: int) -> list[Operation]:
        own = self.stage_index
        return [] if self.is_last else [transfer("send", own, micro, own + 1)]

    def get_bwd_recv_ops(self, micro: int) -> list[Operation]:
        own = self.stage_index
        return [] if self.is_last else [transfer("receive", own, micro, own + 1, back=True)]

    def get_bwd_send_ops(self, micro: int) -> list[Operation]:
        before = self.stage_index - 1
        return [] if self.is_first else [transfer("send", before, micro, before, back=True)]

    def forward_one_chunk(self, micro: int, *_: object, **__: object) -> None:
        self.log.append(Operation("forward", f"s{self.stage_index}", micro))

    def backward_one_chunk(self, micro: int, **_: object) -> None:
        self.log.append(Operation("backward", f"s{self.stage_index}", micro))

    def perform_reduce_grad(self, _: object) -> None:
        pass


def transfer(kind: Any, edge: int, micro: int, peer: int, *, back: bool = False) -> Operation:
    return Operation(kind, micro=micro, edge=f"s{edge}", gradient=back, peer=peer)


def single(make: Callable[..., Any], ranks: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> Schedule:
    """Run a schedule of one stage per rank, with its batches of sends and receives as groups."""
    lists = []
    for rank in range(ranks):
        log: list[Operation] = []

        def batch(operations: Sequence[Operation], log: list[Operation] = log, **_: object) -> list[Any]:
            log.extend([*operations[:1], *(replace(each, with_previous=True) for each in operations[1:])])
            return []

        monkeypatch.setattr(torch_schedules, "_batch_p2p", batch)
        schedule = make(Stage(rank, ranks, rank, ranks, log), micro_batches)
        monkeypatch.setattr(schedule, "_initialize_stage", lambda *_: None)
        nothing = [()] * micro_batches
        schedule._step_microbatches(nothing, [{}] * micro_batches)
        lists.append(tuple(log))
    return Schedule(make.__name__, devices(ranks), micro_batches, tuple(lists))


def lowered(make: Callable[..., Any], ranks: int, local: int, micro_batches: int, **options: bool) -> Schedule:
    """Convert a schedule of several stages per rank, which torch has lowered to sends and receives."""
    stages = ranks * local
    made = make(
        [Stage(index, stages, 0, ranks, []) for index in range(0, stages, ranks)], micro_batches, **options
    )
    where = made.stage_index_to_group_rank
    lists = tuple(
        tuple(
            operation
            for action in made.pipeline_order_with_comms[rank]
            for each in (action.sub_actions or (action,))
            for operation in convert(each, where)
        )
        for rank in range(ranks)
    )
    return Schedule(make.__name__, devices(ranks), micro_batches, lists)


def convert(action: Any, where: dict[int, int]) -> list[Operation]:
    stage, kind, micro = action.stage_index, action.computation_type.value, action.microbatch_index
    if kind in KINDS:
        return [Operation(KINDS[kind], f"s{stage}", micro)]  # pyrefly: ignore
    if kind == "SEND_F":
        return [transfer("send", stage, micro, where[stage + 1])]
    if kind == "RECV_F":
        return [transfer("receive", stage - 1, micro, where[stage - 1])]
    if kind == "SEND_B":
        return [transfer("send", stage - 1, micro, where[stage - 1], back=True)]
    if kind == "RECV_B":
        return [transfer("receive", stage, micro, where[stage + 1], back=True)]
    assert kind in ("UNSHARD", "RESHARD", "REDUCE_GRAD")
    return []


def computed(schedule: Schedule, kind: str) -> int:
    return sum(operation.kind == kind for own in schedule.operations for operation in own)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_schedules_of_one_stage_per_rank(
    name: str, ranks: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = single(torch_schedules.get_schedule_class(name), ranks, rounds * ranks, monkeypatch)
    assert computed(schedule, "backward") == rounds * ranks**2
    check(schedule)
    assert run(schedule, MicroBatches())


def test_1f1b_of_torch_hangs_without_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So its groups matter, and the test above is not about lists that nothing could make hang."""
    schedule = single(torch_schedules.get_schedule_class("1F1B"), 2, 4, monkeypatch)
    alone = tuple(
        tuple(replace(operation, with_previous=False) for operation in own) for own in schedule.operations
    )
    with pytest.raises(DeadlockError):
        check(Schedule("alone", schedule.devices, 4, alone))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize("name", SEVERAL_STAGES)
def test_schedules_of_several_stages_per_rank(name: str, ranks: int, rounds: int) -> None:
    schedule = lowered(torch_schedules.get_schedule_class(name), ranks, 2, rounds * ranks)
    assert computed(schedule, "forward") >= 2 * rounds * ranks**2
    check(schedule)
    assert run(schedule, MicroBatches())


@pytest.mark.skipif(not CAN_DEFER, reason="this torch does not defer receives")
@pytest.mark.parametrize("name", SEVERAL_STAGES)
def test_deferred_receives_of_torch_need_sends_that_do_not_wait(name: str) -> None:
    schedule = lowered(torch_schedules.get_schedule_class(name), 2, 2, 4, defer_pp_recv=True)
    with pytest.raises(DeadlockError, match="wait for each other"):
        check(schedule)
    assert not run(schedule, MicroBatches())
