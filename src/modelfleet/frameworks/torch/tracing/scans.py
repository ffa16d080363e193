"""Recurrences over time as operations of their own: one node of a traced graph, whatever the length.

Written out step by step, a recurrence of fifty time steps is a thousand nodes, which take seconds to trace, and
again for every length. So a graph contains the recurrence as one operation, with another one for its gradient.
Both loop over time when they run, on batched matrix products. Before a graph is compiled, they are written out
(`DECOMPOSITIONS`), so that the compiler can fuse the small operations of a time step.

Inputs are `(member, time, row, gates)`, states `(member, row, hidden)`, weights `(member, gates, hidden)`, or all
without the member axis. Results with all states have one step more than the inputs: the first state.
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


def _stacked(*columns: list[Tensor]) -> Tensors:
    """Return the tensors of all time steps, `(member, time, row, …)` for each column."""
    return tuple(torch.stack(column, 1) for column in columns)


def _lstm(projected: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor) -> Tensors:
    recurrent, size = weight.transpose(1, 2).contiguous(), hidden.shape[-1]
    hiddens, cells, gates, news = [hidden], [cell], [], []
    for inputs in projected.unbind(1):
        sums = torch.baddbmm(inputs, hidden, recurrent)
        gate, new = torch.sigmoid(sums), torch.tanh(sums.narrow(-1, 2 * size, size))
        i, f, _, o = gate.chunk(4, -1)
        cell = torch.addcmul(f * cell, i, new)
        hidden = o * torch.tanh(cell)
        hiddens.append(hidden)
        cells.append(cell)
        gates.append(gate)
        news.append(new)
    return _stacked(hiddens, cells, gates, news)


def _lstm_backward(
    d_hiddens: Tensor, d_cells: Tensor, hiddens: Tensor, cells: Tensor, gates: Tensor, news: Tensor, weight: Tensor
) -> Tensors:
    tanh_cells = torch.tanh(cells[:, 1:])
    i, f, _, o = gates.chunk(4, -1)
    # What does not recur is computed for all time steps at once.
    to_cell = o * (1 - tanh_cells * tanh_cells)
    by_cell = torch.stack([news * i * (1 - i), cells[:, :-1] * f * (1 - f), i * (1 - news * news)], -2)
    by_hidden = tanh_cells * o * (1 - o)
    d_hidden, d_cell = d_hiddens[:, -1], d_cells[:, -1]
    d_gates = []
    for t in range(gates.shape[1] - 1, -1, -1):
        d_cell = torch.addcmul(d_cell, d_hidden, to_cell[:, t])
        d_first = (d_cell.unsqueeze(-2) * by_cell[:, t]).flatten(-2)
        d_gate = torch.cat([d_first, d_hidden * by_hidden[:, t]], -1)
        d_gates.append(d_gate)
        d_hidden = torch.baddbmm(d_hiddens[:, t], d_gate, weight)
        d_cell = torch.addcmul(d_cells[:, t], d_cell, f[:, t])
    d_projected = torch.stack(d_gates[::-1], 1)
    return d_projected, d_hidden, d_cell, _weight_gradient(d_projected, hiddens)


def _gru(projected: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensors:
    recurrent, size = weight.transpose(1, 2).contiguous(), hidden.shape[-1]
    bias = bias.unsqueeze(1)
    hiddens, gates, news, states = [hidden], [], [], []
    for inputs in projected.unbind(1):
        sums = torch.baddbmm(bias, hidden, recurrent)
        first_x, new_x = inputs.split([2 * size, size], -1)
        first_h, state = sums.split([2 * size, size], -1)
        gate = torch.sigmoid(first_x + first_h)
        reset, update = gate.chunk(2, -1)
        new = torch.tanh(torch.addcmul(new_x, reset, state))
        hidden = torch.lerp(new, hidden, update)
        hiddens.append(hidden)
        gates.append(gate)
        news.append(new)
        states.append(state)
    return _stacked(hiddens, gates, news, states)


def _gru_backward(
    d_hiddens: Tensor, hiddens: Tensor, gates: Tensor, news: Tensor, states: Tensor, weight: Tensor
) -> Tensors:
    reset, update = gates.chunk(2, -1)
    by_new = (1 - update) * (1 - news * news)
    by_update = (hiddens[:, :-1] - news) * update * (1 - update)
    by_state = by_new * reset
    by_reset = by_state * states * (1 - reset)
    # By what a state's gradient is multiplied for each gate: reset, update, and the state's part of new.
    factors = torch.stack([by_reset, by_update, by_state], -2)
    d_hidden = d_hiddens[:, -1]
    d_sums, d_after = [], []
    for t in range(gates.shape[1] - 1, -1, -1):
        d_sum = (d_hidden.unsqueeze(-2) * factors[:, t]).flatten(-2)
        d_after.append(d_hidden)
        d_sums.append(d_sum)
        d_hidden = torch.baddbmm(torch.addcmul(d_hiddens[:, t], d_hidden, update[:, t]), d_sum, weight)
    d_sum, d_state = _stacked(d_sums[::-1], d_after[::-1])
    d_projected = torch.cat([d_sum[..., : gates.shape[-1]], d_state * by_new], -1)
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


def _fake_forward(states: int, others: Sequence[int]) -> Callable[..., Tensors]:
    # States of all time steps include the first one. The other results are given by their size in hidden units.
    def fake(projected: Tensor, hidden: Tensor, *_: Tensor) -> Tensors:
        members, steps, rows, _gates = projected.shape
        size = hidden.shape[-1]
        all_states = [projected.new_empty(members, steps + 1, rows, size) for _ in range(states)]
        return *all_states, *(projected.new_empty(members, steps, rows, units * size) for units in others)

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


def _any_rank(run: Callable[..., Tensors]) -> Callable[..., Any]:
    """Return a function that also takes tensors of one member. A single result is no tuple."""

    def call(*args: Tensor) -> Any:
        if args[0].dim() == 4:
            found = run(*args)
        else:
            found = tuple(one.squeeze(0) for one in run(*(arg.unsqueeze(0) for arg in args)))
        return found if len(found) > 1 else found[0]

    return call


def _operation(name: str, inputs: int, outputs: int, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operation on tensors with or without a member axis, and return it."""
    arguments = ", ".join(f"Tensor a{number}" for number in range(inputs))
    _LIBRARY.define(f"{name}({arguments}) -> ({', '.join(['Tensor'] * outputs)})")
    operation = getattr(torch.ops.modelfleet, name).default
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"modelfleet::{name}", fake, lib=_LIBRARY)

    def mapped(info: Any, in_dims: Sequence[int | None], *args: Tensor) -> Any:
        width = info.batch_size
        first = in_dims[0]
        nested = args[0].dim() - (first is not None) == 4  # there is a member axis already
        whole = []
        for arg, axis in zip(args, in_dims, strict=True):
            if axis is None:
                arg = arg.unsqueeze(0).expand(width, *arg.shape)
            elif axis:
                arg = arg.movedim(axis, 0)
            whole.append(arg.flatten(0, 1) if nested else arg)
        found = operation(*whole)
        several = found if outputs > 1 else (found,)
        results = tuple(one.unflatten(0, (width, -1)) if nested else one for one in several)
        return (results, (0,) * outputs) if outputs > 1 else (results[0], 0)

    torch.library.register_vmap(f"modelfleet::{name}", mapped, lib=_LIBRARY)
    DECOMPOSITIONS[operation] = run
    return operation


