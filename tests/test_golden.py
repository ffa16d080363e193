"""The golden table: a member of a fleet gets the numbers it would have had alone.

Layers × optimizers × dtypes. Three members with learning rates of their own take 20 steps on shuffled rows;
the one in the middle is compared with a plain torch loop (`modelfleet.testing.alone`).

Tracing is what takes the time here. So every layer is traced twice: with SGD in float32, which feels a gradient
that is wrong by a factor, and with AdamW in float64, which feels one that is wrong in its tenth digit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf
from modelfleet import testing

ROWS, EPOCHS = 40, 4
EVEN, UNEVEN = 8, 9  # rows a batch, five batches an epoch: all alike, or the last one of four rows
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
# Rows of one member's data, as a model's forward takes them, from a generator.
Inputs = Callable[[torch.Generator], Any]


def normal(*shape: int) -> Inputs:
    return lambda generator: torch.randn(ROWS, *shape, generator=generator)


def tokens(length: int, vocabulary: int = 11) -> Inputs:
    return lambda generator: torch.randint(0, vocabulary, (ROWS, length), generator=generator)


@dataclass(frozen=True)
class Case:
    """A model and its data. It has three classes to tell apart, or with `loss="mse"` two numbers to find.

    `ignored` are tensors that the loss does not depend on: a bias before BatchNorm (and the running mean,
    which follows it), or attention's bias of the keys, which softmax does not feel. Their gradient is exactly
    0, and what is computed of it is rounding noise. SGD leaves that as small as it is. Adam divides it by its
    own size and takes whole steps in random directions, unless the noise is far below its eps, as it is in
    float64. So they are left out with AdamW in float32, and there alone. No other number depends on them.
    """

    model: Callable[[], nn.Module]
    inputs: Inputs
    loss: str = "cross_entropy"
    ignored: tuple[str, ...] = ()


# --- models that nn.Sequential can't say


class Attention(nn.Module):
    """Causal self-attention; with `dropout`, of the attention weights too."""

    def __init__(self, dropout: float, need_weights: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, 3)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=h.dtype)
        out, _ = self.attention(h, h, h, attn_mask=mask, is_causal=True, need_weights=self.need_weights)
        return self.head((h + out).mean(1))


class Encoder(nn.Module):
    def __init__(self, causal: bool, norm_first: bool = False) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True, norm_first=norm_first)
        self.head = nn.Linear(8, 3)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        mask = None
        if self.causal:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.layer(x, src_mask=mask, is_causal=self.causal).mean(1))


class ScaledDotProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        return self.head(out.transpose(1, 2).flatten(2).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 5, **options)
        self.head = nn.Linear(10 if options.get("bidirectional") else 5, 3)
        self.batch_first = options.get("batch_first", False)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x if self.batch_first else x.transpose(0, 1))
        return self.head(out[:, -1] if self.batch_first else out[-1])


class CellLoop(nn.Module):
    def __init__(self, kind: type[nn.LSTMCell] | type[nn.GRUCell]) -> None:
        super().__init__()
        self.cell = kind(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for row in x.unbind(1):
            state = self.cell(row, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(x).mean(1))))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.inner(x))


class Noisy(nn.Module):
    """Draws in its forward, in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x + 0.1 * torch.randn_like(x)))
        h = h * (1 + 0.1 * torch.rand(h.shape, dtype=h.dtype)) + 0.1 * torch.randn(8, dtype=h.dtype)
        return self.head(h * torch.bernoulli(torch.full_like(h, 0.9)))


