"""Checks of targets of torch members: shape, dtype and values."""

import numpy as np
import torch
from torch import Tensor

from modelfleet.errors import InputError
from modelfleet.frameworks.target_checks import (
    LossWithTarget,
    TargetKind,
    check_shape,
    out_of_range,
    takes_classes,
)
from modelfleet.types import Tree


def check_targets(
    loss: LossWithTarget, output_shape: tuple[int, ...], target: Tree, member: str | None = None
) -> None:
    """Raise InputError for targets of a wrong shape or dtype, or with values out of range.

    Args:
        loss: The loss.
        output_shape: Shape of the model's output for any number of rows.
        target: All rows of the data.
        member: Name of the member, for errors.
    """
    if loss.kind == "any":
        return
    whose = "" if member is None else f"member {member!r}: "
    try:
        found = target.detach() if isinstance(target, Tensor) else torch.as_tensor(np.asarray(target))
    except TypeError:
        raise InputError(
            f"{whose}the target is of {np.asarray(target).dtype}; {loss.name} needs numbers."
        ) from None
    shape = (*found.shape[:1], *output_shape[1:])
    try:
        check_fit(loss.name, loss.kind, shape, found)
    except InputError as error:
        raise InputError(f"{whose}{error}") from None
    check_range(loss, shape, found, whose)


def check_range(loss: LossWithTarget, output_shape: tuple[int, ...], target: Tensor, whose: str = "") -> None:
    """Raise InputError for targets with values that the loss can't take, such as labels without a class."""
    if takes_classes(loss.kind) and not target.is_floating_point():
        target = target.long()
    found = out_of_range(loss.name, loss.kind, output_shape[1] if len(output_shape) > 1 else 0, target)
    if found is not None and found[0].any():
        wrong, expected = found
        first = tuple(wrong.nonzero()[0].tolist())
        raise InputError(f"{whose}the target in row {first[0]} is {target[first].item()}, but {expected}.")


def shape_of(name: str, output: object) -> tuple[int, ...]:
    """Return the shape of an output. Raises InputError if the output is not one tensor."""
    if not isinstance(output, Tensor):
        raise InputError(
            f"the model gives a {type(output).__name__}, but {name} needs a tensor. "
            f"Pass a function of output and target in its place."
        )
    return tuple(output.shape)


def check_fit(name: str, kind: TargetKind, shape: tuple[int, ...], target: Tensor) -> None:
    """Raise InputError if the shape and dtype of a target do not fit an output of this shape."""
    dtype = str(target.dtype).removeprefix("torch.")
    check_shape(name, kind, shape, tuple(target.shape), dtype, class_axis=1)
