"""Rules for functions that move, divide and join the axes of padded tensors."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelfleet.frameworks.torch.widths.padded_calls import Axes, Size
from modelfleet.frameworks.torch.widths.padding import PaddedCall
from modelfleet.frameworks.torch.widths.regrouping import Group, is_same_layout, regrouped
from modelfleet.frameworks.torch.widths.rule_helpers import covers, is_in_place, own_sizes, refuse_other_numbers


def moved(call: PaddedCall) -> Any:
    """Run a function that only moves axes, or removes and adds those of size 1, or creates zeros."""
    return call.run()


def viewed(call: PaddedCall) -> Tensor:
    """View a tensor in another shape. If a padded axis is divided or merged, own numbers move."""
    variants = len(next(axis for axis in (*call.axes[0], *call.out[0]) if axis is not None))
    given = stripped(call.shapes[0], call.axes[0], variants)
    wanted = stripped(call.out_shapes[0], call.out[0], variants)
    groups = []
    while given or wanted:
        groups.append(next_group(given, wanted))
    if all(is_same_layout(ours, theirs) for ours, theirs in groups):
        return call.run()
    if is_in_place(call) or any(numbers_in(ours) != numbers_in(theirs) for ours, theirs in groups):
        raise call.refuse("divides a padded axis in a way that has no rule")
    found = call.tensors[0].reshape([math.prod(size for size, _ in ours) for ours, _ in groups])
    for dim, (ours, theirs) in enumerate(groups):
        found = regrouped(call, found, dim, ours, theirs)
    return found.reshape(call.out_shapes[0])


def stripped(shape: Sequence[int], axes: Axes, variants: int) -> Group:
    """Return the axes of a shape, without those of size 1."""
    return [
        (size, (size,) * variants if axis is None else axis)
        for size, axis in zip(shape, axes, strict=True)
        if size != 1 or axis is not None
    ]


def next_group(given: Group, wanted: Group) -> tuple[Group, Group]:
    """Take the first axes of both shapes that have as many numbers, in every variant."""
    ours, theirs = [given.pop(0)] if given else [], [wanted.pop(0)] if wanted else []
    while numbers_in(ours) != numbers_in(theirs) and (given or wanted):
        left, right = math.prod(size for size, _ in ours), math.prod(size for size, _ in theirs)
        from_given = bool(given) and (left <= right or not wanted)
        (ours if from_given else theirs).append((given if from_given else wanted).pop(0))
    return ours, theirs


def numbers_in(group: Group) -> tuple[int, Size]:
    """Return how many numbers some axes hold, padded and in each variant."""
    owns = zip(*(own for _, own in group), strict=True)
    return math.prod(size for size, _ in group), tuple(map(math.prod, owns))


def expanded(call: PaddedCall) -> Tensor:
    """Repeat axes of size 1."""
    result = call.run()
    return result if covers(call.axes[0], call.out[0]) else call.filled(result, call.out[0])


def created(call: PaddedCall) -> Tensor:
    """Create a tensor whose own numbers do not depend on the sizes of its axes."""
    places = {"full": (0, "size"), "new_full": (1, "size"), "full_like": ()}.get(call.name)
    if places is not None and any(path[0] not in places for path in call.numbers):
        raise call.refuse("has unequal numbers for unequal widths")
    if call.name == "arange" and (len(call.args) > 2 or list(call.numbers.values()) != [call.out[0][0]]):
        raise call.refuse("has unequal numbers for unequal widths")
    return call.filled(call.run(), call.out[0])


def stacked(call: PaddedCall) -> Tensor:
    """Stack tensors along a new axis."""
    refuse_other_numbers(call)
    return call.run()


def joined(call: PaddedCall) -> Tensor:
    """Concatenate: along a padded axis, the own parts move together."""
    refuse_other_numbers(call)
    dim = call.argument(1, "dim", call.kwargs.get("axis", 0)) % len(call.out[0])
    result = call.run()
    sizes = [
        own_sizes(axes[dim], shape[dim], call.out) for axes, shape in zip(call.axes, call.shapes, strict=True)
    ]
    if call.out[0][dim] is None:
        if any(axes[dim] for axes in call.axes):
            raise call.refuse("has no rule for these padded axes")
        return result
    # Where each number of the result comes from: its place in the padded parts, one after the other.
    places = torch.arange(result.shape[dim], device=result.device)
    source, own_end, end = places, 0, 0
    for number, own in enumerate(sizes[:-1]):
        own_end = own_end + call.own(own) if len(set(own)) > 1 else own_end + own[0]
        end += call.shapes[number][dim]
        source = torch.where(places >= own_end, places - own_end + end, source)
    return taken(call, result, source, dim, call.out[0])


def divided(call: PaddedCall) -> Any:
    """Split or chunk: along a padded axis, each part starts where the member's own part does."""
    x, axes = call.args[0], call.axes[0]
    at = 2 if call.name in ("split", "chunk", "tensor_split") else 1
    dim = call.argument(at, "dim", 0) % len(axes)
    if axes[dim] is None:
        return call.run()
    found, starts = [], [0] * len(axes[dim] or ())
    for out, shape in zip(call.out, call.out_shapes, strict=True):
        start: Any = call.own(tuple(starts)) if len(set(starts)) > 1 else starts[0]
        places = torch.arange(shape[dim], device=x.device) + start
        found.append(taken(call, x, places, dim, out))
        own = own_sizes(out[dim], shape[dim], call.axes)
        starts = [a + b for a, b in zip(starts, own, strict=True)]
    return tuple(found)


