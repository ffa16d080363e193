from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from modelfleet.each import Each, each, per_member, refuse_list
from modelfleet.errors import InputError
from modelfleet.recipe import Recipe

NAMES = ["berlin", "paris", "rome"]


@pytest.mark.parametrize(
    "values", [[1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3]), (value for value in [1, 2, 3])]
)
def test_a_sequence_goes_in_member_order(values: Iterable[int]) -> None:
    assert per_member(each(values), NAMES, "lr") == [1, 2, 3]


def test_a_mapping_goes_by_name_whatever_its_order() -> None:
    assert per_member(each({"rome": 3, "berlin": 1, "paris": 2}), NAMES, "lr") == [1, 2, 3]


def test_names_that_are_not_strings_are_taken_as_strings() -> None:
    assert per_member(each({1: "b", np.int64(0): "a"}), ["0", "1"], "lr") == ["a", "b"]


@pytest.mark.parametrize("value", [0.1, None, [1, 2], "cosine", {"berlin": 1}])
def test_anything_else_is_one_value_for_all(value: Any) -> None:
    got = per_member(value, NAMES, "lr")
    assert len(got) == 3
    assert all(item is value for item in got)


def test_rows_of_an_array_stay_arrays() -> None:
    rows = per_member(each(np.eye(3)), NAMES, "x")
    assert [row.tolist() for row in rows] == np.eye(3).tolist()


def test_what_is_done_to_the_result_does_not_come_back() -> None:
    rates = each([1, 2, 3])
    per_member(rates, NAMES, "lr").clear()
    assert per_member(rates, NAMES, "lr") == [1, 2, 3]


def test_length_and_looks() -> None:
    assert len(each({"a": 1, "b": 2})) == 2
    assert repr(each((1, 2))) == "each([1, 2])"
    assert isinstance(each([]), Each)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            [1, 2],
            "lr: each(...) has 2 values, but the fleet has 3 members. "
            "Give one value per member, or a mapping by member name.",
        ),
        (
            {"berlin": 1, "london": 2},
            "lr: each(...) names 'london', which the fleet does not have. "
            "Its members are 'berlin', 'paris', 'rome'.",
        ),
        ({"berlin": 1}, "lr: each(...) has no value for 'paris', 'rome'. Give every member one."),
    ],
)
def test_values_that_do_not_fit_the_fleet_are_named(values: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        per_member(each(values), NAMES, "lr")
    assert str(caught.value) == message


def test_a_long_list_of_names_is_cut_short() -> None:
    names = [f"m{index}" for index in range(1000)]
    with pytest.raises(InputError, match=r"no value for 'm0', 'm1', 'm2', 'm3', 'm4' and 995 more\. Give"):
        per_member(each({}), names, "lr")


@pytest.mark.parametrize(
    ("values", "kind"),
    [("abc", "str"), (b"ab", "bytes"), ({1, 2}, "set"), (0.1, "float"), (np.array(1), "ndarray")],
)
def test_what_has_no_order_of_values_is_refused(values: Any, kind: str) -> None:
    with pytest.raises(InputError) as caught:
        each(values)
    assert str(caught.value) == (
        f"each({values!r}) got a {kind}. "
        "Give one value per member: a sequence in member order, or a mapping by member name."
    )


def test_one_name_in_two_spellings_is_refused() -> None:
    with pytest.raises(InputError, match=r"each\(\.\.\.\) names a member twice: its keys are 1, '1'"):
        each({1: "a", "1": "b"})


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([1e-3, 1e-2], "a list"),
        ((1e-3,), "a tuple"),
        (np.logspace(-4, -2, 3), "a ndarray"),
        ({"paris": 0.1, "rome": 0.2}, "a mapping by member"),
    ],
)
def test_several_values_without_each_are_refused_with_what_to_write(value: Any, shown: str) -> None:
    with pytest.raises(InputError, match=rf"lr is {shown}, expected one value .* use mf.each: lr=mf.each\("):
        refuse_list(value, "lr", NAMES)


@pytest.mark.parametrize("value", [0.1, None, "auto", np.float32(1), np.array(0.1), {"decay": 0.5}, {}, each([1])])
def test_one_value_is_not_refused(value: Any) -> None:
    refuse_list(value, "lr", NAMES)


def test_compile_says_to_use_each_for_a_list() -> None:
    with pytest.raises(InputError, match=r"weight_decay=mf.each\(\[...\]\)"):
        Recipe("adam", hyperparameters={"weight_decay": [0.0, 0.1]}).by_name(["a", "b"])
    with pytest.raises(InputError, match=r"clip_norm=mf.each\(\{...\}\)"):
        Recipe("adam", clip_norm={"a": 1.0, "b": 2.0}).by_name(["a", "b"])  # pyrefly: ignore[bad-argument-type]
    betas = Recipe("adam", hyperparameters={"betas": (0.9, 0.99)}).by_name(["a", "b"]).hyperparameters
    assert betas == {"betas": (0.9, 0.99)}
