"""Rules for torch functions on padded tensors: what keeps a member's own numbers as they are alone.

A rule may rely on zeros in the padding of its arguments, and must leave zeros in the padding of its result, and in
the gradients of the padding of its arguments.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelfleet.frameworks.torch.widths.padding import PaddedCall, Rule
from modelfleet.frameworks.torch.widths.padded_calls import Axes, Size

HALF_DTYPES = (torch.float16, torch.bfloat16)


# --- elementwise functions -------------------------------------------------------------------------------------------


def _as_is(call: PaddedCall) -> Any:
    """Run a function that keeps zeros by itself, in whichever axis they are."""
    _refuse_other_numbers(call)
    return call.run()


def _elementwise(call: PaddedCall) -> Tensor:
    """Run a function of single numbers that need not be zero at zero."""
    _refuse_other_numbers(call)
    _refuse_other_broadcasting(call)
    return call.cleared(call.run(), call.out[0])


def _singular(call: PaddedCall) -> Tensor:
    """Run a function that has no finite value or gradient at zero: the padding gets ones, and zeros afterwards."""
    _refuse_own_numbers(call)
    _refuse_other_broadcasting(call)
    ones = iter([call.filled(t, axes, 1) for t, axes in zip(call.tensors, call.axes, strict=True)])
    args, kwargs = _with_tensors((call.args, call.kwargs), ones)
    if _in_place(call):
        raise call.refuse("in place has no rule for a padded axis")
    return call.filled(call.func(*args, **kwargs), call.out[0])


def _sum_like(call: PaddedCall) -> Tensor:
    """Add or subtract: zeros stay where all arguments are padded."""
    call = _with_own_numbers(call)
    _refuse_other_broadcasting(call)
    covered = len(call.tensors) > 1 and all(_covers(axes, call.out[0]) for axes in call.axes)
    return call.run() if covered else call.cleared(call.run(), call.out[0])


def _product_like(call: PaddedCall) -> Tensor:
    """Multiply: zeros stay where any argument is padded."""
    call = _with_own_numbers(call)
    _refuse_other_broadcasting(call)
    return call.run()


def _quotient(call: PaddedCall) -> Tensor:
    """Divide: a divisor with zeros in its padding gets ones there."""
    if len(call.args) < 2:
        raise call.refuse("with named arguments has no rule for a padded axis")
    _refuse_other_broadcasting(call)
    at = 0 if call.name in ("__rdiv__", "__rtruediv__", "__rfloordiv__") else 1
    given = [isinstance(arg, Tensor) for arg in call.args]
    args = list(_with_own_numbers(call).args)
    if given[at]:
        args[at] = call.filled(args[at], call.axes[1 if at and given[0] else 0], 1)
    result = call.run(*args)
    kept = given[0] and at == 1 and _covers(call.axes[0], call.out[0])
    return result if kept else call.cleared(result, call.out[0])


def _power(call: PaddedCall) -> Tensor:
    exponent = call.argument(1, "exponent")
    plain = call.name in ("pow", "pow_", "__pow__", "__ipow__") and isinstance(call.args[0], Tensor)
    if plain and isinstance(exponent, int | float) and exponent >= 1:
        return _as_is(call)
    return _singular(call)


# --- products --------------------------------------------------------------------------------------------------------


def _linear(call: PaddedCall) -> Tensor:
    biased = call.argument(2, "bias") is not None
    result = call.run()
    # A row that is padding has no numbers, but would get the bias.
    return call.cleared(result, call.out[0]) if biased and any(call.axes[0][:-1]) else result


def _matmul(call: PaddedCall) -> Tensor:
    _refuse_other_numbers(call)
    return call.run()


def _add_matmul(call: PaddedCall) -> Tensor:
    _refuse_other_numbers(call)
    result = call.run()
    return result if _covers(call.axes[0], call.out[0]) else call.cleared(result, call.out[0])


def _einsum(call: PaddedCall) -> Tensor:
    equation = call.args[0]
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        raise call.refuse("in this form has no rule for a padded axis")
    operands, result = equation.replace(" ", "").split("->")
    labels = operands.split(",")
    padded = {
        label
        for own, axes in zip(labels, call.axes, strict=True)
        for label, axis in zip(own, axes, strict=True)
        if axis is not None
    }
    for label in padded - set(result):
        # A sum over one argument alone would give its padding a gradient.
        if sum(label in own for own in labels) < 2:
            raise call.refuse("sums over a padded axis of one argument")
    return call.run()


def _convolution(call: PaddedCall) -> Tensor:
    x, weight, out = *call.axes[:2], call.out[0]
    if len(x) != len(weight) or any(x[2:]) or any(weight[2:]) or any(out[2:]) or x[0] is not None:
        raise call.refuse("has no rule for a padded axis that is not the channels'")
    groups = call.argument(6, "groups", 1)
    if groups == 1 and not call.numbers:
        return call.run()
    # With a group for each channel, the own groups are the first ones.
    channels, found = x[1], out[1]
    by_channel = channels is not None and found is not None and weight[1] is None and call.shapes[1][1] == 1
    if (
        not by_channel
        or list(call.numbers.values()) != [channels]
        or groups != call.shapes[0][1]
        or len({divmod(o, i) for o, i in zip(found or (), channels or (), strict=True)}) != 1
    ):
        raise call.refuse(f"with groups={groups} has no rule for padded channels")
    return call.run()


def _convolution_transposed(call: PaddedCall) -> Tensor:
    (x, weight), out = call.axes[:2], call.out[0]
    if len(x) != len(weight) or any(x[2:]) or any(weight[2:]) or any(out[2:]) or x[0] is not None:
        raise call.refuse("has no rule for a padded axis that is not the channels'")
    if call.argument(6, "groups", 1) != 1 or call.numbers:
        raise call.refuse("with groups has no rule for padded channels")
    return call.run()


def _embedding(call: PaddedCall) -> Tensor:
    _refuse_other_numbers(call)
    if any(call.axes[0]) or call.argument(3, "max_norm") is not None:
        raise call.refuse("has no rule for these padded arguments")
    return call.run()


# --- normalization ---------------------------------------------------------------------------------------------------


def _by_channel(call: PaddedCall) -> Tensor:
    """Normalize each channel by itself: a channel of zeros stays zero."""
    _refuse_other_numbers(call)
    x = call.axes[0]
    eps = call.argument(7, "eps", 1e-5)
    if x[0] is not None or any(x[2:]) or not eps > 0:
        raise call.refuse("has no rule for a padded axis that is not the channels'")
    return call.run()


def _layer_norm(call: PaddedCall) -> Tensor:
    x, shape = call.args[0], call.argument(1, "normalized_shape")
    weight, bias = call.argument(2, "weight"), call.argument(3, "bias")
    eps = call.argument(4, "eps", 1e-5)
    dims = list(range(x.dim() - len(shape), x.dim()))
    _refuse_other_options(call, dims)
    if not any(call.axes[0][dim] for dim in dims):
        return call.cleared(call.run(), call.out[0])
    if call.has_numbers:
        raise call.refuse("has unequal numbers for unequal widths")
    return _standardized(call, x, dims, weight, bias, eps, center=True)


def _rms_norm(call: PaddedCall) -> Tensor:
    x, shape = call.args[0], call.argument(1, "normalized_shape")
    weight, eps = call.argument(2, "weight"), call.argument(3, "eps")
    dims = list(range(x.dim() - len(shape), x.dim()))
    _refuse_other_options(call, dims)
    if not any(call.axes[0][dim] for dim in dims):
        return call.run()
    if call.has_numbers:
        raise call.refuse("has unequal numbers for unequal widths")
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _standardized(call, x, dims, weight, None, eps, center=False)


def _standardized(
    call: PaddedCall,
    x: Tensor,
    dims: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    center: bool,
) -> Tensor:
    axes, dtype = call.axes[0], x.dtype
    x = call.filled(x.float() if dtype in HALF_DTYPES else x, axes)
    count = _count(call, x, axes, dims)
    if center:
        x = call.filled(x - x.sum(dims, keepdim=True) / count, axes)
    result = x * torch.rsqrt((x * x).sum(dims, keepdim=True) / count + eps)
    result = result if weight is None else result * weight
    if bias is not None:
        result = result + bias
        if any(axis for dim, axis in enumerate(axes) if dim not in dims):
            result = call.filled(result, axes)
    return result.to(dtype)


def _group_norm(call: PaddedCall) -> Tensor:
    axes, x = call.axes[0], call.args[0]
    groups = call.argument(1, "num_groups")
    if axes[0] is not None or any(axes[2:]):
        raise call.refuse("has no rule for a padded axis that is not the channels'")
    weight, bias = call.argument(2, "weight"), call.argument(3, "bias")
    eps = call.argument(4, "eps", 1e-5)
    if call.has_numbers:
        raise call.refuse("has unequal numbers for unequal widths")
    if groups == 1 and not call.numbers:
        shape = [-1, *[1] * (x.dim() - 2)]
        weight, bias = (t if t is None else t.view(shape) for t in (weight, bias))
        return _standardized(call, x, list(range(1, x.dim())), weight, bias, eps, center=True)
    channels = axes[1]
    assert channels is not None
    numbers = _differing(call)
    if len(numbers) != 1 or len({divmod(c, g) for c, g in zip(channels, numbers[0], strict=True)}) != 1:
        raise call.refuse("has groups of unequal sizes")
    return call.run()


def _scaled_attention(call: PaddedCall) -> Tensor:
    _refuse_other_numbers(call)
    if any(axis for axes in call.axes[:3] for axis in axes[-2:]) or any(map(any, call.axes[3:])):
        raise call.refuse("has a rule for unequal numbers of heads only")
    with call.drawing((*call.axes[0][:-1], None), (*call.shapes[0][:-1], call.shapes[1][-2])):
        return call.run()


# --- over an axis ----------------------------------------------------------------------------------------------------


def _softmax(call: PaddedCall) -> Tensor:
    _refuse_other_numbers(call)
    x, axes, dim = call.args[0], call.axes[0], call.argument(1, "dim")
    if dim is None:
        raise call.refuse("without dim has no rule for a padded axis")
    if axes[dim] is None:
        return call.cleared(call.run(), call.out[0])
    return call.filled(call.run(call.filled(x, axes, -math.inf), *call.args[1:]), call.out[0])


def _logsumexp(call: PaddedCall) -> Tensor:
    _refuse_other_numbers(call)
    dims = _dims(call, call.argument(1, "dim"))
    _refuse_rows(call, dims)
    return call.run(call.filled(call.args[0], call.axes[0], -math.inf), *call.args[1:])


def _sum(call: PaddedCall) -> Tensor:
    _refuse_other_numbers(call)
    return call.run(call.filled(call.args[0], call.axes[0]), *call.args[1:])


def _mean(call: PaddedCall) -> Tensor:
    _refuse_own_numbers(call)
    x, axes = call.args[0], call.axes[0]
    dims = _dims(call, call.argument(1, "dim"))
    if not any(axes[dim] for dim in dims):
        return call.run()
    if call.kwargs.get("dtype") is not None:
        raise call.refuse("with dtype has no rule for a padded axis")
    keep = bool(call.argument(2, "keepdim", False))
    return call.filled(x, axes).sum(dims, keepdim=keep) / _count(call, x, axes, dims)


def _variance(call: PaddedCall) -> Tensor:
    _refuse_own_numbers(call)
    x, axes = call.args[0], call.axes[0]
    given = call.argument(1, "dim")
    unbiased = call.kwargs.get("unbiased", True)
    if isinstance(given, bool):
        given, unbiased = None, given
    elif len(call.args) > 2:
        unbiased = call.args[2]
    correction = call.kwargs.get("correction", int(unbiased))
    dims = _dims(call, given)
    if not any(axes[dim] for dim in dims):
        return call.run()
    _refuse_rows(call, dims)
    keep = bool(call.argument(3, "keepdim", False))
    count = _count(call, x, axes, dims)
    x = call.filled(x, axes)
    x = call.filled(x - x.sum(dims, keepdim=True) / count, axes)
    result = (x * x).sum(dims, keepdim=keep) / (count - correction)
    return result.sqrt() if call.name == "std" else result


def _largest(call: PaddedCall) -> Any:
    return _extreme(call, -math.inf)


def _smallest(call: PaddedCall) -> Any:
    return _extreme(call, math.inf)


def _extreme(call: PaddedCall, fill: float) -> Any:
    if len(call.tensors) > 1:  # torch.max(a, b)
        return _elementwise(call)
    _refuse_other_numbers(call)
    x, axes = call.args[0], call.axes[0]
    dims = _dims(call, call.argument(1, "dim"))
    if not any(axes[dim] for dim in dims):
        if len(call.out) > 1:
            raise call.refuse("has no rule for this padded axis")
        return call.cleared(call.run(), call.out[0])
    _refuse_rows(call, dims)
    if not x.is_floating_point():
        raise call.refuse("of integers has no rule for a padded axis")
    return call.run(call.filled(x, axes, fill), *call.args[1:])


def _product_over(call: PaddedCall) -> Tensor:
    _refuse_other_numbers(call)
    dims = _dims(call, call.argument(1, "dim"))
    _refuse_rows(call, dims)
    return call.run(call.filled(call.args[0], call.axes[0], 1), *call.args[1:])


def _norm(call: PaddedCall) -> Tensor:
    _refuse_other_numbers(call)
    name = call.name
    order = call.argument(1, "ord" if name == "vector_norm" else "p", 2)
    if order not in (None, 2, 2.0, "fro"):
        raise call.refuse("of another order than 2 has no rule for a padded axis")
    return call.run()


def _cumulative(call: PaddedCall) -> Tensor:
    _refuse_other_numbers(call)
    return call.cleared(call.run(), call.out[0])


def _pooling(call: PaddedCall) -> Tensor:
    """Pool over axes that are not padded: zeros stay zero."""
    _refuse_other_numbers(call)
    if len(call.out) > 1 or call.axes[0][: len(call.out[0])] != call.out[0] or any(call.axes[0][2:]):
        raise call.refuse("has no rule for a padded axis that is not the channels'")
    return call.run()


# --- shapes ----------------------------------------------------------------------------------------------------------


def _moved(call: PaddedCall) -> Any:
    """Run a function that only moves axes, or removes and adds those of size 1, or creates zeros."""
    return call.run()


def _viewed(call: PaddedCall) -> Tensor:
    """View a tensor in another shape: its own numbers must stay the first ones along each axis."""
    variants = len(next(axis for axis in (*call.axes[0], *call.out[0]) if axis is not None))
    given = _stripped(call.shapes[0], call.axes[0], variants)
    wanted = _stripped(call.out_shapes[0], call.out[0], variants)
    while given or wanted:
        ours, theirs = _next_group(given, wanted)
        padded = [any(len(set(own)) > 1 for _, own in group[1:]) for group in (ours, theirs)]
        sizes = [[math.prod(own[v] for _, own in group) for v in range(variants)] for group in (ours, theirs)]
        if any(padded) or sizes[0] != sizes[1]:
            raise call.refuse("divides a padded axis in a way that has no rule")
    return call.run()


Group = list[tuple[int, tuple[int, ...]]]
"""Axes of a shape: the size of each, and the own sizes of the variants."""


def _stripped(shape: Sequence[int], axes: Axes, variants: int) -> Group:
    """Return the axes of a shape, without those of size 1."""
    return [
        (size, (size,) * variants if axis is None else axis)
        for size, axis in zip(shape, axes, strict=True)
        if size != 1 or axis is not None
    ]


def _next_group(given: Group, wanted: Group) -> tuple[Group, Group]:
    """Take the first axes of both shapes that have as many numbers."""
    ours, theirs = [given.pop(0)] if given else [], [wanted.pop(0)] if wanted else []
    while True:
        left, right = math.prod(size for size, _ in ours), math.prod(size for size, _ in theirs)
        if left == right or not (given if left < right else wanted):
            return ours, theirs
        (ours if left < right else theirs).append((given if left < right else wanted).pop(0))


def _expanded(call: PaddedCall) -> Tensor:
    result = call.run()
    return result if _covers(call.axes[0], call.out[0]) else call.filled(result, call.out[0])


def _created(call: PaddedCall) -> Tensor:
    """Create a tensor whose own numbers do not depend on the sizes of its axes."""
    places = {"full": (0, "size"), "new_full": (1, "size"), "full_like": ()}.get(call.name)
    if places is not None and any(path[0] not in places for path in call.numbers):
        raise call.refuse("has unequal numbers for unequal widths")
    if call.name == "arange" and (len(call.args) > 2 or list(call.numbers.values()) != [call.out[0][0]]):
        raise call.refuse("has unequal numbers for unequal widths")
    return call.filled(call.run(), call.out[0])


def _stacked(call: PaddedCall) -> Tensor:
    _refuse_other_numbers(call)
    return call.run()


def _joined(call: PaddedCall) -> Tensor:
    """Concatenate: along a padded axis, the own parts move together."""
    _refuse_other_numbers(call)
    dim = call.argument(1, "dim", call.kwargs.get("axis", 0)) % len(call.out[0])
    result = call.run()
    sizes = [_sizes(axes[dim], shape[dim], call.out) for axes, shape in zip(call.axes, call.shapes, strict=True)]
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
    return _taken(call, result, source, dim, call.out[0])


def _divided(call: PaddedCall) -> Any:
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
        found.append(_taken(call, x, places, dim, out))
        own = _sizes(out[dim], shape[dim], call.axes)
        starts = [a + b for a, b in zip(starts, own, strict=True)]
    return tuple(found)


def _glu(call: PaddedCall) -> Tensor:
    x, axes = call.args[0], call.axes[0]
    dim = call.argument(1, "dim", -1) % len(axes)
    if axes[dim] is None:
        return call.run()
    half = tuple(size // 2 for size in axes[dim] or ())
    places = torch.arange(x.shape[dim] // 2, device=x.device)
    first = _taken(call, x, places, dim, call.out[0])
    second = _taken(call, x, places + call.own(half), dim, call.out[0])
    return first * torch.sigmoid(second)


def _taken(call: PaddedCall, x: Tensor, places: Tensor, dim: int, out: Axes) -> Tensor:
    """Return the numbers at some places of an axis, with zeros in the padding."""
    places = places.to(torch.int64).clamp(max=x.shape[dim] - 1)
    return call.filled(x.index_select(dim, places), out)


def _indexed(call: PaddedCall) -> Tensor:
    _refuse_other_numbers(call)
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


def _selected(call: PaddedCall) -> Tensor:
    """Take rows along an axis that is not padded."""
    _refuse_other_numbers(call)
    dim = call.argument(1, "dim", 0)
    if call.axes[0][dim] is not None or any(any(own) for own in call.axes[1:]):
        raise call.refuse("takes a part of a padded axis")
    return call.cleared(call.run(), call.out[0])


def _padded_around(call: PaddedCall) -> Tensor:
    """Pad or resize the axes that are not padded."""
    if call.axes[0] != call.out[0] or any(
        a != b for a, b, axis in zip(call.shapes[0], call.out_shapes[0], call.out[0], strict=True) if axis
    ):
        raise call.refuse("has no rule for this padded axis")
    return call.cleared(call.run(), call.out[0])


# --- random numbers --------------------------------------------------------------------------------------------------


def _dropout(call: PaddedCall) -> Tensor:
    _refuse_other_numbers(call)
    with call.drawing(call.axes[0], call.shapes[0]):
        return call.cleared(call.run(), call.out[0])


def _plain_dropout(call: PaddedCall) -> Tensor:
    _refuse_other_numbers(call)
    with call.drawing(call.axes[0], call.shapes[0]):
        return call.run()


def _drawn(call: PaddedCall) -> Tensor:
    with call.drawing(call.out[0], call.out_shapes[0]):
        return call.cleared(call.run(), call.out[0])


# --- helpers ---------------------------------------------------------------------------------------------------------


def _covers(axes: Axes, out: Axes) -> bool:
    """Return True if a tensor is padded in every axis in which the result is."""
    aligned = (None,) * (len(out) - len(axes)) + axes
    return len(aligned) == len(out) and all(
        own is not None for own, axis in zip(aligned, out, strict=True) if axis is not None
    )


def _refuse_other_broadcasting(call: PaddedCall) -> None:
    """Raise if a variant repeats an axis of size 1 where the widest has an axis of its own."""
    out, shape = call.out[0], call.out_shapes[0]
    for axes, own in zip(call.axes, call.shapes, strict=True):
        for axis, size, wanted, total in zip(axes[::-1], own[::-1], out[::-1], shape[::-1], strict=False):
            if axis is not None and (axis != wanted or size != total):
                raise call.refuse("repeats an axis for some widths and not for others")


def _refuse_other_numbers(call: PaddedCall) -> None:
    """Raise if integers are unequal."""
    if call.numbers:
        raise call.refuse("has unequal numbers for unequal widths")


def _refuse_own_numbers(call: PaddedCall) -> None:
    """Raise if any numbers are unequal."""
    if call.numbers or call.has_numbers:
        raise call.refuse("has unequal numbers for unequal widths")


def _refuse_other_options(call: PaddedCall, dims: Sequence[int]) -> None:
    """Raise if other numbers than the sizes of some axes are unequal."""
    sizes = {call.axes[0][dim] for dim in dims}
    if any(numbers not in sizes for numbers in _differing(call)):
        raise call.refuse("has unequal numbers for unequal widths")


def _differing(call: PaddedCall) -> list[Size]:
    """Return the plain numbers of a call that are not the same in all variants."""
    return list(call.numbers.values())


def _refuse_rows(call: PaddedCall, dims: Sequence[int]) -> None:
    """Raise if an axis is padded that is not reduced."""
    if any(axis for dim, axis in enumerate(call.axes[0]) if dim not in dims):
        raise call.refuse("has no rule for two padded axes")


def _with_own_numbers(call: PaddedCall) -> PaddedCall:
    """Return a call with each member's own number, where a plain number is not the same in all variants."""
    numbers = _differing(call)
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


