"""Members: one model each, with its name and its seed."""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from modelfleet.errors import InputError
from modelfleet.types import Model

if TYPE_CHECKING:  # it imports this module
    from modelfleet.frameworks.adapter_protocol import Adapter


@dataclass(slots=True)
class Member:
    """One model of a fleet. The seed alone decides its initial weights, shuffles and dropout."""

    name: str
    model: Model
    seed: int
    framework: "Adapter"
    """Adapter of the model's framework."""


def member_seed(fleet_seed: int, name: str) -> int:
    """Return the seed of a member, which depends on the fleet's seed and the name, never on the other members."""
    digest = hashlib.blake2b(f"{fleet_seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # 63 bits: fits a signed integer of every framework


def check_name(name: object, taken: Collection[str]) -> str:
    """Return a member's name as a string. Raise `InputError` if it is empty or taken."""
    text = str(name)
    if not text.strip():
        raise InputError(f"a member's name is empty: {text!r}. Give it a name that is visible.")
    if text in taken:
        raise InputError(f"there are two members named {text!r}. Names within a fleet are unique.")
    return text


def parse_names(members: int | Iterable[str]) -> list[str]:
    """Return members' names from their number, or from an iterable of names.

    Raises:
        InputError: There are none, two are the same, or `members` is something else.
    """
    if isinstance(members, int | np.integer) and not isinstance(members, bool):
        members = [str(number) for number in range(int(members))]
    elif isinstance(members, str) or not isinstance(members, Iterable):
        raise InputError(f"members is {members!r}; give a number, or a sequence of names.")
    names: dict[str, None] = {}  # ordered, and quick to look up
    for name in members:
        names[check_name(name, names)] = None
    if not names:
        raise InputError("a fleet needs at least one member; members is below 1 or empty.")
    return list(names)
