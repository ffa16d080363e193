"""Recurrences over time as operations of their own: one node of a traced graph, whatever the length.

Written out step by step, a recurrence of fifty time steps is a thousand nodes, which take seconds to trace, and
again for every length. So a graph contains the recurrence as one operation, with another one for its gradient.
Both loop over time when they run, on batched matrix products. Before a graph is compiled, they are written out
(`DECOMPOSITIONS`), so that the compiler can fuse the small operations of a time step.

All tensors have a member axis in front: inputs `(member, time, row, gates)`, states `(member, row, hidden)`,
recurrent weights `(member, gates, hidden)`. Results with all states have one time step more than the inputs: the
first state.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

Tensors = tuple[Tensor, ...]

_LIBRARY = torch.library.Library("modelfleet", "DEF")
OPERATIONS_PER_STEP = 14  # of one time step, forward or backward, when it is written out


def _over_time(product: Tensor) -> Tensor:
    """Return `(member, time · row, …)` of `(member, time, row, …)`."""
    return product.flatten(1, 2)


def _weight_gradient(d_gates: Tensor, hiddens: Tensor) -> Tensor:
    """Return the gradient of a recurrent weight: one product for all time steps."""
    return torch.bmm(_over_time(d_gates).transpose(1, 2), _over_time(hiddens[:, :-1]))


def _lstm(projected: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor) -> Tensors:
    recurrent, size = weight.transpose(1, 2).contiguous(), hidden.shape[-1]
    hiddens, cells, gates = [hidden], [cell], []
    for inputs in projected.unbind(1):
        sums = torch.baddbmm(inputs, hidden, recurrent)
        first, g, o = sums.split([2 * size, size, size], -1)
        first, g, o = torch.sigmoid(first), torch.tanh(g), torch.sigmoid(o)
        i, f = first.chunk(2, -1)
        cell = torch.addcmul(f * cell, i, g)
        hidden = o * torch.tanh(cell)
        hiddens.append(hidden)
        cells.append(cell)
        gates.append(torch.cat([first, g, o], -1))
    return torch.stack(hiddens, 1), torch.stack(cells, 1), torch.stack(gates, 1)


def _lstm_backward(
    d_hiddens: Tensor, d_cells: Tensor, hiddens: Tensor, cells: Tensor, gates: Tensor, weight: Tensor
) -> Tensors:
    size = hiddens.shape[-1]
    tanh_cells = torch.tanh(cells)
    i, f, g, o = gates.split(size, -1)
    # What does not recur is computed for all time steps at once.
    to_cell = o * (1 - tanh_cells[:, 1:] * tanh_cells[:, 1:])
    by_cell = torch.cat([g * i * (1 - i), cells[:, :-1] * f * (1 - f), i * (1 - g * g)], -1)
    by_hidden = tanh_cells[:, 1:] * o * (1 - o)
    d_hidden, d_cell = d_hiddens[:, -1], d_cells[:, -1]
    d_gates = []
    for t in range(gates.shape[1] - 1, -1, -1):
        d_cell = torch.addcmul(d_cell, d_hidden, to_cell[:, t])
        d_gate = torch.cat([d_cell.repeat(1, 1, 3) * by_cell[:, t], d_hidden * by_hidden[:, t]], -1)
        d_gates.append(d_gate)
        d_hidden = torch.baddbmm(d_hiddens[:, t], d_gate, weight)
        d_cell = torch.addcmul(d_cells[:, t], d_cell, f[:, t])
    d_projected = torch.stack(d_gates[::-1], 1)
    return d_projected, d_hidden, d_cell, _weight_gradient(d_projected, hiddens)


def _gru(projected: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensors:
    recurrent, size = weight.transpose(1, 2).contiguous(), hidden.shape[-1]
    bias = bias.unsqueeze(1)
    hiddens, gates = [hidden], []
    for inputs in projected.unbind(1):
        sums = torch.baddbmm(bias, hidden, recurrent)
        first_x, new_x = inputs.split([2 * size, size], -1)
        first_h, new_h = sums.split([2 * size, size], -1)
        first = torch.sigmoid(first_x + first_h)
        reset, update = first.chunk(2, -1)
        new = torch.tanh(torch.addcmul(new_x, reset, new_h))
        hidden = torch.addcmul(new, update, hidden - new)
        hiddens.append(hidden)
        gates.append(torch.cat([first, new, new_h], -1))
    return torch.stack(hiddens, 1), torch.stack(gates, 1)


def _gru_backward(d_hiddens: Tensor, hiddens: Tensor, gates: Tensor, weight: Tensor) -> Tensors:
    size = hiddens.shape[-1]
    reset, update, new, new_h = gates.split(size, -1)
    by_new = (1 - update) * (1 - new * new)
    by_update = (hiddens[:, :-1] - new) * update * (1 - update)
    by_reset = by_new * new_h * reset * (1 - reset)
    # By what a state's gradient is multiplied for each gate: reset, update, new, and the state's part of new.
    factors = torch.cat([by_reset, by_update, by_new * reset], -1)
    d_hidden = d_hiddens[:, -1]
    d_sums, d_states = [], []
    for t in range(gates.shape[1] - 1, -1, -1):
        d_sum = d_hidden.repeat(1, 1, 3) * factors[:, t]
        d_states.append(d_hidden)
        d_sums.append(d_sum)
        d_hidden = torch.baddbmm(torch.addcmul(d_hiddens[:, t], d_hidden, update[:, t]), d_sum, weight)
    d_sum, d_state = torch.stack(d_sums[::-1], 1), torch.stack(d_states[::-1], 1)
    d_projected = torch.cat([d_sum[..., : 2 * size], d_state * by_new], -1)
    return d_projected, d_hidden, _weight_gradient(d_sum, hiddens), _over_time(d_sum).sum(1)


def _rnn(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensors]:
    def run(projected: Tensor, hidden: Tensor, weight: Tensor) -> Tensors:
        recurrent = weight.transpose(1, 2).contiguous()
        hiddens = [hidden]
        for inputs in projected.unbind(1):
            hidden = activation(torch.baddbmm(inputs, hidden, recurrent))
            hiddens.append(hidden)
        return (torch.stack(hiddens, 1),)

    return run


def _rnn_backward(slope: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensors]:
    def run(d_hiddens: Tensor, hiddens: Tensor, weight: Tensor) -> Tensors:
        slopes = slope(hiddens[:, 1:])
        d_hidden = d_hiddens[:, -1]
        d_sums = []
        for t in range(slopes.shape[1] - 1, -1, -1):
            d_sums.append(d_hidden * slopes[:, t])
            d_hidden = torch.baddbmm(d_hiddens[:, t], d_sums[-1], weight)
        d_projected = torch.stack(d_sums[::-1], 1)
        return d_projected, d_hidden, _weight_gradient(d_projected, hiddens)

    return run


def _fake_forward(results: Sequence[int]) -> Callable[..., Tensors]:
    # For each result, its size in hidden units; those with all states have one time step more.
    def fake(projected: Tensor, hidden: Tensor, *_: Tensor) -> Tensors:
        members, steps, rows, _gates = projected.shape
        size = hidden.shape[-1]
        return tuple(projected.new_empty(members, steps + (units == 1), rows, units * size) for units in results)

    return fake


def _fake_backward(states: int, gates: int, biased: bool) -> Callable[..., Tensors]:
    def fake(d_hiddens: Tensor, *rest: Tensor) -> Tensors:
        weight = rest[-1]
        members, more_steps, rows, size = d_hiddens.shape
        d_projected = d_hiddens.new_empty(members, more_steps - 1, rows, gates * size)
        d_states = [d_hiddens.new_empty(members, rows, size) for _ in range(states)]
        d_biases = [d_hiddens.new_empty(members, gates * size)] if biased else []
        return d_projected, *d_states, torch.empty_like(weight, memory_format=torch.contiguous_format), *d_biases

    return fake


DECOMPOSITIONS: dict[Any, Callable[..., Tensors]] = {}
"""By operation, the function that writes it out."""


def _operation(name: str, inputs: int, outputs: int, run: Callable[..., Tensors], fake: Callable[..., Any]) -> Any:
    """Define an operation on tensors with a member axis, and return it."""
    arguments = ", ".join(f"Tensor a{number}" for number in range(inputs))
    _LIBRARY.define(f"{name}({arguments}) -> ({', '.join(['Tensor'] * outputs)})")
    operation = getattr(torch.ops.modelfleet, name).default

    def one_or_several(function: Callable[..., Tensors]) -> Callable[..., Any]:
        return function if outputs > 1 else lambda *args: function(*args)[0]

    _LIBRARY.impl(name, one_or_several(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"modelfleet::{name}", one_or_several(fake), lib=_LIBRARY)

    def mapped(info: Any, in_dims: Sequence[int | None], *args: Tensor) -> Any:
        width = info.batch_size
        whole = [
            arg.unsqueeze(0).expand(width, *arg.shape) if axis is None else arg.movedim(axis, 0)
            for arg, axis in zip(args, in_dims, strict=True)
        ]
        found = operation(*(arg.flatten(0, 1) for arg in whole))
        if outputs == 1:
            return found.unflatten(0, (width, -1)), 0
        return tuple(one.unflatten(0, (width, -1)) for one in found), (0,) * outputs

    torch.library.register_vmap(f"modelfleet::{name}", mapped, lib=_LIBRARY)
    DECOMPOSITIONS[operation] = one_or_several(run)
    return operation


def _scan(
    name: str,
    arguments: int,
    results: Sequence[int],
    functions: tuple[Callable[..., Tensors], Callable[..., Tensors]],
    gates: int,
    *,
    biased: bool = False,
) -> Callable[..., Tensors]:
    """Return a differentiable recurrence of one member, whose tensors have no member axis.

    Args:
        name: The name of the operation.
        arguments: How many tensors it takes: inputs, states, the weight, a bias.
        results: For each result, its size in hidden units: 1 for states, which are returned first.
        functions: The recurrence and its gradient. The gradient takes the gradients of the states, the results,
            and the weight.
        gates: The gates of a time step.
        biased: True if the last argument is a bias.
    """
    run, run_backward = functions
    states = sum(units == 1 for units in results)
    taken = states + len(results) + 1
    forward_op = _operation(name, arguments, len(results), run, _fake_forward(results))
    backward_op = _operation(
        f"{name}_backward", taken, arguments, run_backward, _fake_backward(states, gates, biased)
    )

    def alone(operation: Any, args: Sequence[Tensor]) -> Tensors:
        found = operation(*(arg.unsqueeze(0) for arg in args))
        return tuple(one.squeeze(0) for one in (found if isinstance(found, tuple) else (found,)))

    def gradient(grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensors:
        """Return the gradient as a function of the inputs alone, written out."""
        found = run(*(arg.unsqueeze(0) for arg in inputs))
        grads = [grad.unsqueeze(0) for grad in grads]
        return tuple(one.squeeze(0) for one in run_backward(*grads, *found, inputs[states + 1].unsqueeze(0)))

    class Backward(torch.autograd.Function):
        """Takes the states' gradients, the results, and the inputs, which only its own gradient needs."""

        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Tensor) -> Tensors:
            return alone(backward_op, (*args[: taken - 1], args[taken + states]))

        @staticmethod
        def setup_context(ctx: Any, inputs: Tensors, output: Tensors) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> Tensors:
            # Second derivatives are rare: those of the recurrence written out.
            grads, results = ctx.saved_tensors[:states], ctx.saved_tensors[states : taken - 1]
            pull: Any = torch.func.vjp(gradient, grads, ctx.saved_tensors[taken - 1 :])[1]
            by_grads, by_inputs = pull(grad_outputs)
            return *by_grads, *map(torch.zeros_like, results), *by_inputs

    class Scan(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Tensor) -> Tensors:
            return alone(forward_op, args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Tensors, output: Tensors) -> None:
            ctx.save_for_backward(*output, *inputs)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> Tensors:
            return Backward.apply(*grad_outputs[:states], *ctx.saved_tensors)

    return Scan.apply