def _in_place(call: PaddedCall) -> bool:
    name = call.name
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name.endswith("__"))


def _with_tensors(tree: Any, tensors: Any) -> Any:
    if isinstance(tree, Tensor):
        return next(tensors)
    if isinstance(tree, Mapping):
        return {key: _with_tensors(item, tensors) for key, item in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(_with_tensors(item, tensors) for item in tree)
    return tree


def _dims(call: PaddedCall, dim: Any) -> list[int]:
    rank = len(call.axes[0])
    if dim is None or (isinstance(dim, tuple | list) and not dim):
        return list(range(rank))
    return [d % rank for d in (dim if isinstance(dim, tuple | list) else [dim])]


def _count(call: PaddedCall, x: Tensor, axes: Axes, dims: Sequence[int]) -> Tensor:
    """Return how many own numbers a member has along some axes, in a dtype to divide by."""
    sizes = [axes[dim] for dim in dims]
    plain = math.prod(x.shape[dim] for dim in dims if axes[dim] is None)
    variants = len(next(size for size in sizes if size is not None))
    own = tuple(plain * math.prod(size[v] for size in sizes if size is not None) for v in range(variants))
    return call.own(own).to(x.dtype)


def _sizes(axis: Size | None, size: int, like: Any) -> Size:
    """Return the own sizes of an axis, which may not be padded."""
    if axis is not None:
        return axis
    if isinstance(like, tuple) and like and isinstance(like[0], int):
        return (size,) * len(like)
    return (size,) * len(next(own for axes in like for own in axes if own is not None))


# --- the table -------------------------------------------------------------------------------------------------------

_LIBRARIES = (torch, F, torch._C._nn, torch.special, torch.linalg, Tensor)


def _functions(names: Iterable[str]) -> Iterable[Callable[..., Any]]:
    """Yield torch's functions and methods of some names, also in place, and as operators."""
    for name in names:
        forms = (name, f"{name}_", f"__{name}__", f"__r{name}__", f"__i{name}__")
        for library in _LIBRARIES:
            for form in forms:
                found = getattr(library, form, None)
                if callable(found):
                    yield found


def _attributes(names: Iterable[str]) -> Iterable[Callable[..., Any]]:
    for name in names:
        yield getattr(Tensor, name).__get__


_BY_NAMES: Mapping[Rule, str] = {
    _as_is: "relu relu6 leaky_relu elu celu selu gelu silu mish tanh hardswish softsign tanhshrink softshrink "
    "hardshrink sin tan sinh asinh asin atan arctan arcsinh arcsin atanh arctanh erf expm1 log1p abs absolute neg "
    "negative square floor ceil round trunc fix sign sgn positive nan_to_num prelu clone detach contiguous to type "
    "float double half bfloat16 int long bool cpu cuda type_as zeros_like zero alias isnan isinf "
    "deg2rad rad2deg requires_grad_ retain_grad conj resolve_conj resolve_neg real",
    _elementwise: "sigmoid softplus exp exp2 cos cosh logsigmoid hardsigmoid erfc gt lt ge le eq ne greater less "
    "greater_equal less_equal not_equal logical_not logical_and logical_or logical_xor clamp clamp_min clamp_max "
    "clip where maximum minimum fmax fmin masked_fill threshold hardtanh lerp addcmul isfinite bitwise_not "
    "bitwise_and bitwise_or and or xor invert acos arccos logit log_sigmoid expit sinc fill",
    _singular: "log log2 log10 sqrt rsqrt reciprocal acosh arccosh digamma lgamma float_power xlogy atan2 hypot",
    _sum_like: "add sub subtract rsub",
    _product_like: "mul multiply",
    _quotient: "div divide true_divide truediv floor_divide floordiv",
    _power: "pow",
    _linear: "linear",
    _matmul: "matmul mm bmm mv dot inner vdot chain_matmul outer ger",
    _add_matmul: "addmm baddbmm addbmm addmv addr",
    _einsum: "einsum",
    _convolution: "conv1d conv2d conv3d",
    _convolution_transposed: "conv_transpose1d conv_transpose2d conv_transpose3d",
    _embedding: "embedding",
    _by_channel: "batch_norm instance_norm",
    _layer_norm: "layer_norm",
    _rms_norm: "rms_norm",
    _group_norm: "group_norm",
    _scaled_attention: "scaled_dot_product_attention",
    _softmax: "softmax log_softmax",
    _logsumexp: "logsumexp",
    _sum: "sum",
    _mean: "mean",
    _variance: "var std",
    _largest: "max amax argmax",
    _smallest: "min amin argmin",
    _product_over: "prod all",
    _norm: "norm vector_norm normalize",
    _cumulative: "cumsum",
    _pooling: "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d "
    "lp_pool1d lp_pool2d",
    _moved: "zeros new_zeros permute transpose movedim moveaxis swapaxes swapdims t unsqueeze squeeze adjoint",
    _viewed: "view reshape flatten unflatten view_as reshape_as ravel",
    _expanded: "expand expand_as broadcast_to",
    _created: "ones full empty ones_like full_like empty_like new_ones new_full new_empty arange eye",
    _stacked: "stack",
    _joined: "cat concat concatenate",
    _divided: "chunk split tensor_split",
    _glu: "glu",
    _indexed: "getitem",
    _selected: "index_select select narrow",
    _padded_around: "pad interpolate upsample",
    _dropout: "alpha_dropout feature_alpha_dropout",
    _plain_dropout: "dropout dropout1d dropout2d dropout3d feature_dropout",
    _drawn: "rand randn rand_like randn_like bernoulli normal ",
}

RULES: Mapping[Callable[..., Any], Rule] = {
    **{func: rule for rule, names in _BY_NAMES.items() for func in _functions(names.split())},
    **dict.fromkeys(_attributes(("T", "mT", "H", "mH", "data", "real")), _moved),
}
