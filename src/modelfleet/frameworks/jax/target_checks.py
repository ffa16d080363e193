"""Checks of targets of JAX members: shape, dtype and values."""

import jax
import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.jax.arrays import as_numpy
from modelfleet.frameworks.target_checks import LossWithTarget, TargetKind, check_shape, out_of_range
from modelfleet.types import Tree

Array = jax.Array | np.ndarray


def check_targets(
    loss: LossWithTarget, output_shape: tuple[int, ...], target: Tree, member: str | None = None
) -> None:
    """Raise InputError for targets of a wrong shape or dtype, or with values out of range."""
    if loss.kind == "any":
        return
    whose = "" if member is None else f"member {member!r}: "
    found = as_numpy(target)
    if found.dtype.kind not in "biufV":  # V: bfloat16
        raise InputError(f"{whose}the target is of {found.dtype}; {loss.name} needs numbers.")
    shape = (*found.shape[:1], *output_shape[1:])
    try:
        check_fit(loss.name, loss.kind, shape, found)
        check_range(loss, shape, found)
    except InputError as error:
        raise InputError(f"{whose}{error}") from None


def check_range(loss: LossWithTarget, output_shape: tuple[int, ...], target: Array) -> None:
    """Raise InputError for targets with values that the loss can't take, such as labels without a class."""
    target = np.asarray(target)
    found = out_of_range(loss.name, loss.kind, output_shape[-1], target)
    if found is not None and found[0].any():
        wrong, expected = found
        first = tuple(int(axis) for axis in np.argwhere(wrong)[0])
        raise InputError(f"the target in row {first[0]} is {target[first].item()}, but {expected}.")


def shape_of(name: str, output: Tree) -> tuple[int, ...]:
    """Return the shape of an output. Raises InputError if the output is not one array."""
    if not hasattr(output, "shape"):
        raise InputError(
            f"the model gives a {type(output).__name__}, but {name} needs an array. "
            f"Pass a function of output and target in its place."
        )
    return tuple(output.shape)


def check_fit(name: str, kind: TargetKind, shape: tuple[int, ...], target: Array) -> None:
    """Raise InputError if the shape and dtype of a target do not fit an output of this shape."""
    check_shape(name, kind, shape, tuple(target.shape), str(target.dtype), class_axis=-1)
