"""What rules for padded tensors have in common."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from modelfleet.frameworks.torch.widths.padded_calls import Axes, Size
from modelfleet.frameworks.torch.widths.padding import PaddedCall


def covers(axes: Axes, out: Axes) -> bool:
    """Return True if a tensor is padded in every axis in which the result is."""
    aligned = (None,) * (len(out) - len(axes)) + axes
    return len(aligned) == len(out) and all(
        own is not None for own, axis in zip(aligned, out, strict=True) if axis is not None
    )


def refuse_other_broadcasting(call: PaddedCall) -> None:
    """Raise if a variant repeats an axis of size 1 where the widest has an axis of its own."""
    out, shape = call.out[0], call.out_shapes[0]
    for axes, own in zip(call.axes, call.shapes, strict=True):
        for axis, size, wanted, total in zip(axes[::-1], own[::-1], out[::-1], shape[::-1], strict=False):
            if axis is not None and (axis != wanted or size != total):
                raise call.refuse("repeats an axis for some widths and not for others")


def refuse_other_numbers(call: PaddedCall) -> None:
    """Raise if integers are unequal."""
    if call.numbers:
        raise call.refuse("has unequal numbers for unequal widths")


def refuse_own_numbers(call: PaddedCall) -> None:
    """Raise if any numbers are unequal."""
    if call.numbers or call.has_numbers:
        raise call.refuse("has unequal numbers for unequal widths")


def refuse_other_options(call: PaddedCall, dims: Sequence[int]) -> None:
    """Raise if other numbers than the sizes of some axes are unequal."""
    sizes = {call.axes[0][dim] for dim in dims}
    if any(numbers not in sizes for numbers in unequal_integers(call)):
        raise call.refuse("has unequal numbers for unequal widths")


def unequal_integers(call: PaddedCall) -> list[Size]:
    """Return the plain numbers of a call that are not the same in all variants."""
    return list(call.numbers.values())


def refuse_rows(call: PaddedCall, dims: Sequence[int]) -> None:
    """Raise if an axis is padded that is not reduced."""
    if any(axis for dim, axis in enumerate(call.axes[0]) if dim not in dims):
        raise call.refuse("has no rule for two padded axes")


def with_own_numbers(call: PaddedCall) -> PaddedCall:
    """Return a call with each member's own number, where a plain number is not the same in all variants."""
    numbers = unequal_integers(call)
    if not numbers:
        return call
    places = [at for at, arg in enumerate(call.args) if isinstance(arg, int | float) and not isinstance(arg, bool)]
    tensor = next((t for t in call.tensors if t.is_floating_point()), None)
    if len(numbers) != 1 or len(places) != 1 or tensor is None or "alpha" in call.kwargs:
        raise call.refuse("has unequal numbers for unequal widths")
    args = list(call.args)
    args[places[0]] = call.own(numbers[0]).to(tensor.dtype)
    call.args = tuple(args)
    return call


def is_in_place(call: PaddedCall) -> bool:
    """Return True if a function writes to its first argument."""
    name = call.name
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name.endswith("__"))


def with_tensors(tree: Any, tensors: Any) -> Any:
    """Return arguments with other tensors in place of theirs, in their order."""
    if isinstance(tree, Tensor):
        return next(tensors)
    if isinstance(tree, Mapping):
        return {key: with_tensors(item, tensors) for key, item in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(with_tensors(item, tensors) for item in tree)
    return tree


def reduced_dims(call: PaddedCall, dim: Any) -> list[int]:
    """Return the axes that a function reduces."""
    rank = len(call.axes[0])
    if dim is None or (isinstance(dim, tuple | list) and not dim):
        return list(range(rank))
    return [d % rank for d in (dim if isinstance(dim, tuple | list) else [dim])]


def own_count(call: PaddedCall, x: Tensor, axes: Axes, dims: Sequence[int]) -> Tensor:
    """Return how many own numbers a member has along some axes, in a dtype to divide by."""
    sizes = [axes[dim] for dim in dims]
    plain = math.prod(x.shape[dim] for dim in dims if axes[dim] is None)
    variants = len(next(size for size in sizes if size is not None))
    own = tuple(plain * math.prod(size[v] for size in sizes if size is not None) for v in range(variants))
    return call.own(own).to(x.dtype)


def own_sizes(axis: Size | None, size: int, like: Any) -> Size:
    """Return the own sizes of an axis, which may not be padded."""
    if axis is not None:
        return axis
    if isinstance(like, tuple) and like and isinstance(like[0], int):
        return (size,) * len(like)
    return (size,) * len(next(own for axes in like for own in axes if own is not None))
