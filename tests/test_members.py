import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelfleet.errors import InputError
from modelfleet.members import Member, check_name, member_seed


def test_a_member_is_a_name_a_model_and_a_seed() -> None:
    nothing: Any = None
    member = Member("a", model := object(), 7, framework=nothing)
    assert (member.name, member.model, member.seed) == ("a", model, 7)


@settings(deadline=None)
@given(st.integers(), st.text())
def test_a_seed_fits_a_signed_integer_of_every_framework(fleet_seed: int, name: str) -> None:
    assert 0 <= member_seed(fleet_seed, name) < 2**63


def test_a_seed_is_the_same_in_every_process() -> None:
    script = "from modelfleet.members import member_seed; print(member_seed(3, 'm07'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600)
    assert int(done.stdout) == member_seed(3, "m07")


def test_seeds_differ_by_fleet_and_by_name() -> None:
    seeds = {member_seed(fleet, str(name)) for fleet in range(20) for name in range(500)}
    assert len(seeds) == 20 * 500


@settings(deadline=None)
@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 9))
def test_seed_and_name_do_not_run_into_each_other(left: int, right: int, name: int) -> None:
    pairs = {(left, f"{right}{name}"), (int(f"{left}{right}"), f"{name}")}
    assert len({member_seed(*pair) for pair in pairs}) == len(pairs)


@pytest.mark.parametrize(("name", "text"), [("berlin", "berlin"), (3, "3"), ("a/b ü", "a/b ü"), (" a", " a")])
def test_a_name_is_kept_as_a_string(name: object, text: str) -> None:
    assert check_name(name, {"other"}) == text


@pytest.mark.parametrize("name", ["", " ", "\n"])
def test_an_empty_name_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"a member's name is empty: '.*'\. Give it a name that is visible"):
        check_name(name, set())


@pytest.mark.parametrize("name", ["3", 3])
def test_a_name_that_is_taken_is_refused(name: object) -> None:
    with pytest.raises(InputError, match=r"two members named '3'\. Names within a fleet are unique"):
        check_name(name, {"3"})