lstm = _scan("lstm", 4, (1, 1, 4), (_lstm, _lstm_backward), 4)
"""Takes inputs, hidden and cell state, weight; returns the hidden states, cell states and gates of all steps."""
gru = _scan("gru", 4, (1, 4), (_gru, _gru_backward), 3, biased=True)
"""Takes inputs, hidden state, weight, bias; returns the hidden states and gates of all steps."""
rnn_tanh = _scan("rnn_tanh", 3, (1,), (_rnn(torch.tanh), _rnn_backward(lambda h: 1 - h * h)), 1)
"""Takes inputs, hidden state, weight; returns the hidden states of all steps."""
rnn_relu = _scan("rnn_relu", 3, (1,), (_rnn(torch.relu), _rnn_backward(lambda h: (h > 0).to(h.dtype))), 1)
"""Takes inputs, hidden state, weight; returns the hidden states of all steps."""


def count_operations(graph: fx.GraphModule) -> int:
    """Return how many operations a graph has when its recurrences are written out."""
    return sum(_count(node) for node in graph.graph.nodes)


def _count(node: fx.Node) -> int:
    if node.target not in DECOMPOSITIONS:
        return 1
    longest = max(value.shape[1] for value in map(_value, node.args) if value is not None and value.dim() == 4)
    return OPERATIONS_PER_STEP * longest


def _value(argument: object) -> Tensor | None:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else None
