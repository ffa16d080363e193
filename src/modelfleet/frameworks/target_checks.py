"""Checks of targets that all frameworks have in common: which shapes, dtypes and values a loss takes."""

import math
from typing import Any, Literal, Protocol

from modelfleet.errors import InputError
from modelfleet.types import Tensor

IGNORED = -100  # class index that cross_entropy and nll leave out, as in torch

TargetKind = Literal["classes or probabilities", "classes", "values", "fractions", "signs", "any"]
"""Kind of target that a loss takes. "values" have the shape of the output; "any" is not checked."""


class LossWithTarget(Protocol):
    """Names of a loss that checks of its targets read."""

    @property
    def name(self) -> str:
        """Return the name of the loss, for errors."""
        ...

    @property
    def kind(self) -> TargetKind:
        """Return the kind of target that the loss takes."""
        ...


def takes_classes(kind: TargetKind) -> bool:
    """Return True if targets may be class indices."""
    return kind in ("classes", "classes or probabilities")


def check_shape(
    name: str, kind: TargetKind, shape: tuple[int, ...], target: tuple[int, ...], dtype: str, *, class_axis: int
) -> None:
    """Raise InputError if a target's shape and dtype do not fit an output.

    Args:
        name: Name of the loss.
        kind: Kind of target that the loss takes.
        shape: Shape of the output.
        target: Shape of the target.
        dtype: Dtype of the target.
        class_axis: Axis of the classes in an output: 1 or -1.
    """
    if not takes_classes(kind):
        if target != shape:
            alike = target[:1] == shape[:1] and math.prod(target) == math.prod(shape)
            advice = f" Reshape the target to {_any_rows(shape)}." if alike else ""
            raise InputError(
                f"the output is {shape}, but the target is {target}; {name} needs both of one shape.{advice}"
            )
        return
    order = "(row, class, …)" if class_axis == 1 else "(row, …, class)"
    if len(shape) < 2:
        raise InputError(f"the output is {shape}, but {name} needs a score for every class: {order}.")
    is_float = "float" in dtype
    indices = shape[:1] + shape[2:] if class_axis == 1 else shape[:-1]
    if target == indices and is_float:
        raise InputError(f"the target holds class indices as {dtype}. Pass them as integers, such as int64.")
    if target == shape and is_float and kind == "classes or probabilities":
        return
    if target != indices:
        choice = ", or floating-point probabilities of the output's shape" if kind != "classes" else ""
        axis = "second" if class_axis == 1 else "last"
        raise InputError(
            f"the output is {shape}, but the target is {target} of {dtype}; {name} needs class indices of shape "
            f"{_any_rows(indices)}{choice}. The output's {axis} axis is the class."
        )


def out_of_range(name: str, kind: TargetKind, classes: int, target: Any) -> tuple[Tensor, str] | None:
    """Return where a target holds values that its loss can't take, and what the loss takes.

    None if the loss takes any value. `target` is an array of NumPy or a tensor; class indices are signed integers.
    """
    if kind == "fractions":
        return ~((target >= 0) & (target <= 1)), f"{name} takes 0 to 1"
    if kind == "signs":
        return abs(target) != 1, f"{name} takes -1 and 1"
    if not takes_classes(kind) or "float" in str(target.dtype):
        return None
    wrong = (target < 0) | (target >= classes)
    if name in ("cross_entropy", "nll"):
        wrong &= target != IGNORED
    return wrong, f"the model gives {classes} classes: labels go from 0 to {classes - 1}"


def _any_rows(shape: tuple[int, ...]) -> str:
    return "(row,)" if len(shape) == 1 else f"(row, {', '.join(map(str, shape[1:]))})"
