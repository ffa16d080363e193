"""Losses of `compile`, as far as all frameworks have them in common: names, and which targets a loss takes."""

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from modelfleet.errors import InputError
from modelfleet.types import LossLike, Tensor
from modelfleet.unknown_names import unknown

IGNORED = -100  # class index that cross_entropy and nll leave out, as in torch

ALIASES: Mapping[str, str] = {
    "l1": "mae",
    "binary_cross_entropy": "bce",
    "binary_cross_entropy_with_logits": "bce_with_logits",
}

TargetKind = Literal["classes or probabilities", "classes", "values", "fractions", "signs", "any"]
"""Kind of target that a loss takes. "values" have the shape of the output; "any" is not checked."""

Loss = TypeVar("Loss")


def find_loss(loss: LossLike, known: Mapping[str, Loss]) -> Loss | None:
    """Return the loss of a name; None for a function, which the caller knows how to take.

    Raises:
        InputError: The name is unknown, or `loss` is neither a name nor a function.
    """
    if isinstance(loss, str):
        name = ALIASES.get(loss, loss)
        if name not in known:
            raise unknown("loss", loss, [*known, *ALIASES])
        return known[name]
    if isinstance(loss, type):
        raise InputError(f"the loss is the class {loss.__name__}. Pass an instance: {loss.__name__}().")
    if not callable(loss):
        raise InputError(f"the loss is a {type(loss).__name__}. Pass a name or a function of output and target.")
    return None


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


def no_loss_by_row(name: str) -> InputError:
    """Return the error for sample weights beside a function that returns one number for a whole batch."""
    return InputError(
        f"sample_weight needs the loss of every row, and the loss {name!r} returns one number for the batch. Use "
        f"a loss with a name, or compile with an objective: fit((x, y, w)) gives it the weights in its batch."
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
