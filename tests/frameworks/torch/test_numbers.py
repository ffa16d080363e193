"""Members that differ in numbers: fused in one lane, and each as it is alone."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.frameworks.torch import numbers
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf


def mlp(*layers: nn.Module, features: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 8), *layers, nn.Linear(8, 3))


class Forward(nn.Module):
    """Calls a function of its hidden layer and a number."""

    def __init__(self, number: Any, function: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.number = number
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x), self.number))


LAYERS: dict[str, tuple[Callable[[Any], nn.Module], list[Any]]] = {
    "dropout": (nn.Dropout, [0.1, 0.5, 0.3, 0.1]),
    "dropout of 0 and 1": (nn.Dropout, [0.0, 0.5, 1.0]),
    "dropout of integers": (nn.Dropout, [0, 0.5, 1]),
    "dropout in place": (lambda p: nn.Dropout(p, inplace=True), [0.0, 0.5, 0.2]),
    "alpha dropout": (nn.AlphaDropout, [0.1, 0.5, 0.0, 1.0]),
    "leaky relu": (nn.LeakyReLU, [0.01, 0.3, -0.1]),
    "elu": (nn.ELU, [0.5, 1.0, 2.0]),
    "celu": (nn.CELU, [0.5, 1.0, 2.0]),
    "softplus": (nn.Softplus, [0.5, 1.0, 20.0]),
    "hardshrink": (nn.Hardshrink, [0.1, 0.5]),
    "softshrink": (nn.Softshrink, [0.1, 0.5, 0.0]),
    "threshold": (lambda t: nn.Threshold(t, -t), [0.1, 0.5]),
    "hardtanh": (lambda a: nn.Hardtanh(-a, a), [0.2, 1.0]),
    "rrelu": (lambda a: nn.RReLU(a, 2 * a), [0.1, 0.3]),
    "layer norm": (lambda eps: nn.LayerNorm(8, eps), [1e-5, 0.5]),
    "rms norm": (lambda eps: nn.RMSNorm(8, eps), [1e-5, 0.5]),
    "group norm": (lambda eps: nn.GroupNorm(2, 8, eps), [1e-5, 0.5]),
    "batch norm's eps": (lambda eps: nn.Sequential(nn.Tanh(), nn.BatchNorm1d(8, eps)), [1e-5, 0.5]),
    "batch norm's momentum": (
        lambda m: nn.Sequential(nn.Tanh(), nn.BatchNorm1d(8, momentum=m)),
        [0.1, 0.5, 0.0, 1.0],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_a_number_per_member(name: str) -> None:
    layer, values = LAYERS[name]
    numbers.check(lambda value: mlp(layer(value)), values)


class Sequences(nn.Module):
    """A layer of rows of a sequence."""

    def __init__(self, layer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        return self.last((found[0] if isinstance(found, tuple) else found).mean(1))


class Attention(nn.Module):
    """Attention with its weights, or by torch's kernel, at a rate and a scale."""

    def __init__(self, number: float, way: str) -> None:
        super().__init__()
        self.way, self.number = way, number
        self.mixed = nn.MultiheadAttention(8, 2, dropout=number, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "weights":
            return self.mixed(x, x, x)[0]
        if self.way == "masked":
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            return self.mixed(x, x, x, attn_mask=mask, need_weights=False)[0]
        rate = self.number if self.training else 0.0
        causal = self.way == "causal"
        return F.scaled_dot_product_attention(x, x, x, dropout_p=rate, is_causal=causal, scale=self.number + 0.1)


SEQUENCES: dict[str, tuple[Callable[[Any], nn.Module], list[Any]]] = {
    "transformer": (lambda p: nn.TransformerEncoderLayer(8, 2, 8, p, batch_first=True), [0.1, 0.5, 0.0]),
    "gelu transformer, norm first": (
        lambda p: nn.TransformerEncoderLayer(8, 2, 8, p, "gelu", batch_first=True, norm_first=True),
        [0.1, 0.3],
    ),
    **{
        way: (functools.partial(Attention, way=way), [0.1, 0.4, 0.0])
        for way in ("weights", "masked", "causal", "")
    },
    "lstm": (lambda p: nn.LSTM(8, 8, 2, dropout=p, batch_first=True), [0.1, 0.5, 0.0]),
    "gru in both directions": (
        lambda p: nn.GRU(8, 4, 3, dropout=p, batch_first=True, bidirectional=True),
        [0.1, 0.5],
    ),
    "dropout1d": (nn.Dropout1d, [0.1, 0.5, 1.0]),
    "feature alpha dropout": (nn.FeatureAlphaDropout, [0.1, 0.5]),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_layers_of_sequences_with_a_number_per_member(name: str) -> None:
    layer, values = SEQUENCES[name]
    numbers.check(lambda value: Sequences(layer(value)), values, features=(5, 8))


IMAGES: dict[str, tuple[Callable[[Any], nn.Module], list[Any]]] = {
    "dropout2d": (nn.Dropout2d, [0.1, 0.5, 0.0]),
    "instance norm": (lambda eps: nn.InstanceNorm2d(8, eps, affine=True), [1e-5, 0.5]),
    "batch norm": (lambda m: nn.BatchNorm2d(8, momentum=m, eps=m / 100), [0.1, 0.5]),
}


@pytest.mark.parametrize("name", IMAGES)
def test_layers_of_images_with_a_number_per_member(name: str) -> None:
    layer, values = IMAGES[name]

    def make(value: Any) -> nn.Module:
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(nn.Conv2d(2, 8, 3), nn.Tanh(), layer(value), pool, nn.Linear(8, 3))

    # By SGD: Adam makes steps of one size from gradients that are almost 0, and from their rounding.
    numbers.check(make, values, features=(2, 5, 5), optimizer="sgd", lr=0.1)


FUNCTIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "times": lambda x, a: x * a,
    "reversed times": lambda x, a: a * x,
    "plus and minus": lambda x, a: (x + a) - (a - x) + (1 - a),
    "divided": lambda x, a: x / a + a / (x.abs() + 1),
    "power": lambda x, a: (x.abs() + 0.1) ** a + a ** torch.tanh(x),
    "floor and modulo": lambda x, a: x + (x.detach() // a) * 0.1 + x % a,
    "in place": lambda x, a: x.clone().mul_(a).add_(a).sub_(0.1).div_(a),
    "operators in place": lambda x, a: _in_place(x, a),
    "alpha": lambda x, a: torch.add(x, x.tanh(), alpha=a) - torch.sub(x, x.sin(), alpha=a),
    "comparisons": lambda x, a: x * (x > a) + x.sin() * (x <= a) + x * x.gt(-a),
    "clamp": lambda x, a: x.clamp(-a, a) + x.clamp(min=a) + torch.clamp(x, max=a) + x.clamp(-a, 0.5),
    "clamp_min and clamp_max": lambda x, a: x.clamp_min(a) - x.clamp_max(a),
    "where": lambda x, a: torch.where(x > 0, x, a) + torch.where(x > 0, a, x),
    "masked_fill": lambda x, a: x.masked_fill(x > 0, a),
    "lerp": lambda x, a: torch.lerp(x, x.tanh(), a),
    "addcmul": lambda x, a: torch.addcmul(x, x, x, value=a) + x.addcdiv(x, x.abs() + 1, value=a),
    "full": lambda x, a: x + torch.full((8,), a, dtype=x.dtype) + torch.full_like(x, a) + x.new_full((8,), a),
    "tensor": lambda x, a: x * torch.tensor(a, dtype=x.dtype) + torch.tensor([a, 1.0] * 4, dtype=x.dtype),
    "as_tensor": lambda x, a: x * torch.as_tensor(a) + x.new_tensor([a, a, 2.0, 1.0] * 2),
    "softmax at a temperature": lambda x, a: torch.softmax(x / a, -1),
    "gumbel softmax": lambda x, a: F.gumbel_softmax(x, tau=a),
    "hard gumbel softmax": lambda x, a: F.gumbel_softmax(x, tau=a, hard=True),
    "normalize": lambda x, a: F.normalize(x, eps=a),
    "cosine similarity": lambda x, a: x * F.cosine_similarity(x, x.sin(), eps=a).unsqueeze(1),
    "pairwise distance": lambda x, a: x * F.pairwise_distance(x, x.sin(), eps=a).unsqueeze(1),
    "noise": lambda x, a: x + a * torch.randn_like(x),
    "normal_": lambda x, a: x + torch.empty_like(x).normal_(a, a),
    "uniform_": lambda x, a: x + torch.empty_like(x).uniform_(-a, a),
    "bernoulli_": lambda x, a: x * torch.empty_like(x).bernoulli_(a / 4),
    "normal": lambda x, a: x + torch.normal(a, 2 * a, (8,), dtype=x.dtype),
    "an integer tensor": lambda x, a: x + (x > 0).long() * a,
    "a number that python computes": lambda x, a: x * (1 - a) / (1 + a**2),
    "a list of numbers": lambda x, a: sum((x.sin() * b for b in [a, a / 2, 0.1]), x),
    "unused": lambda x, a: x,
}


def _in_place(x: Tensor, a: float) -> Tensor:
    y = x.clone()
    y *= a
    y += a
    y /= a
    y -= a
    return y


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_with_a_number_per_member(name: str) -> None:
    numbers.check(lambda number: Forward(number, FUNCTIONS[name]), [0.5, 1.5, 0.7])


INTEGERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "temperature": lambda x, a: torch.softmax(x / a, -1),
    "arithmetic": lambda x, a: x * a + a - (a / (x.abs() + 1)) + x.clamp(max=a) + x * (x > a) + x.sin() ** a,
    "functions": lambda x, a: F.softplus(x, a) + F.elu(x, a) + F.huber_loss(x, x.sin(), delta=a),
    "new tensors": lambda x, a: x * x.new_full((8,), a) + torch.full((8,), a, dtype=x.dtype),
    "tensors like others": lambda x, a: x * torch.full_like(x, a),
    "where": lambda x, a: torch.where(x > 0, x, a) + x.masked_fill(x > 0, a),
    "divided integers": lambda x, a: x + (x > 0).long() / a,
}


@pytest.mark.parametrize("name", INTEGERS)
def test_functions_with_an_integer_per_member(name: str) -> None:
    numbers.check(lambda number: Forward(number, INTEGERS[name]), [1, 2, 4])


def scaled(scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: scale * F.cross_entropy(output, target)


LOSSES: dict[str, list[Any]] = {
    "label smoothing": [nn.CrossEntropyLoss(label_smoothing=s) for s in (0.0, 0.1, 0.5)],
    "label smoothing without torch's default": [nn.CrossEntropyLoss(label_smoothing=s) for s in (0.1, 0.2)],
    "class weights": [nn.CrossEntropyLoss(torch.tensor(w).double()) for w in ([1.0, 2, 3], [3.0, 1, 0.5])],
    "class weights and smoothing": [
        nn.CrossEntropyLoss(torch.tensor(w).double(), label_smoothing=s)
        for w, s in (([1.0, 2, 3], 0.1), ([3.0, 1, 0.5], 0.3))
    ],
    "ignored labels": [nn.CrossEntropyLoss(ignore_index=1, label_smoothing=s) for s in (0.1, 0.3)],
    "summed": [nn.CrossEntropyLoss(reduction="sum", label_smoothing=s) for s in (0.1, 0.3)],
    "partials": [functools.partial(F.cross_entropy, label_smoothing=s) for s in (0.1, 0.3)],
    "class weights of nll": [nn.NLLLoss(torch.tensor(w).double()) for w in ([1.0, 2, 3], [3.0, 1, 0.5])],
    "closures": [scaled(scale) for scale in (0.5, 2.0)],
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_with_numbers_per_member(name: str) -> None:
    losses = LOSSES[name]
    numbers.check(lambda _: mlp(nn.Tanh()), losses, loss=mf.each(losses))


VALUE_LOSSES: dict[str, list[Any]] = {
    "huber": [nn.HuberLoss(delta=d) for d in (0.3, 1.0, 2.0)],
    "huber with integers": [nn.HuberLoss(delta=d) for d in (1, 2)],
    "smooth l1": [nn.SmoothL1Loss(beta=b) for b in (0.3, 1.0, 0.0)],
    "poisson": [nn.PoissonNLLLoss(log_input=False, eps=e) for e in (9.0, 8.0)],
    "bce": [nn.BCEWithLogitsLoss(pos_weight=torch.tensor([w, 1.0, 2.0]).double()) for w in (0.5, 2.0)],
}


@pytest.mark.parametrize("name", VALUE_LOSSES)
def test_losses_of_values_with_numbers_per_member(name: str) -> None:
    losses, (x, y) = VALUE_LOSSES[name], numbers.rows()
    data = (x, F.one_hot(y, 3).double())
    numbers.check(lambda _: mlp(nn.Tanh()), losses, data=data, loss=mf.each(losses))


def objective(weight: float, margin: float) -> Callable[[nn.Module, Any], Any]:
    def run(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        output = model(x)
        apart = F.margin_ranking_loss(output[:, 0], output[:, 1], torch.ones_like(output[:, 0]), margin=margin)
        return F.cross_entropy(output, y) + weight * apart, {"apart": apart, "weight": weight}

    return run


def test_objectives_with_numbers_per_member() -> None:
    own = [objective(0.1, 0.5), objective(2.0, 0.1), objective(0.0, 1.0)]
    numbers.check(lambda _: mlp(nn.Tanh()), own, objective=mf.each(own))


def test_models_and_losses_differ_at_once() -> None:
    losses = [nn.CrossEntropyLoss(label_smoothing=s) for s in (0.1, 0.1, 0.3, 0.3)]
    numbers.check(lambda p: mlp(nn.Dropout(p)), [0.1, 0.4, 0.1, 0.4], loss=mf.each(losses), metrics=["accuracy"])
