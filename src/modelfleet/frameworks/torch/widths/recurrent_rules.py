"""Rules for recurrent layers and cells with padded hidden units.

The rows of a recurrent layer's weights are its gates, one after the other. Padded gate by gate, a hidden unit
without weights stays at zero: whatever its gates are, its new content is tanh(0), and its first state is zero.
"""

from typing import Any

from torch import Tensor

from modelfleet.frameworks.torch.widths.padding import PaddedCall
from modelfleet.frameworks.torch.widths.regrouping import parts, regrouped, whole
from modelfleet.frameworks.torch.widths.rule_helpers import refuse_other_numbers

_GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def recurrent(call: PaddedCall) -> Any:
    """Run a stack of recurrent layers, in one direction or in both."""
    x, state, weights, *options = call.args
    if isinstance(options[0], Tensor | list | tuple):
        raise call.refuse("on packed sequences has no rule for a padded axis")
    refuse_other_numbers(call)
    biases, layers, _, _, bidirectional, batch_first = options
    directions = 2 if bidirectional else 1
    if len(weights) != (4 if biases else 2) * layers * directions:
        raise call.refuse("with a projection has no rule for a padded axis")
    if any(call.axes_of(x)[:-1]):
        raise call.refuse("has no rule for a padded axis of its input that is not the last")
    hidden, own = weights[1].shape[1], call.axes_of(weights[1])[1]
    if own is None:  # only the features of the input are padded
        return call.run()
    per_direction = len(weights) // (layers * directions)
    weights = [_by_gate(call, weight) for weight in weights]
    both, own_both = parts(2, hidden, own), whole(2 * hidden, tuple(2 * size for size in own))
    if directions == 2:  # the input of the second layer is both directions of the first
        for number in range(2 * per_direction, len(weights), per_direction):
            weights[number] = regrouped(call, weights[number], 1, own_both, both)
    leading = x.shape[:-1][::-1] if batch_first else x.shape[:-1]
    with call.drawing((None, None, None, own), (*leading, directions, hidden)):  # dropout between layers
        output, *states = call.run(x, state, weights, *options)
    if directions == 2:
        output = regrouped(call, output, -1, both, own_both)
    return output, *states


def cell(call: PaddedCall) -> Any:
    """Take one step of a recurrent layer."""
    refuse_other_numbers(call)
    x, state, *weights = call.args
    if any(call.axes_of(x)[:-1]):
        raise call.refuse("has no rule for a padded axis of its input that is not the last")
    return call.run(x, state, *(w if w is None else _by_gate(call, w) for w in weights))


def _by_gate(call: PaddedCall, weight: Tensor) -> Tensor:
    """Return a weight or a bias whose rows are padded gate by gate."""
    axes, gates = call.axes_of(weight), _GATES[call.name.split("_")[0]]
    if axes[0] is None:
        return weight
    given, hidden = whole(weight.shape[0], axes[0]), tuple(size // gates for size in axes[0])
    return regrouped(call, weight, 0, given, parts(gates, weight.shape[0] // gates, hidden))
