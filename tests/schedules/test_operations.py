import json

import pytest
from hypothesis import given, settings
from tests.schedules.specs import Case, cases, chain, devices

from modelfleet.errors import InputError
from modelfleet.schedules import Operation, Schedule, build


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (Operation("forward", "head", 3), "forward head[3]"),
        (Operation("backward_weight", "head", 3), "backward_weight head[3]"),
        (Operation("send", micro=3, edge="encoder→head", peer=1), "send encoder→head[3] to cpu:1"),
        (
            Operation("receive", micro=3, edge="encoder→head", gradient=True, peer=1),
            "receive gradient of encoder→head[3] from cpu:1",
        ),
        (Operation("sum", "encoder", ranks=(0, 1)), "sum encoder over cpu:0, cpu:1"),
        (Operation("apply", "encoder"), "apply encoder"),
        (Operation("free", "head", 3, "encoder→head", True), "free gradient of encoder→head[3]"),
    ],
)
def test_operations_are_described_with_the_names_of_devices(operation: Operation, text: str) -> None:
    assert operation.describe(devices(2)) == text
    assert str(operation) == text.replace("cpu:", "rank ")


@settings(max_examples=50, deadline=None, derandomize=True)
@given(cases())
def test_schedules_survive_json(case: Case) -> None:
    schedule = case.build()
    assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule


def test_groups_survive_json() -> None:
    pair = (
        Operation("send", micro=0, edge="a", peer=0),
        Operation("receive", micro=0, edge="a", with_previous=True),
    )
    schedule = Schedule("pair", ("cpu",), 1, (pair,))
    assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule


@pytest.mark.parametrize(
    "operation",
    [{"kind": "jump"}, {"node": "a"}, {"kind": "forward", "micro": "0"}, {"kind": "forward", "colour": "red"}, 3],
)
def test_values_that_are_no_schedule_are_refused(operation: object) -> None:
    values = {"name": "x", "devices": ["cpu"], "micro_batches": 1, "operations": [[operation]]}
    with pytest.raises(InputError, match=r"Pass what Schedule.to_dict\(\) returned"):
        Schedule.from_dict(values)


def test_a_schedule_has_operations_for_every_device() -> None:
    with pytest.raises(InputError, match="operations for 1 rank, but 2 devices"):
        Schedule("x", ("cpu:0", "cpu:1"), 1, ((),))


def test_schedules_for_other_devices_do_not_follow_each_other() -> None:
    one, two = (build(chain(1), [device], micro_batches=1) for device in ("cpu:0", "cpu:1"))
    with pytest.raises(InputError, match="are for different devices"):
        one.then(two)


def test_the_table_of_a_schedule_names_nodes_where_they_change() -> None:
    assert str(build(chain(3, 2), devices(2), micro_batches=1)).splitlines() == [
        "1f1b: 1 micro-batch on 2 devices",
        "cpu:0  s0: F0 s2: F0 B0 s0: B0 sum(step) apply(s0) apply(s2)",
        "cpu:1  s1: F0 B0 sum(step) apply(s1)",
    ]
