"""LSTM, GRU and RNN layers for stacked members.

`torch.lstm` and the like have no batching rule, and torch's plain form of them accumulates the gradient of the
weights step by step. Here the recurrence is an operation on batched matrix products (`scans.py`). Whatever does
not recur is one product for all time steps: the input projection, and the gradient of every weight.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelfleet.frameworks.torch.tracing import number_dropout, scans

States = tuple[Tensor, ...]
"""States of a layer: hidden and cell for an LSTM, hidden alone for the others."""
Layer = Callable[[Tensor, States, Sequence[Tensor]], tuple[Tensor, ...]]
"""Layer in one direction: inputs `(time, row, feature)`, first states and weights to outputs and last states."""


def _bias(weights: Sequence[Tensor]) -> Tensor | None:
    # A layer has two biases, which only ever act as their sum.
    return weights[2] + weights[3] if len(weights) >= 4 else None


def _lstm_layer(x: Tensor, state: States, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # All in one dtype: autocast does not reach into a scan.
    dtype = weights[1].dtype
    projected = F.linear(x, weights[0], _bias(weights)).to(dtype)
    hiddens, cells, *_ = scans.lstm(projected, *(part.to(dtype) for part in state), weights[1])
    return hiddens[1:], hiddens[-1], cells[-1]


def _gru_layer(x: Tensor, state: States, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    biases = weights[2:4] if len(weights) >= 4 else (None, weights[1].new_zeros(len(weights[1])))
    dtype = weights[1].dtype
    projected = F.linear(x, weights[0], biases[0]).to(dtype)
    hiddens, *_ = scans.gru(projected, state[0].to(dtype), weights[1], biases[1])
    return hiddens[1:], hiddens[-1]


def _rnn_layer(scan: Callable[..., tuple[Tensor, ...]]) -> Layer:
    def layer(x: Tensor, state: States, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        dtype = weights[1].dtype
        projected = F.linear(x, weights[0], _bias(weights)).to(dtype)
        (hiddens,) = scan(projected, state[0].to(dtype), weights[1])
        return hiddens[1:], hiddens[-1]

    return layer


def _recurrent(layer: Layer, states: int, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a stack of recurrent layers with the signature of `plain`, torch's own function.

    Args:
        layer: One layer in one direction.
        states: How many states the layer has.
        plain: Runs the cases that have no rule.
    """

    def run(x: Tensor, state: Any, weights: Any, *options: Any) -> Any:
        # Packed sequences have another signature: (data, batch_sizes, state, weights, …).
        if isinstance(options[0], Tensor | list | tuple):
            return plain(x, state, weights, *options)
        biases, layers, dropout, train, bidirectional, batch_first = options
        given_dtype = x.dtype
        first = tuple(state) if states == 2 else (state,)
        # For each layer and direction the weights are w_ih, w_hh and then the two biases, if there are any. A
        # projection has no rule.
        per_layer = 4 if biases else 2
        directions = 2 if bidirectional else 1
        if len(weights) != per_layer * layers * directions:
            return plain(x, state, weights, *options)
        if batch_first:
            x = x.transpose(0, 1)
        last: list[tuple[Tensor, ...]] = []
        for depth in range(layers):
            outputs = []
            for direction in range(directions):
                index = depth * directions + direction
                own = weights[index * per_layer : (index + 1) * per_layer]
                given = x.flip(0) if direction else x
                output, *final = layer(given, tuple(part[index] for part in first), own)
                outputs.append(output.flip(0) if direction else output)
                last.append(tuple(final))
            x = torch.cat(outputs, -1) if bidirectional else outputs[0]
            if train and depth < layers - 1:
                if isinstance(dropout, Tensor):  # a rate per member
                    x = number_dropout.dropout(x, dropout)
                elif dropout:
                    x = F.dropout(x, dropout)
        final_states = tuple(torch.stack([state[part] for state in last]) for part in range(states))
        results = (x.transpose(0, 1) if batch_first else x), *final_states
        return tuple(result.to(_dtype_alone(given_dtype, result, plain)) for result in results)

    return run


def _dtype_alone(given: torch.dtype, result: Tensor, plain: Callable[..., Any]) -> torch.dtype:
    """Return the dtype that autocast gives the result for one member alone, on an input of dtype `given`."""
    kind = result.device.type
    if not torch.is_autocast_enabled(kind):
        return result.dtype
    return given if plain is torch.gru and kind == "cpu" else torch.get_autocast_dtype(kind)


RECURRENT_RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: _recurrent(_lstm_layer, 2, torch.lstm),
    torch.gru: _recurrent(_gru_layer, 1, torch.gru),
    torch.rnn_tanh: _recurrent(_rnn_layer(scans.rnn_tanh), 1, torch.rnn_tanh),
    torch.rnn_relu: _recurrent(_rnn_layer(scans.rnn_relu), 1, torch.rnn_relu),
}