def glu(call: PaddedCall) -> Tensor:
    """Gate the first half of an axis by the second."""
    x, axes = call.args[0], call.axes[0]
    dim = call.argument(1, "dim", -1) % len(axes)
    if axes[dim] is None:
        return call.run()
    half = tuple(size // 2 for size in axes[dim] or ())
    places = torch.arange(x.shape[dim] // 2, device=x.device)
    first = taken(call, x, places, dim, call.out[0])
    second = taken(call, x, places + call.own(half), dim, call.out[0])
    return first * torch.sigmoid(second)


def taken(call: PaddedCall, x: Tensor, places: Tensor, dim: int, out: Axes) -> Tensor:
    """Return the numbers at some places of an axis, with zeros in the padding."""
    places = places.to(torch.int64).clamp(max=x.shape[dim] - 1)
    return call.filled(x.index_select(dim, places), out)


def indexed(call: PaddedCall) -> Tensor:
    """Index a tensor. Of a padded axis, all is taken, or one of the first."""
    refuse_other_numbers(call)
    axes, index = call.axes[0], call.args[1]
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, list) or (isinstance(part, Tensor) and part.dtype == torch.bool) for part in index):
        raise call.refuse("with such an index has no rule for a padded axis")
    if len(call.tensors) > 1 and any(any(own) for own in call.axes[1:]):
        raise call.refuse("with a padded index has no rule")
    named = sum(part is not None and part is not Ellipsis for part in index)
    at = 0
    for part in index:
        if part is None:
            continue
        if part is Ellipsis:
            at += len(axes) - named
            continue
        first = isinstance(part, int) and part >= 0
        if axes[at] is not None and not (first or part == slice(None)):
            raise call.refuse("takes a part of a padded axis")
        if isinstance(part, int) and axes[at] is not None and part >= min(axes[at] or ()):
            raise call.refuse("takes a part of a padded axis")
        at += 1
    return call.run()


def selected(call: PaddedCall) -> Tensor:
    """Take rows along an axis that is not padded."""
    refuse_other_numbers(call)
    dim = call.argument(1, "dim", 0)
    if call.axes[0][dim] is not None or any(any(own) for own in call.axes[1:]):
        raise call.refuse("takes a part of a padded axis")
    return call.cleared(call.run(), call.out[0])


def padded_around(call: PaddedCall) -> Tensor:
    """Pad or resize the axes that are not padded."""
    if call.axes[0] != call.out[0] or any(
        a != b for a, b, axis in zip(call.shapes[0], call.out_shapes[0], call.out[0], strict=True) if axis
    ):
        raise call.refuse("has no rule for this padded axis")
    return call.cleared(call.run(), call.out[0])


def unbound(call: PaddedCall) -> Any:
    """Take the slices along an axis that is not padded."""
    dim = call.argument(1, "dim", 0)
    if call.axes[0][dim] is not None:
        raise call.refuse("takes a part of a padded axis")
    return call.run()


def turned(call: PaddedCall) -> Tensor:
    """Reverse or shift axes that are not padded."""
    refuse_other_numbers(call)
    dims = call.argument(2, "dims") if call.name == "roll" else call.argument(1, "dims")
    if len(call.args) > 2 and call.name == "flip":  # x.flip(0, 1)
        dims = call.args[1:]
    if dims is None or any(call.axes[0][dim] for dim in ([dims] if isinstance(dims, int) else dims)):
        raise call.refuse("moves the numbers of a padded axis")
    return call.run()


def repeated(call: PaddedCall) -> Tensor:
    """Repeat axes that are not padded."""
    ahead = len(call.out[0]) - len(call.axes[0])
    for axis, size, wanted, total in zip(
        call.axes[0], call.shapes[0], call.out[0][ahead:], call.out_shapes[0][ahead:], strict=True
    ):
        if axis is not None and (axis, size) != (wanted, total):
            raise call.refuse("repeats a padded axis")
    return call.cleared(call.run(), call.out[0])
