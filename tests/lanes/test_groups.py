"""Groups: who may be fused with whom, and what tells the others apart."""

from tests.helpers import fleet_of, mlp
from torch import nn

import modelfleet as mf
from modelfleet.frameworks.torch import difference, signature
from modelfleet.lanes.groups import Group, group


class Some:
    """A task of its own."""

    summary = "some"
    optimizer_name = "sgd"


def compare(left: str, right: str) -> str | None:
    return None if left == right else f"{left} is not {right}"


def test_members_of_one_structure_and_one_task_are_one_group() -> None:
    task = Some()
    assert group(["a", "b"], ["net", "net"], [task, task], compare) == [Group((0, 1), None)]


def test_groups_are_in_the_order_of_their_first_members() -> None:
    task = Some()
    assert group(["a", "b", "c", "d"], ["net", "wide", "net", "deep"], [task] * 4, compare) == [
        Group((0, 2), None),
        Group((1,), "'b' differs from 'a': wide is not net"),
        Group((3,), "'d' differs from 'a': deep is not net"),
    ]


def test_equal_structures_with_another_task_are_apart() -> None:
    found = group(["a", "b"], ["net", "net"], [Some(), Some()], compare)
    assert found[1] == Group((1,), "'b' differs from 'a': its optimizer has other options")


def test_the_first_difference_of_two_models_is_named() -> None:
    def net(stride: int) -> nn.Module:
        features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.MaxPool2d(2, stride))
        return nn.ModuleDict({"features": features})

    task = Some()
    signatures = [signature(net(stride)) for stride in (1, 1, 2)]
    found = group(["m00", "m01", "m07"], signatures, [task] * 3, difference)
    assert [g.positions for g in found] == [(0, 1), (2,)]
    assert found[1].apart_because == "'m07' differs from 'm00': features.3.stride is 2, not 1"


def test_a_flag_of_the_optimizer_parts_members_and_a_number_does_not() -> None:
    fleet = fleet_of(3, optimizer="sgd", momentum=0.9, lr=mf.each([0.1, 0.2, 0.3]))
    assert [lane.members for lane in fleet.plan().lanes] == [("0", "1", "2")]
    fleet.compile("sgd", "cross_entropy", lr=0.1, momentum=0.9, nesterov=mf.each([True, False, True]))
    lanes = fleet.plan().lanes
    assert [lane.members for lane in lanes] == [("0", "2"), ("1",)]
    assert lanes[1].reason == "'1' differs from '0': its optimizer has other options"


def test_a_model_in_evaluation_mode_is_not_fused_with_one_in_training_mode() -> None:
    fleet = mf.Fleet([mlp(), mlp().eval()])
    fleet.compile("sgd", "cross_entropy")
    assert "in eval mode, not training" in fleet.plan().lanes[1].reason
