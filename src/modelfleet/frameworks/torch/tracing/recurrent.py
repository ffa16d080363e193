"""LSTM, GRU and RNN layers for stacked members.

`torch.lstm` and the like have no batching rule, and torch's plain form of them accumulates the gradient of the
weights step by step. Here the recurrence is written on batched matrix products. Whatever does not recur is one
product for all time steps: the input projection, and the gradient of every weight.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelfleet.frameworks.torch.tracing import number_dropout

States = tuple[Tensor, ...]
"""States of a layer: hidden and cell for an LSTM, hidden alone for the others."""
Layer = Callable[[Tensor, States, Sequence[Tensor]], tuple[Tensor, ...]]
"""Layer in one direction: inputs `(time, row, feature)`, first states and weights to outputs and last states."""


class _LSTMScan(torch.autograd.Function):
    """Recurrence of an LSTM.

    Takes the projected inputs `(time, row, 4·hidden)`, the first states and the recurrent weight. Returns the
    hidden states, the cell states and the gates of all time steps.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(projected: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        hiddens, cells, gates = [hidden], [cell], []
        for inputs in projected.unbind(0):
            i, f, g, o = (inputs + hiddens[-1] @ weight.t()).chunk(4, -1)
            gate = torch.cat([torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)], -1)
            i, f, g, o = gate.chunk(4, -1)
            cells.append(f * cells[-1] + i * g)
            hiddens.append(o * torch.tanh(cells[-1]))
            gates.append(gate)
        return torch.stack(hiddens), torch.stack(cells), torch.stack(gates)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*output, inputs[3])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        d_hiddens, d_cells, _ = grad_outputs
        hiddens, cells, gates, weight = ctx.saved_tensors
        d_hidden, d_cell = d_hiddens[-1], d_cells[-1]
        d_gates = []
        for t in range(gates.shape[0] - 1, -1, -1):
            i, f, g, o = gates[t].chunk(4, -1)
            tanh_cell = torch.tanh(cells[t + 1])
            d_cell = d_cell + d_hidden * o * (1 - tanh_cell * tanh_cell)
            d_gate = torch.cat(
                [
                    d_cell * g * i * (1 - i),
                    d_cell * cells[t] * f * (1 - f),
                    d_cell * i * (1 - g * g),
                    d_hidden * tanh_cell * o * (1 - o),
                ],
                -1,
            )
            d_gates.append(d_gate)
            d_hidden = d_hiddens[t] + d_gate @ weight
            d_cell = d_cells[t] + d_cell * f
        d_projected = torch.stack(d_gates[::-1])
        d_weight = d_projected.flatten(0, 1).t() @ hiddens[:-1].flatten(0, 1)
        return d_projected, d_hidden, d_cell, d_weight


def _bias(weights: Sequence[Tensor]) -> Tensor | None:
    # A layer has two biases, which only ever act as their sum.
    return weights[2] + weights[3] if len(weights) >= 4 else None


def _lstm_layer(x: Tensor, state: States, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # All in one dtype: autocast does not reach the backward of the scan.
    dtype = weights[1].dtype
    projected = F.linear(x, weights[0], _bias(weights)).to(dtype)
    hiddens, cells, _ = _LSTMScan.apply(projected, *(part.to(dtype) for part in state), weights[1])
    return hiddens[1:], hiddens[-1], cells[-1]


def _gru_layer(x: Tensor, state: States, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    biases = weights[2:4] if len(weights) >= 4 else (None, None)
    projected = F.linear(x, weights[0], biases[0])
    (hidden,) = state
    hiddens = []
    for inputs in projected.unbind(0):
        reset_x, update_x, new_x = inputs.chunk(3, -1)
        reset_h, update_h, new_h = F.linear(hidden, weights[1], biases[1]).chunk(3, -1)
        update = torch.sigmoid(update_x + update_h)
        new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
        hidden = new + update * (hidden - new)
        hiddens.append(hidden)
    return torch.stack(hiddens), hidden


def _rnn_layer(activation: Callable[[Tensor], Tensor]) -> Layer:
    def layer(x: Tensor, state: States, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        projected = F.linear(x, weights[0], _bias(weights))
        (hidden,) = state
        hiddens = []
        for inputs in projected.unbind(0):
            hidden = activation(inputs + hidden @ weights[1].t())
            hiddens.append(hidden)
        return torch.stack(hiddens), hidden

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
    torch.rnn_tanh: _recurrent(_rnn_layer(torch.tanh), 1, torch.rnn_tanh),
    torch.rnn_relu: _recurrent(_rnn_layer(torch.relu), 1, torch.rnn_relu),
}
