from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest

from modelfleet.trees import leaves, map_tree, map_trees, paths, rebuild, structure


class Pair(NamedTuple):
    left: Any
    right: Any


TREES = [
    (1, [1], [""]),
    ((1, 2), [1, 2], ["[0]", "[1]"]),
    ([1, (2, 3)], [1, 2, 3], ["[0]", "[1][0]", "[1][1]"]),
    ({"x": 1, "y": {"a": 2, "b": [3]}}, [1, 2, 3], ["x", "y.a", "y.b[0]"]),
    (({"x": 1}, 2), [1, 2], ["[0].x", "[1]"]),
    (Pair(1, Pair(2, 3)), [1, 2, 3], ["left", "right.left", "right.right"]),
    (UserDict({"input_ids": 1, "labels": 2}), [1, 2], ["input_ids", "labels"]),
    ((1, None, {"x": None}), [1], ["[0]"]),
    (None, [], []),
    ("text", ["text"], [""]),
]


@pytest.mark.parametrize(("tree", "values", "names"), TREES)
def test_leaves_and_their_paths(tree: Any, values: list[Any], names: list[str]) -> None:
    assert leaves(tree) == values
    assert paths(tree) == list(zip(names, values, strict=True))


def test_mapping_keeps_the_form_and_the_gaps() -> None:
    tree = {"a": [1, None], "b": (2, Pair(3, None))}
    assert map_tree(lambda leaf: leaf * 10, tree) == {"a": [10, None], "b": (20, Pair(30, None))}
    assert isinstance(map_tree(str, tree)["b"][1], Pair)


@pytest.mark.parametrize("mapping", [UserDict(x=1), OrderedDict(x=1)])
def test_every_mapping_comes_out_as_a_dict(mapping: Any) -> None:
    assert type(map_tree(str, mapping)) is dict
    assert map_tree(str, mapping) == {"x": "1"}


def test_a_hugging_face_batch_is_a_dict() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": [1, 2]})
    assert map_tree(str, batch) == {"input_ids": ["1", "2"]}


def test_rebuilding_puts_values_in_the_order_of_leaves() -> None:
    tree = ({"x": 0, "y": None}, [0, 0])
    assert rebuild(tree, "abc") == ({"x": "a", "y": None}, ["b", "c"])
    assert leaves(rebuild(tree, "abc")) == ["a", "b", "c"]


def test_a_container_can_be_called_a_leaf() -> None:
    def is_list(value: Any) -> bool:
        return isinstance(value, list)

    tree = ([1, 2], {"x": [3]})
    assert paths(tree, is_list) == [("[0]", [1, 2]), ("[1].x", [3])]
    assert map_tree(sum, tree, is_list) == (3, {"x": 3})


def test_trees_are_taken_together_by_their_keys() -> None:
    pairs = map_trees(tuple, [{"mean": 1, "max": [2, None]}, {"max": (4, None), "mean": 3}])
    assert pairs == {"mean": (1, 3), "max": [(2, 4), None]}


@pytest.mark.parametrize(
    "other",
    [{"b": 1}, {"a": 1, "b": 2}, {"a": None}, {"a": [1]}, [1], 1],
    ids=["key", "more", "none", "list", "top", "leaf"],
)
def test_trees_that_differ_are_not_taken_together(other: object) -> None:
    with pytest.raises(ValueError, match="in one of them and"):
        map_trees(tuple, [{"a": 1}, other])


def test_the_structure_tells_trees_apart_that_have_the_same_paths() -> None:
    trees = [{1: 0}, {"1": 0}, {"a": {"b": 0}}, {"a.b": 0}, [0], (0,), {"a": 0, "b": None}, {"a": 0}]
    assert len(set(map(structure, trees))) == len(trees)
    assert structure({"a": [1, 2]}) == structure({"a": [3, 4]})