class Several(nn.Module):
    """Several inputs, by position or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.other, self.head = nn.Linear(6, 8), nn.Embedding(11, 8), nn.Linear(8, 3)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        return self.head(torch.relu(self.trunk(dense)) + self.other(sparse).sum(1))


class Scaled(nn.Module):
    """Two heads in a list, one of them bilinear, times a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Bilinear(6, 6, 3)])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        linear, bilinear = self.heads
        return F.log_softmax(self.scale * (linear(x) + bilinear(x, x)), -1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Softplus(),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def frozen() -> nn.Module:
    """A frozen layer, and a BatchNorm that is left in evaluation mode."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    model[1].eval()
    return model


def alpha() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(16, 3))


def dense(*layers: nn.Module, width: int = 3) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(width))


def materialised(make: Callable[[], nn.Module], inputs: Inputs) -> Callable[[], nn.Module]:
    """A factory whose lazy layers have their sizes."""

    def build() -> nn.Module:
        model = make()
        with torch.random.fork_rng():
            model.eval()(inputs(torch.Generator().manual_seed(0)))
        return model.train()

    return build


def layers(inputs: Inputs, *kinds: Callable[[], nn.Module], **options: Any) -> Case:
    """A case of layers in a row, with a linear layer at the end."""
    return Case(materialised(lambda: dense(*(kind() for kind in kinds)), inputs), inputs, **options)


CASES: dict[str, Case] = {
    "linear": Case(mlp, normal(6)),
    "linear regression": Case(
        lambda: nn.Sequential(nn.Linear(6, 16), nn.ELU(), nn.Linear(16, 2)), normal(6), "mse"
    ),
    "bilinear and a scalar": Case(Scaled, normal(6), "nll"),
    "conv1d": layers(normal(2, 12), lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1), nn.GELU),
    "conv2d": Case(cnn, normal(2, 8, 8)),
    "conv2d grouped": layers(
        normal(4, 6, 6), lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2, padding="same", bias=False), nn.GELU
    ),
    "conv3d": layers(normal(2, 4, 4, 4), lambda: nn.Conv3d(2, 3, 2), nn.Tanh),
    "conv transposed 2d": layers(
        normal(3, 4, 4), lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), nn.GELU
    ),
    "batch norm 1d": layers(
        normal(6),
        lambda: nn.Linear(6, 8),
        lambda: nn.BatchNorm1d(8),
        nn.Tanh,
        ignored=("0.bias", "1.running_mean"),
    ),
    "batch norm 2d": layers(
        normal(2, 6, 6),
        lambda: nn.Conv2d(2, 4, 3),
        lambda: nn.BatchNorm2d(4, momentum=0.3),
        nn.GELU,
        ignored=("0.bias", "1.running_mean"),
    ),
    "layer norm": layers(normal(6), lambda: nn.Linear(6, 8), lambda: nn.LayerNorm(8), nn.GELU),
    "group norm": layers(normal(2, 6, 6), lambda: nn.Conv2d(2, 4, 3), lambda: nn.GroupNorm(2, 4), nn.GELU),
    "instance norm": layers(
        normal(2, 6, 6),
        lambda: nn.Conv2d(2, 4, 3),
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.GELU,
        ignored=("0.bias", "1.running_mean"),
    ),
    "rms norm": layers(normal(6), lambda: nn.Linear(6, 8), lambda: nn.RMSNorm(8), nn.GELU),
    "dropout": layers(
        normal(6), lambda: nn.Dropout(0.1), lambda: nn.Linear(6, 16), nn.Tanh, lambda: nn.Dropout(0.5)
    ),
    "dropout 2d": layers(normal(2, 6, 6), lambda: nn.Conv2d(2, 4, 3), nn.GELU, lambda: nn.Dropout2d(0.3)),
    "alpha dropout": Case(alpha, normal(6)),
    "embedding": layers(tokens(5), lambda: nn.Embedding(11, 6, padding_idx=0)),
    "attention": Case(lambda: Attention(0.0, False), tokens(5), ignored=("attention.in_proj_bias",)),
    "attention with dropout": Case(lambda: Attention(0.3, True), tokens(5), ignored=("attention.in_proj_bias",)),
    "scaled dot product": Case(ScaledDotProduct, normal(5, 8), ignored=("qkv.bias",)),
    "encoder layer": Case(lambda: Encoder(False), normal(5, 8), ignored=("layer.self_attn.in_proj_bias",)),
    "encoder layer, causal": Case(
        lambda: Encoder(True, norm_first=True), normal(5, 8), ignored=("layer.self_attn.in_proj_bias",)
    ),
    "lstm": Case(lambda: Recurrent(nn.LSTM), normal(3, 4)),
    "lstm, both ways": Case(
        lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True),
        normal(3, 4),
    ),
    "gru": Case(lambda: Recurrent(nn.GRU, bidirectional=True), normal(3, 4)),
    "rnn": Case(lambda: Recurrent(nn.RNN, num_layers=2, dropout=0.2, batch_first=True, bias=False), normal(3, 4)),
    "rnn, relu": Case(lambda: Recurrent(nn.RNN, nonlinearity="relu"), normal(3, 4)),
    "lstm cell": Case(lambda: CellLoop(nn.LSTMCell), normal(3, 4)),
    "gru cell": Case(lambda: CellLoop(nn.GRUCell), normal(3, 4)),
    "prelu": layers(normal(6), lambda: nn.Linear(6, 8), lambda: nn.PReLU(8), lambda: nn.Linear(8, 8), nn.PReLU),
    "tied weights": Case(Tied, tokens(5, 3)),
    "frozen part": Case(frozen, normal(6)),
    "noise in forward": Case(Noisy, normal(6)),
    "average pooling": layers(normal(2, 8, 8), lambda: nn.Conv2d(2, 4, 3), nn.GELU, lambda: nn.AvgPool2d(2)),
    "adaptive pooling": layers(
        normal(2, 8, 8),
        lambda: nn.Conv2d(2, 4, 3),
        nn.GELU,
        lambda: nn.AdaptiveAvgPool2d(2),
        lambda: nn.AdaptiveMaxPool2d(1),
    ),
    "residual": Case(Residual, normal(8)),
    "inputs in a tuple": Case(Several, lambda generator: (normal(6)(generator), tokens(4)(generator))),
    "inputs in a dict": Case(
        Several, lambda generator: {"sparse": tokens(4)(generator), "dense": normal(6)(generator)}
    ),
}


def assert_same_as_alone(
    case: Case,
    optimizer: str,
    hyper: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    *,
    lr: float,
    batch_size: int = EVEN,
    ignoring: tuple[str, ...] = (),
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = map_floats(case.inputs(generator), dtype)
    y: Tensor = torch.randint(0, 3, (ROWS,), generator=generator)
    if case.loss == "mse":
        y = torch.randn(ROWS, 2, generator=generator).to(dtype)
    lrs = [lr * 3, lr, lr / 3]

    fleet = mf.Fleet.build(lambda: case.model().to(dtype), 3, seed=5)
    how: dict[str, Any] = {"epochs": EPOCHS, "batch_size": batch_size}
    expected = testing.alone(
        fleet["1"], "1", (x, y), seed=5, optimizer=optimizer, loss=case.loss, lr=lr, **how, **hyper
    )
    moved, _ = testing.largest_difference(fleet["1"], expected)
    fleet.compile(optimizer, case.loss, lr=mf.each(lrs), **hyper)
    history = fleet.fit((x, y), strategy="fused", progress=False, **how)

    assert not history.failed
    assert moved > 1e-2  # the comparison is of trained weights
    difference, where = testing.largest_difference(fleet["1"], expected, ignoring=ignoring)
    assert difference <= TOLERANCE[dtype], where


def map_floats(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, dict):
        return {name: map_floats(value, dtype) for name, value in x.items()}
    if isinstance(x, tuple):
        return tuple(map_floats(value, dtype) for value in x)
    return x.to(dtype) if x.is_floating_point() else x


# With a short batch at the end of an epoch, which is a second program to trace; so not for all.
SHORT = ("linear", "conv2d", "batch norm 2d", "dropout", "embedding", "attention with dropout", "lstm")


@pytest.mark.parametrize("kind", CASES)
def test_layers_with_sgd(kind: str) -> None:
    batch_size = UNEVEN if kind in SHORT else EVEN
    assert_same_as_alone(
        CASES[kind], "sgd", {"momentum": 0.9, "weight_decay": 1e-3}, lr=0.02, batch_size=batch_size
    )


# Those with tensors to ignore, and those whose weights are shared, sparse or not trained. What an optimizer does
# in float32 with other weights is in `test_optimizers`.
@pytest.mark.parametrize(
    "kind", [*(kind for kind, case in CASES.items() if case.ignored), "embedding", "tied weights", "frozen part"]
)
def test_layers_with_adamw(kind: str) -> None:
    case = CASES[kind]
    assert_same_as_alone(case, "adamw", {"weight_decay": 0.1}, lr=0.003, ignoring=case.ignored)


@pytest.mark.parametrize("kind", CASES)
def test_layers_in_float64(kind: str) -> None:
    assert_same_as_alone(CASES[kind], "adamw", {}, torch.float64, lr=0.003)


OPTIMIZERS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "sgd": ("sgd", 0.05, {}),
    "sgd, dampened": ("sgd", 0.05, {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01}),
    "sgd, nesterov": ("sgd", 0.02, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgd, maximize": ("sgd", 0.005, {"maximize": True}),
    "adam": ("adam", 0.003, {"betas": (0.8, 0.99), "weight_decay": 0.01}),
    "adam, amsgrad": ("adam", 0.003, {"amsgrad": True}),
    "adam, decoupled": ("adam", 0.003, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamw": ("adamw", 0.003, {"weight_decay": 0.1, "eps": 1e-6}),
    "adamw, amsgrad": ("adamw", 0.003, {"amsgrad": True}),
    "rmsprop": ("rmsprop", 0.001, {"alpha": 0.9, "weight_decay": 0.01}),
    "rmsprop, centered": ("rmsprop", 0.001, {"centered": True, "momentum": 0.5, "eps": 1e-5}),
    "adagrad": ("adagrad", 0.01, {"lr_decay": 0.01, "initial_accumulator_value": 0.1, "weight_decay": 0.01}),
    "adadelta": ("adadelta", 1.0, {"rho": 0.8, "weight_decay": 0.01}),
    "nadam": ("nadam", 0.003, {"momentum_decay": 0.01, "weight_decay": 0.01}),
    "nadam, decoupled": ("nadam", 0.003, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": ("radam", 0.003, {"weight_decay": 0.01}),
    "radam, decoupled": ("radam", 0.003, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamax": ("adamax", 0.003, {"weight_decay": 0.01}),
    "lion": ("lion", 0.001, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers(kind: str) -> None:
    """On weights of four axes, two and one."""
    optimizer, lr, hyper = OPTIMIZERS[kind]
    assert_same_as_alone(CASES["conv2d"], optimizer, hyper, lr=lr)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_in_float64(kind: str) -> None:
    optimizer, lr, hyper = OPTIMIZERS[kind]
    assert_same_as_alone(CASES["linear"], optimizer, hyper, torch.float64, lr=lr)
