"""Rules for sums, means and the like over a padded axis."""

import math
from typing import Any

from torch import Tensor

from modelfleet.frameworks.torch.widths.elementwise_rules import elementwise
from modelfleet.frameworks.torch.widths.padding import PaddedCall
from modelfleet.frameworks.torch.widths.rule_helpers import (
    own_count,
    reduced_dims,
    refuse_other_numbers,
    refuse_own_numbers,
    refuse_rows,
)


def softmax_over(call: PaddedCall) -> Tensor:
    """Compute a softmax: of a member's own numbers alone."""
    refuse_other_numbers(call)
    x, axes, dim = call.args[0], call.axes[0], call.argument(1, "dim")
    if dim is None:
        raise call.refuse("without dim has no rule for a padded axis")
    if axes[dim] is None:
        return call.cleared(call.run(), call.out[0])
    return call.filled(call.run(call.filled(x, axes, -math.inf), *call.args[1:]), call.out[0])


def logsumexp_over(call: PaddedCall) -> Tensor:
    """Compute the logarithm of a sum of exponentials over own numbers."""
    refuse_other_numbers(call)
    dims = reduced_dims(call, call.argument(1, "dim"))
    refuse_rows(call, dims)
    return call.run(call.filled(call.args[0], call.axes[0], -math.inf), *call.args[1:])


def sum_over(call: PaddedCall) -> Tensor:
    """Add up. The padding adds nothing, and gets no gradient."""
    refuse_other_numbers(call)
    return call.run(call.filled(call.args[0], call.axes[0]), *call.args[1:])


def mean_over(call: PaddedCall) -> Tensor:
    """Return a mean over the member's own count."""
    refuse_own_numbers(call)
    x, axes = call.args[0], call.axes[0]
    dims = reduced_dims(call, call.argument(1, "dim"))
    if not any(axes[dim] for dim in dims):
        return call.run()
    if call.kwargs.get("dtype") is not None:
        raise call.refuse("with dtype has no rule for a padded axis")
    keep = bool(call.argument(2, "keepdim", False))
    return call.filled(x, axes).sum(dims, keepdim=keep) / own_count(call, x, axes, dims)


def variance_over(call: PaddedCall) -> Tensor:
    """Return a variance or a standard deviation over the member's own count."""
    refuse_own_numbers(call)
    x, axes = call.args[0], call.axes[0]
    given = call.argument(1, "dim")
    unbiased = call.kwargs.get("unbiased", True)
    if isinstance(given, bool):
        given, unbiased = None, given
    elif len(call.args) > 2:
        unbiased = call.args[2]
    correction = call.kwargs.get("correction", int(unbiased))
    dims = reduced_dims(call, given)
    if not any(axes[dim] for dim in dims):
        return call.run()
    refuse_rows(call, dims)
    keep = bool(call.argument(3, "keepdim", False))
    count = own_count(call, x, axes, dims)
    x = call.filled(x, axes)
    x = call.filled(x - x.sum(dims, keepdim=True) / count, axes)
    result = (x * x).sum(dims, keepdim=keep) / (count - correction)
    return result.sqrt() if call.name == "std" else result


def largest(call: PaddedCall) -> Any:
    """Return the largest of the own numbers, or the larger of two tensors."""
    return extreme(call, -math.inf)


def smallest(call: PaddedCall) -> Any:
    """Return the smallest of the own numbers, or the smaller of two tensors."""
    return extreme(call, math.inf)


def extreme(call: PaddedCall, fill: float) -> Any:
    """Return the largest or smallest number, with the padding out of the way."""
    if len(call.tensors) > 1:  # torch.max(a, b)
        return elementwise(call)
    refuse_other_numbers(call)
    x, axes = call.args[0], call.axes[0]
    dims = reduced_dims(call, call.argument(1, "dim"))
    if not any(axes[dim] for dim in dims):
        if len(call.out) > 1:
            raise call.refuse("has no rule for this padded axis")
        return call.cleared(call.run(), call.out[0])
    refuse_rows(call, dims)
    if not x.is_floating_point():
        raise call.refuse("of integers has no rule for a padded axis")
    return call.run(call.filled(x, axes, fill), *call.args[1:])


def product_over(call: PaddedCall) -> Tensor:
    """Multiply the own numbers, or ask if all of them are true."""
    refuse_other_numbers(call)
    dims = reduced_dims(call, call.argument(1, "dim"))
    refuse_rows(call, dims)
    return call.run(call.filled(call.args[0], call.axes[0], 1), *call.args[1:])


def norm_over(call: PaddedCall) -> Tensor:
    """Compute a Euclidean norm, to which zeros add nothing."""
    refuse_other_numbers(call)
    name = call.name
    order = call.argument(1, "ord" if name == "vector_norm" else "p", 2)
    if order not in (None, 2, 2.0, "fro"):
        raise call.refuse("of another order than 2 has no rule for a padded axis")
    return call.run()


def cumulative(call: PaddedCall) -> Tensor:
    """Add up along an axis."""
    refuse_other_numbers(call)
    return call.cleared(call.run(), call.out[0])


def pooling(call: PaddedCall) -> Tensor:
    """Pool over axes that are not padded: zeros stay zero."""
    refuse_other_numbers(call)
    if len(call.out) > 1 or call.axes[0][: len(call.out[0])] != call.out[0] or any(call.axes[0][2:]):
        raise call.refuse("has no rule for a padded axis that is not the channels'")
    return call.run()
