"""Operations that are computed another way while members are stacked, because torch's own way would be slow.

`torch.lstm` and its kin have no batching rule, and torch's plain form of them accumulates the weights' gradient
step by step. Here the recurrence is written on batched matrix products, with one product for all time steps
wherever there is no recurrence: the input projection, and the gradient of every weight.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

HALVES = (torch.float16, torch.bfloat16)


class BatchingRules(TorchFunctionMode):
    """Within this context the operations of `RULES` are computed by their rules.

    A tensor that a forward makes is the same for all members at first. What it draws into such a tensor is not,
    and vmap refuses it (`torch.empty(8).bernoulli_(p)`). Here the tensor gets a member axis, if nothing else has
    been done with it yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fresh: dict[int, Tensor] = {}  # by identity: made in this forward, and not used yet
        self._stacked: Tensor | None = None  # any tensor with a member axis

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if func in FILLED_BY_CHANCE and self._stacked is not None and first is not None and self._is_same(first):
            del self._fresh[id(first)]
            drawn = self._stacked.new_empty(first.shape, dtype=first.dtype, device=first.device)
            torch.utils.swap_tensors(first, func(drawn, *args[1:], **kwargs))
            return first
        result = RULES.get(func, func)(*args, **kwargs)
        if func in MAKERS and isinstance(result, Tensor):
            self._fresh[id(result)] = result
        elif func not in LOOKS:
            for arg in (*args, *kwargs.values()):
                if isinstance(arg, Tensor):
                    self._fresh.pop(id(arg), None)
                    if self._stacked is None and _stacked(arg):
                        self._stacked = arg
        return result

    def _is_same(self, tensor: Tensor) -> bool:
        """Whether a tensor has just been made, for all members alike."""
        return id(tensor) in self._fresh and not _stacked(tensor)


def _stacked(tensor: Tensor) -> bool:
    """Whether a tensor has a member axis, which vmap hides."""
    functorch: Any = torch._C._functorch
    while functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return functorch.is_batchedtensor(tensor)


def _mapping() -> bool:
    """Whether members are stacked."""
    return torch._C._functorch.maybe_current_level() is not None


class _LSTMScan(torch.autograd.Function):
    """`(time, row, 4·hidden)` inputs, projected; first states; recurrent weight: to all hidden and cell states."""

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


