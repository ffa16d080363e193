"""A member: one model with its weights, its name and its seed."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelfleet.errors import InputError

if TYPE_CHECKING:  # which knows members itself
    from modelfleet.frameworks.protocol import Adapter


@dataclass(slots=True)
class Member:
    """One model of a fleet. `seed` alone decides its initial weights, its shuffles and its dropout."""

    name: str
    model: Any
    seed: int
    framework: "Adapter"
    """The adapter of its framework."""


def member_seed(fleet_seed: int, name: str) -> int:
    """The seed of a member: it depends on the fleet's seed and the name, never on who else is there."""
    digest = hashlib.blake2b(f"{fleet_seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # 63 bits: fits a signed integer of every framework


def check_name(name: object, taken: Collection[str]) -> str:
    """A member's name as a string: not empty, and not taken."""
    text = str(name)
    if not text.strip():
        raise InputError(f"a member's name is empty: {text!r}. Give it a name that can be seen.")
    if text in taken:
        raise InputError(f"there are two members named {text!r}. Names within a fleet are unique.")
    return text
