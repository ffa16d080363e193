"""Stacked state on NumPy arrays: reading and writing members by position, and the paths of checkpoints."""

from typing import Any

import numpy as np
import pytest

from modelfleet.frameworks.stacked import PARTS, StackedState, by_part, by_path, fitting
from modelfleet.trees import map_tree


class Arrays:
    """Operations on NumPy arrays; `put` gives new ones, as JAX does."""

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        return numbers

    def take(self, tree: Any, rows: np.ndarray) -> Any:
        return map_tree(lambda array: array[rows], tree)

    def put(self, tree: Any, rows: np.ndarray, values: Any) -> Any:
        if isinstance(tree, dict):
            return {name: self.put(value, rows, values[name]) for name, value in tree.items()}
        new = tree.copy()
        new[rows] = values
        return new

    def like(self, value: np.ndarray, tensor: np.ndarray) -> np.ndarray:
        return value.astype(tensor.dtype)

    def replace(self, tensor: np.ndarray, value: np.ndarray) -> np.ndarray:
        return value.astype(tensor.dtype)


@pytest.fixture
def stacked() -> StackedState:
    parts = {"params": {"w": np.arange(4.0)}, "member": {"step": np.arange(4)}, "sums": {}}
    return StackedState(parts, 4, Arrays())


def values(state: Any) -> list[float]:
    return state["params"]["w"].tolist()


def test_members_are_read_in_the_order_asked(stacked: StackedState) -> None:
    assert values(stacked.read([3, 0])) == [3, 0]
    assert stacked.read([1], ("member",)).keys() == {"member"}
    assert stacked.read([1], ("buffers",)) == {}


def test_a_member_that_rests_is_read_and_written_as_any_other(stacked: StackedState) -> None:
    stacked.give_slots([2, 0])
    assert values(stacked.parts) == [2, 0]
    stacked.parts["params"]["w"] += 10
    assert values(stacked.read([0, 1, 2, 3])) == [10, 1, 12, 3]
    stacked.write([3, 2, 1], {"params": {"w": np.array([33.0, 22.0, 11.0])}})
    assert values(stacked.parts) == [22, 10]
    stacked.give_slots([3])  # from one choice to the next, without all in between
    assert values(stacked.parts) == [33]
    stacked.give_slots([0, 1, 2, 3])
    assert values(stacked.parts) == [10, 11, 22, 33]
    assert stacked.slots.tolist() == [0, 1, 2, 3]


def test_what_is_written_of_some_parts_leaves_the_others(stacked: StackedState) -> None:
    stacked.write([1], {"member": {"step": np.array([7]), "unknown": np.array([1])}})
    assert stacked.parts["member"]["step"].tolist() == [0, 7, 2, 3]
    assert stacked.parts["member"].keys() == {"step"}
    assert values(stacked.parts) == [0, 1, 2, 3]


def test_only_what_has_the_same_shape_is_taken() -> None:
    own = {"optimizer": {"a": np.zeros((2, 3)), "b": np.zeros((2, 4))}, "member": {"step": np.zeros(2)}}
    other = {
        "optimizer": {"a": np.ones((1, 3)), "b": np.ones((1, 5)), "c": np.ones(1)},
        "member": {"seed": np.ones(1)},
    }
    found = fitting(other, own, parts={"optimizer": None, "member": ("step",)})
    assert {part: list(names) for part, names in found.items()} == {"optimizer": ["a"], "member": []}


def test_checkpoints_have_the_optimizer_under_its_first_name() -> None:
    state = {"params": {"0.weight": np.zeros(1)}, "optimizer": {"exp_avg/0.weight": np.ones(1)}}
    paths = by_path(state)
    assert list(paths) == ["params/0.weight", "slots/exp_avg/0.weight"]
    undone = by_part(paths)
    assert {part: own for part, own in undone.items() if own} == state
    assert undone.keys() == set(PARTS)  # so that what was empty is emptied