def _lstm_layer(x: Tensor, state: tuple[Tensor, ...], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # In one dtype: autocast, which would cast, does not reach the scan's backward.
    dtype = weights[1].dtype
    projected = F.linear(x, weights[0], _bias(weights)).to(dtype)
    hiddens, cells, _ = _LSTMScan.apply(projected, *(part.to(dtype) for part in state), weights[1])
    return hiddens[1:], hiddens[-1], cells[-1]


def _gru_layer(x: Tensor, state: tuple[Tensor, ...], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
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


def _rnn_layer(activation: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def layer(x: Tensor, state: tuple[Tensor, ...], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        projected = F.linear(x, weights[0], _bias(weights))
        (hidden,) = state
        hiddens = []
        for inputs in projected.unbind(0):
            hidden = activation(inputs + hidden @ weights[1].t())
            hiddens.append(hidden)
        return torch.stack(hiddens), hidden

    return layer


def _recurrent(layer: Callable[..., tuple[Tensor, ...]], states: int, plain: Any) -> Callable[..., Any]:
    """torch's signature for a stack of recurrent layers around one layer in one direction.

    `states` is how many states a layer has: hidden and cell, or hidden alone.
    """

    def run(x: Tensor, state: Any, weights: Any, *options: Any) -> Any:
        if isinstance(
            options[0], Tensor | list | tuple
        ):  # packed sequences: (data, batch_sizes, state, weights, …)
            return plain(x, state, weights, *options)
        biases, layers, dropout, train, both, batch_first = options
        given_dtype = x.dtype
        first = tuple(state) if states == 2 else (state,)
        # The order of weights: for each layer and direction w_ih, w_hh, and then the two biases if there are any
        # (and a projection, which has no rule).
        per_layer = 4 if biases else 2
        directions = 2 if both else 1
        if len(weights) != per_layer * layers * directions:
            return plain(x, state, weights, *options)
        if batch_first:
            x = x.transpose(0, 1)
        last: list[tuple[Tensor, ...]] = []
        for depth in range(layers):
            outputs = []
            for direction in range(directions):
                place = depth * directions + direction
                own = weights[place * per_layer : (place + 1) * per_layer]
                given = x.flip(0) if direction else x
                output, *final = layer(given, tuple(part[place] for part in first), own)
                outputs.append(output.flip(0) if direction else output)
                last.append(tuple(final))
            x = torch.cat(outputs, -1) if both else outputs[0]
            if dropout and train and depth < layers - 1:
                x = F.dropout(x, dropout)
        final_states = tuple(torch.stack([state[part] for state in last]) for part in range(states))
        results = (x.transpose(0, 1) if batch_first else x), *final_states
        return tuple(result.to(_given_alone(given_dtype, result, plain)) for result in results)

    return run


def _given_alone(given: torch.dtype, result: Tensor, plain: Any) -> torch.dtype:
    """The dtype in which autocast leaves the result of a recurrent layer on an input of a dtype."""
    kind = result.device.type
    if not torch.is_autocast_enabled(kind):
        return result.dtype
    return given if plain is torch.gru and kind == "cpu" else torch.get_autocast_dtype(kind)


def _bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = torch.einsum("...i,oij,...j->...o", x, weight, y)
    return product if bias is None else product + bias


def _one_hot(labels: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:  # as many as the largest label says: a shape that depends on values
        return F.one_hot(labels, num_classes)
    return (labels.unsqueeze(-1) == torch.arange(num_classes, device=labels.device)).to(torch.int64)


def _contiguously(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Pooling to one number keeps the memory format with as_strided_, which has no batching rule.
    def pool(x: Tensor, output_size: Any) -> Tensor:
        return plain(x.contiguous(), output_size)

    return pool


def _contiguous(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    # Keras asks for channels last before a convolution, for speed; vmap has no such format.
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        memory_format = torch.contiguous_format
    return x.contiguous(memory_format=memory_format)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # Under vmap autocast sees the product but not the bias: all that follows would be in float32, unlike alone.
    result = F.linear(x, weight, bias)
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and result.dtype == torch.float32:
        return result.to(torch.get_autocast_dtype(kind))
    return result


def _normalized(plain: Callable[..., Tensor], whole: bool) -> Callable[..., Tensor]:
    # Alone, a kernel takes halves with float32 weights and statistics, computes in float32, and gives halves.
    # Under vmap its parts get both dtypes, and raise or go on in float32. `whole`: on a GPU autocast gives float32
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kind = x.device.type
        if not _mapping() or not torch.is_autocast_enabled(kind) or x.dtype not in HALVES:
            return plain(x, *args, **kwargs)
        found = plain(x.float(), *args, **kwargs)
        return found if whole and kind == "cuda" else found.to(x.dtype)

    return run


def _in_float32(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Likewise: autocast computes losses in float32, but under vmap it sees only what they are made of.
    def run(*args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled(args[0].device.type):
            args = tuple(_full(arg) for arg in args)
            kwargs = {name: _full(arg) for name, arg in kwargs.items()}
        return loss(*args, **kwargs)

    return run


def _full(arg: Any) -> Any:
    return arg.float() if isinstance(arg, Tensor) and arg.dtype in HALVES else arg


def _randperm(n: int, **options: Any) -> Tensor:
    if not _mapping():
        return torch.randperm(n, **options)
    # vmap would ask for one order at a time. The order of 64-bit words, as `Streams.permutation` has it.
    dtype = options.pop("dtype", None) or torch.int64
    words = torch.randint(-(2**63), 2**63 - 1, (n,), **options)
    return torch.argsort(words, stable=True).to(dtype)


def _rrelu(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    if not training or not _mapping():
        return F.rrelu(x, lower, upper, training, inplace)
    slopes = lower + (upper - lower) * torch.rand_like(x)
    found = torch.where(x <= 0, x * slopes, x)
    return x.copy_(found) if inplace else found


def _gumbel_softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    if not hard or not _mapping():
        return F.gumbel_softmax(logits, tau, hard, eps, dim)
    soft = F.gumbel_softmax(logits, tau, dim=dim)
    found = soft.argmax(dim, keepdim=True)
    classes = torch.arange(logits.shape[dim], device=logits.device)
    choice = (classes.view(-1, *[1] * (logits.dim() - 1 - dim % logits.dim())) == found).to(logits.dtype)
    return choice - soft.detach() + soft


_NORMS = {
    F.layer_norm: True,
    torch.layer_norm: True,
    F.group_norm: True,
    torch.group_norm: True,
    F.batch_norm: False,
    torch.batch_norm: False,
    F.instance_norm: False,
    torch.instance_norm: False,
}
_LOSSES = (
    F.cross_entropy,
    F.nll_loss,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy_with_logits,
    F.poisson_nll_loss,
    F.kl_div,
    F.cosine_embedding_loss,
    F.triplet_margin_loss,
    F.margin_ranking_loss,
)

MAKERS = frozenset(
    {
        torch.empty,
        torch.zeros,
        torch.ones,
        torch.full,
        torch.empty_like,
        torch.zeros_like,
        torch.ones_like,
        torch.full_like,
        Tensor.new,
        Tensor.new_empty,
        Tensor.new_zeros,
        Tensor.new_ones,
        Tensor.new_full,
    }
)
FILLED_BY_CHANCE = frozenset(
    {
        Tensor.bernoulli_,
        Tensor.cauchy_,
        Tensor.exponential_,
        Tensor.geometric_,
        Tensor.log_normal_,
        Tensor.normal_,
        Tensor.random_,
        Tensor.uniform_,
    }
)
LOOKS: frozenset[Any] = frozenset(
    {
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")),
    }
)

RULES: Mapping[Any, Callable[..., Any]] = {
    **{loss: _in_float32(loss) for loss in _LOSSES},
    **{norm: _normalized(norm, whole) for norm, whole in _NORMS.items()},
    torch.randperm: _randperm,
    F.rrelu: _rrelu,
    F.gumbel_softmax: _gumbel_softmax,
    torch.bilinear: _bilinear,
    F.one_hot: _one_hot,
    torch.adaptive_avg_pool1d: _contiguously(torch.adaptive_avg_pool1d),
    F.adaptive_avg_pool2d: _contiguously(F.adaptive_avg_pool2d),
    F.adaptive_avg_pool3d: _contiguously(F.adaptive_avg_pool3d),
    torch._C._nn.adaptive_avg_pool2d: _contiguously(torch._C._nn.adaptive_avg_pool2d),
    F.linear: _linear,
    Tensor.contiguous: _contiguous,
    torch.lstm: _recurrent(_lstm_layer, 2, torch.lstm),
    torch.gru: _recurrent(_gru_layer, 1, torch.gru),
    torch.rnn_tanh: _recurrent(_rnn_layer(torch.tanh), 1, torch.rnn_tanh),
    torch.rnn_relu: _recurrent(_rnn_layer(torch.relu), 1, torch.rnn_relu),
}
