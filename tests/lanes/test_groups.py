"""Groups: who may be fused with whom, and what tells the others apart."""

import string
from typing import Any, cast

from tests.helpers import fleet_of, mlp
from torch import nn

import modelfleet as mf
from modelfleet.lanes.groups import Group, MemberTask, by_variant, group
from modelfleet.members import Member


class Some:
    """A task of its own."""

    summary = "some"
    optimizer_name = "sgd"


class Plain:
    """A framework whose structures are words."""

    NAME = "plain"

    @staticmethod
    def difference(left: str, right: str) -> str | None:
        return None if left == right else f"{left} is not {right}"


class Initials(Plain):
    """A framework that can fuse all structures with the same first letter."""

    @staticmethod
    def family(signature: str, task: Some) -> str:
        return signature[0]


def tasks(signatures: str, *own: Some, framework: Any = Plain) -> dict[str, MemberTask]:
    words = signatures.split()
    members = (Member(name, None, 0, framework) for name in string.ascii_lowercase)
    return {
        member.name: MemberTask(member, cast(Any, word), task, {}, None)
        for member, word, task in zip(members, words, own * len(words), strict=False)
    }


def test_members_of_one_structure_and_one_task_are_one_group() -> None:
    assert group(tasks("net net", Some())) == [Group(("a", "b"), None)]


def test_groups_are_in_the_order_of_their_first_members() -> None:
    assert group(tasks("net wide net deep", Some())) == [
        Group(("a", "c"), None),
        Group(("b",), "'b' differs from 'a': wide is not net"),
        Group(("d",), "'d' differs from 'a': deep is not net"),
    ]


def test_equal_structures_with_another_task_are_apart() -> None:
    found = group(tasks("net net", Some(), Some()))
    assert found[1] == Group(("b",), "'b' differs from 'a': it was compiled with other settings")


def test_members_of_a_family_are_one_group_with_equal_tasks_and_structures_side_by_side() -> None:
    own = tasks("net nut net log nut net", Some(), Some(), framework=Initials)
    found = group(own)
    assert found[0].members == ("a", "c", "e", "b", "f")
    assert found[1].members == ("d",)
    assert by_variant(own, found[0].members) == [["a", "c"], ["e"], ["b"], ["f"]]


def test_the_first_difference_of_two_models_is_named() -> None:
    def net(stride: int) -> nn.Module:
        features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.MaxPool2d(2, stride))
        return nn.ModuleDict({"features": features})

    fleet = mf.Fleet({f"m{number:02}": net(stride) for number, stride in {0: 1, 1: 1, 7: 2}.items()})
    fleet.compile("sgd", "cross_entropy")
    lanes = fleet.plan().lanes
    assert [lane.members for lane in lanes] == [("m00", "m01"), ("m07",)]
    assert lanes[1].apart_because == "'m07' differs from 'm00': features.3.stride is 2, not 1"


def test_neither_a_number_nor_a_flag_of_the_optimizer_parts_members() -> None:
    fleet = fleet_of(3, optimizer="sgd", momentum=0.9, lr=mf.each([0.1, 0.2, 0.3]))
    assert [lane.members for lane in fleet.plan().lanes] == [("0", "1", "2")]
    fleet.compile("sgd", "cross_entropy", lr=0.1, momentum=0.9, nesterov=mf.each([True, False, True]))
    (lane,) = fleet.plan().lanes
    assert lane.members == ("0", "2", "1")
    assert lane.reason == "3 of one structure, fused; 2 sgd nesterov, 1 sgd"


def test_a_model_in_evaluation_mode_is_not_fused_with_one_in_training_mode() -> None:
    fleet = mf.Fleet([mlp(), mlp().eval()])
    fleet.compile("sgd", "cross_entropy")
    assert "in eval mode, not training" in fleet.plan().lanes[1].reason
