"""Comparing a model's weights with those of a saved folder."""

from collections.abc import Mapping
from typing import NamedTuple


class Spec(NamedTuple):
    """Shape and dtype of a tensor, in words that all frameworks share."""

    shape: tuple[int | None, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


def mismatch(own: Mapping[str, Spec], saved: Mapping[str, Spec]) -> str | None:
    """Return the first difference between a model's weights and saved ones, in words; None if they fit."""
    for name in (*own, *saved):
        if name not in saved:
            return f"it has a {name!r} that the folder does not"
        if name not in own:
            return f"it has no {name!r}"
        if own[name] != saved[name]:
            return f"its {name!r} is {own[name]}, the folder's is {saved[name]}"
    return None