def _tuple(found: Any) -> Tensors:
    return found if isinstance(found, tuple) else (found,)


def _scan(
    name: str,
    states: int,
    others: Sequence[int],
    functions: tuple[Callable[..., Tensors], Callable[..., Tensors]],
    gates: int,
    *,
    biased: bool = False,
) -> Callable[..., Tensors]:
    """Return a differentiable recurrence of one member, whose tensors have no member axis.

    Args:
        name: The name of the operation.
        states: How many states it has. They come after the inputs, and before the weight and a bias. Their
            values at all time steps are the first results.
        others: For each other result, its size in hidden units.
        functions: The recurrence and its gradient. The gradient takes the gradients of the states, the results,
            and the weight.
        gates: The gates of a time step.
        biased: True if the last argument is a bias.
    """
    run, run_backward = map(_any_rank, functions)
    arguments, results = 2 + states + biased, states + len(others)
    taken = states + results + 1
    forward_op = _operation(name, arguments, results, run, _any_rank(_fake_forward(states, others)))
    fake_backward = _any_rank(_fake_backward(states, gates, biased))
    backward_op = _operation(f"{name}_backward", taken, arguments, run_backward, fake_backward)

    def gradient(grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensors:
        """Return the gradient as a function of the inputs alone, written out."""
        return run_backward(*grads, *_tuple(run(*inputs)), inputs[states + 1])

    class Backward(torch.autograd.Function):
        """Takes the states' gradients, the results, and the inputs, which only its own gradient needs."""

        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Tensor) -> Tensors:
            return backward_op(*args[: taken - 1], args[taken + states])

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
            return _tuple(forward_op(*args))

        @staticmethod
        def setup_context(ctx: Any, inputs: Tensors, output: Tensors) -> None:
            ctx.save_for_backward(*output, *inputs)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> Tensors:
            return Backward.apply(*grad_outputs[:states], *ctx.saved_tensors)

    return Scan.apply


lstm = _scan("lstm", 2, (4, 1), (_lstm, _lstm_backward), 4)
"""Takes inputs, hidden and cell state, weight; returns the hidden states of all steps, the cell states, …"""
gru = _scan("gru", 1, (2, 1, 1), (_gru, _gru_backward), 3, biased=True)
"""Takes inputs, hidden state, weight, bias; returns the hidden states of all steps, …"""
rnn_tanh = _scan("rnn_tanh", 1, (), (_rnn(torch.tanh), _rnn_backward(lambda h: 1 - h * h)), 1)
"""Takes inputs, hidden state, weight; returns the hidden states of all steps."""
rnn_relu = _scan("rnn_relu", 1, (), (_rnn(torch.relu), _rnn_backward(lambda h: (h > 0).to(h.dtype))), 1)
"""Takes inputs, hidden state, weight; returns the hidden states of all steps."""


def count_operations(graph: fx.GraphModule) -> int:
    """Return how many operations a graph has when its recurrences are written out."""
    return sum(_count(node) for node in graph.graph.nodes)


def _count(node: fx.Node) -> int:
    if node.target not in DECOMPOSITIONS:
        return 1
    inputs = node.args[0]
    assert isinstance(inputs, fx.Node)
    return OPERATIONS_PER_STEP * inputs.meta["val"].shape[-3]
