"""Rules for matrix products, convolutions and attention on padded tensors."""

from torch import Tensor

from modelfleet.frameworks.torch.widths.padding import PaddedCall
from modelfleet.frameworks.torch.widths.rule_helpers import covers, refuse_other_numbers


def linear(call: PaddedCall) -> Tensor:
    """Multiply by a weight, and add a bias."""
    biased = call.argument(2, "bias") is not None
    result = call.run()
    # A row that is padding has no numbers, but would get the bias.
    return call.cleared(result, call.out[0]) if biased and any(call.axes[0][:-1]) else result


def matmul(call: PaddedCall) -> Tensor:
    """Multiply: the zeros of both arguments meet."""
    refuse_other_numbers(call)
    return call.run()


def add_matmul(call: PaddedCall) -> Tensor:
    """Multiply, and add a tensor."""
    refuse_other_numbers(call)
    result = call.run()
    return result if covers(call.axes[0], call.out[0]) else call.cleared(result, call.out[0])


def einsum(call: PaddedCall) -> Tensor:
    """Multiply and add up by labels."""
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


def convolution(call: PaddedCall) -> Tensor:
    """Convolve padded channels."""
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


def convolution_transposed(call: PaddedCall) -> Tensor:
    """Convolve padded channels, transposed."""
    (x, weight), out = call.axes[:2], call.out[0]
    if len(x) != len(weight) or any(x[2:]) or any(weight[2:]) or any(out[2:]) or x[0] is not None:
        raise call.refuse("has no rule for a padded axis that is not the channels'")
    if call.argument(6, "groups", 1) != 1 or call.numbers:
        raise call.refuse("with groups has no rule for padded channels")
    return call.run()


def embedding(call: PaddedCall) -> Tensor:
    """Look up rows of a padded table."""
    refuse_other_numbers(call)
    last = call.argument(2, "padding_idx")
    from_end = last is not None and last < 0 and call.axes[1][0] is not None
    if any(call.axes[0]) or call.argument(3, "max_norm") is not None or from_end:
        raise call.refuse("has no rule for these padded arguments")
    return call.run()
