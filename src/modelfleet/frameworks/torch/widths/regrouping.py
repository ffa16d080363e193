"""Move own numbers between layouts of one axis: gates, heads and directions lie one after the other in it.

An axis of `4 · hidden` numbers holds four gates. Padded as a whole, a member's own numbers are its first ones;
padded gate by gate, they are the first ones of each gate. Which layout a computation needs is its rule's matter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from modelfleet.frameworks.torch.widths.padded_calls import Size
from modelfleet.frameworks.torch.widths.padding import PaddedCall

Group = list[tuple[int, Size]]
"""Axes that lie in one: the padded size of each, and the own sizes of the variants."""


def parts(count: int, size: int, own: Size) -> Group:
    """Return the layout of so many parts of one size, such as gates."""
    return [(count, (count,) * len(own)), (size, own)]


def whole(size: int, own: Size) -> Group:
    """Return the layout of an axis that is padded at its end alone."""
    return [(size, own)]


def is_same_layout(given: Group, wanted: Group) -> bool:
    """Return True if the own numbers, as many in both, are at the same places in both layouts."""
    longer = [[axis for axis in group if axis[0] != 1] for group in (given, wanted)]
    return longer[0] == longer[1] or (_is_prefix(given) and _is_prefix(wanted))


def _is_prefix(group: Group) -> bool:
    """Return True if the own numbers are the first ones of all."""
    return all(len(set(own)) == 1 for _, own in group[1:])


def regrouped(call: PaddedCall, x: Tensor, dim: int, given: Group, wanted: Group) -> Tensor:
    """Return a tensor whose own numbers along an axis lie in another layout, in their order. The rest is zero.

    Args:
        call: The call that it is for.
        x: The tensor.
        dim: The axis.
        given: The layout of the axis.
        wanted: Its layout afterwards. The variants have as many own numbers in it.
    """
    if is_same_layout(given, wanted):
        return x
    number, inside = _numbered(call, wanted, x.device)
    place = torch.zeros_like(number)
    stride, own_stride = 1, _ones(given)
    for size, own in reversed(given):
        place = place + torch.remainder(_divided(call, number, own_stride), _value(call, own)) * stride
        stride, own_stride = stride * size, _times(own_stride, own)
    place = place.clamp(max=x.shape[dim] - 1)
    after = x.dim() - 1 - dim % x.dim()
    return x.index_select(dim, place).masked_fill(~inside.view(-1, *[1] * after), 0)


def _numbered(call: PaddedCall, group: Group, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for each place of a layout the number that the own number there has, and whether there is one."""
    number = torch.zeros((), dtype=torch.int64, device=device)
    inside = torch.ones((), dtype=torch.bool, device=device)
    own_stride = _ones(group)
    for after, (size, own) in enumerate(reversed(group)):
        at = torch.arange(size, device=device).view(-1, *[1] * after)
        number = number + at * _value(call, own_stride)
        if len(set(own)) > 1:
            inside = inside & (at < _value(call, own))
        own_stride = _times(own_stride, own)
    sizes = [size for size, _ in group]
    return number.flatten(), inside.expand(sizes).flatten()


def _divided(call: PaddedCall, number: Tensor, divisor: Size) -> Tensor:
    return number if set(divisor) == {1} else torch.div(number, _value(call, divisor), rounding_mode="floor")


def _value(call: PaddedCall, size: Size) -> Tensor | int:
    """Return a size as a number, or as one per member."""
    return size[0] if len(set(size)) == 1 else call.own(size).to(torch.int64)


def _ones(group: Group) -> Size:
    return (1,) * len(group[0][1])


def _times(left: Sequence[int], right: Sequence[int]) -> Size:
    return tuple(a * b for a, b in zip(left, right, strict=True))
