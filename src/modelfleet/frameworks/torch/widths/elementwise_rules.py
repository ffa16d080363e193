"""Rules for functions of single numbers on padded tensors, and for random numbers."""

from typing import Any

from torch import Tensor

from modelfleet.frameworks.torch.widths.padding import PaddedCall
from modelfleet.frameworks.torch.widths.rule_helpers import (
    covers,
    is_in_place,
    refuse_other_broadcasting,
    refuse_other_numbers,
    refuse_own_numbers,
    with_own_numbers,
    with_tensors,
)


def as_is(call: PaddedCall) -> Any:
    """Run a function that keeps zeros by itself, in whichever axis they are."""
    refuse_other_numbers(call)
    return call.run()


def elementwise(call: PaddedCall) -> Tensor:
    """Run a function of single numbers that need not be zero at zero."""
    refuse_other_numbers(call)
    refuse_other_broadcasting(call)
    return call.cleared(call.run(), call.out[0])


def singular(call: PaddedCall) -> Tensor:
    """Run a function that has no finite value or gradient at zero: the padding gets ones, and zeros afterwards."""
    refuse_own_numbers(call)
    refuse_other_broadcasting(call)
    ones = iter([call.filled(t, axes, 1) for t, axes in zip(call.tensors, call.axes, strict=True)])
    args, kwargs = with_tensors((call.args, call.kwargs), ones)
    if is_in_place(call):
        raise call.refuse("in place has no rule for a padded axis")
    return call.filled(call.func(*args, **kwargs), call.out[0])


def sum_like(call: PaddedCall) -> Tensor:
    """Add or subtract: zeros stay where all arguments are padded."""
    call = with_own_numbers(call)
    refuse_other_broadcasting(call)
    covered = len(call.tensors) > 1 and all(covers(axes, call.out[0]) for axes in call.axes)
    return call.run() if covered else call.cleared(call.run(), call.out[0])


def product_like(call: PaddedCall) -> Tensor:
    """Multiply: zeros stay where any argument is padded."""
    call = with_own_numbers(call)
    refuse_other_broadcasting(call)
    return call.run()


def quotient(call: PaddedCall) -> Tensor:
    """Divide: a divisor with zeros in its padding gets ones there."""
    if len(call.args) < 2:
        raise call.refuse("with named arguments has no rule for a padded axis")
    refuse_other_broadcasting(call)
    at = 0 if call.name in ("__rdiv__", "__rtruediv__", "__rfloordiv__") else 1
    given = [isinstance(arg, Tensor) for arg in call.args]
    args = list(with_own_numbers(call).args)
    if given[at]:
        args[at] = call.filled(args[at], call.axes[1 if at and given[0] else 0], 1)
    result = call.run(*args)
    kept = given[0] and at == 1 and covers(call.axes[0], call.out[0])
    return result if kept else call.cleared(result, call.out[0])


def power(call: PaddedCall) -> Tensor:
    """Raise to a power."""
    exponent = call.argument(1, "exponent")
    plain = call.name in ("pow", "pow_", "__pow__", "__ipow__") and isinstance(call.args[0], Tensor)
    if plain and isinstance(exponent, int | float) and exponent >= 1:
        return as_is(call)
    return singular(call)


def dropout(call: PaddedCall) -> Tensor:
    """Drop numbers at the member's own positions, and clear the padding afterwards."""
    refuse_other_numbers(call)
    with call.drawing(call.axes[0], call.shapes[0]):
        return call.cleared(call.run(), call.out[0])


def plain_dropout(call: PaddedCall) -> Tensor:
    """Drop numbers at the member's own positions. Zeros stay zero."""
    refuse_other_numbers(call)
    with call.drawing(call.axes[0], call.shapes[0]):
        return call.run()


def drawn(call: PaddedCall) -> Tensor:
    """Draw random numbers at the member's own positions."""
    with call.drawing(call.out[0], call.out_shapes[0]):
        return call.cleared(call.run(), call.out[0])
