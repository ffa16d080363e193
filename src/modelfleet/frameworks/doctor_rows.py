"""Rows of `modelfleet doctor`, which frameworks add to."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Says what this machine has of something, what that is for, and what to do if it is missing."""

    what: str
    here: str | None
    purpose: str = ""
    advice: str = ""
