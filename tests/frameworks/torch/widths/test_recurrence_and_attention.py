"""Recurrent layers and attention of unequal widths in one lane compute what each member computes alone."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.frameworks.torch.widths.padded import Wide, assert_as_alone, build, data
from torch import Tensor, nn
from torch.nn import functional as F

import modelfleet as mf

Make = Callable[[int], nn.Module]
TOKENS = 6
WIDTHS = [4, 8]
SGD: dict[str, Any] = {"weight_decay": 0.1, "clip_norm": 0.5}
ADAM: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01, **SGD}


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def _recurrent(kind: Any, features: int = 1, **options: Any) -> Make:
    """Return a network that reads its input number by number, and classifies all outputs and last states."""
    directions = 2 if options.get("bidirectional") else 1

    def run(net: Any, x: Tensor) -> Tensor:
        tokens = net.first(x.unsqueeze(-1))
        output, last = net.layer(tokens if options.get("batch_first") else tokens.transpose(0, 1))
        output = output if options.get("batch_first") else output.transpose(0, 1)
        last = last if isinstance(last, Tensor) else torch.cat(last)
        return net.last(torch.cat([output[:, -1], output.mean(1)], -1)) + last.sum((0, 2)).unsqueeze(-1)

    def make(width: int) -> nn.Module:
        parts = {
            "first": nn.Linear(1, features or width),
            "layer": kind(features or width, width, **options),
            "last": nn.Linear(2 * directions * width, 3),
        }
        return Wide(width, parts, run)

    return make


def _first_states(width: int) -> nn.Module:
    """An LSTM whose first states follow from the input."""

    def run(net: Any, x: Tensor) -> Tensor:
        states = tuple(part(x).unsqueeze(0) for part in net.states)
        return net.last(net.lstm(x.T.unsqueeze(-1), states)[0][-1])

    parts = {"states": nn.ModuleList(nn.Linear(6, width) for _ in "hc"), "lstm": nn.LSTM(1, width)}
    return Wide(width, {**parts, "last": nn.Linear(width, 3)}, run)


def _cells(kind: Any) -> Make:
    def run(net: Any, x: Tensor) -> Tensor:
        state = None
        for number in range(x.shape[1]):
            state = net.cell(x[:, number : number + 1], state)
        return net.last(state if isinstance(state, Tensor) else torch.cat(state or (), -1))

    def make(width: int) -> nn.Module:
        states = 2 if kind is nn.LSTMCell else 1
        return Wide(width, {"cell": kind(1, width), "last": nn.Linear(states * width, 3)}, run)

    return make


RECURRENT: dict[str, Make] = {
    "lstm": _recurrent(nn.LSTM, batch_first=True),
    "rnn relu": _recurrent(nn.RNN, nonlinearity="relu", bias=False),
    "two lstms with dropout": _recurrent(nn.LSTM, num_layers=2, dropout=0.3, batch_first=True),
    "padded input": _recurrent(nn.GRU, features=0, num_layers=2),
    "both directions of lstms": _recurrent(
        nn.LSTM, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True
    ),
    "both directions of grus": _recurrent(
        nn.GRU, features=0, num_layers=3, dropout=0.2, bidirectional=True, bias=False
    ),
    "first states": _first_states,
    "lstm cells": _cells(nn.LSTMCell),
    "gru cells": _cells(nn.GRUCell),
}


def _on_tokens(parts: Callable[[int], dict[str, nn.Module]], size: Callable[[int], int], run: Any) -> Make:
    """Return a network that classifies the mean of its input's numbers as tokens `(row, token, size)`."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(run(net, net.first(x.unsqueeze(-1)) + net.position.weight).mean(1))

    def make(width: int) -> nn.Module:
        own = {"first": nn.Linear(1, size(width)), "position": nn.Embedding(TOKENS, size(width))}
        return Wide(width, {**own, **parts(width), "last": nn.Linear(size(width), 3)}, forward)

    return make


def _attention(
    heads: Callable[[int], int], size: Callable[[int], int], call: dict[str, Any] | None = None, **options: Any
) -> Make:
    def run(net: Any, x: Tensor) -> Tensor:
        output, weights = net.layer(x, x, x, **{"need_weights": False, **(call or {})})
        if weights is None:
            return output
        weights = weights.sum(1) if weights.dim() == 4 else weights  # or of each head
        return output * (1 + (weights * weights).sum((1, 2))[:, None, None])

    def parts(width: int) -> dict[str, nn.Module]:
        embed = heads(width) * size(width)
        return {"layer": nn.MultiheadAttention(embed, heads(width), batch_first=True, **options)}

    return _on_tokens(parts, lambda width: heads(width) * size(width), run)


def _other_keys(width: int) -> nn.Module:
    """Attention whose keys and values have sizes of their own."""

    def run(net: Any, x: Tensor) -> Tensor:
        x = net.first(x.unsqueeze(-1))
        keys = net.keys(x)
        return net.last(net.layer(x, keys, net.values(x))[0].mean(1))

    layer = nn.MultiheadAttention(2 * width, 2, kdim=width + 3, vdim=5, batch_first=True)
    parts = {"first": nn.Linear(1, 2 * width), "keys": nn.Linear(2 * width, width + 3), "layer": layer}
    values = nn.Linear(2 * width, 5)
    return Wide(width, {**parts, "values": values, "last": nn.Linear(2 * width, 3)}, run)


def _two(_: int) -> int:
    return 2


def _width(width: int) -> int:
    return width


def _encoder(
    model: Callable[[int], int], hidden: Callable[[int], int], heads: Callable[[int], int], **options: Any
) -> Make:
    def parts(width: int) -> dict[str, nn.Module]:
        layer = nn.TransformerEncoderLayer(
            model(width), heads(width), hidden(width), 0.1, batch_first=True, **options
        )
        return {"layer": nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)}

    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return _on_tokens(parts, model, lambda net, x: net.layer(x, mask=mask, is_causal=True))


def _decoder(width: int) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.layer(x, x.flip(1))

    def parts(width: int) -> dict[str, nn.Module]:
        return {"layer": nn.TransformerDecoderLayer(2 * width, 2, 3 * width, 0.2, batch_first=True)}

    return _on_tokens(parts, lambda width: 2 * width, run)(width)


def _by_hand(width: int) -> nn.Module:
    """Attention as many write it: one projection, divided into parts and heads of unequal sizes."""

    def run(net: Any, x: Tensor) -> Tensor:
        rows, tokens, size = x.shape
        parts = net.project(x).reshape(rows, tokens, 3, 2, size // 2).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        scores = (query @ key.transpose(-2, -1)) / math.sqrt(size // 2)
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).tril() == 0, -math.inf)
        found = F.dropout(scores.softmax(-1), 0.2, net.training) @ value
        return x + net.out(found.transpose(1, 2).contiguous().view(rows, tokens, size))

    def parts(width: int) -> dict[str, nn.Module]:
        return {"project": nn.Linear(2 * width, 6 * width), "out": nn.Linear(2 * width, 2 * width)}

    return _on_tokens(parts, lambda width: 2 * width, run)(width)


def _scaled(**options: Any) -> Make:
    """torch's attention of four heads of unequal sizes; of two for keys, with `enable_gqa`."""
    shared = 2 if options.get("enable_gqa") else 1

    def run(net: Any, x: Tensor) -> Tensor:
        query, key, value = (part(x).unflatten(-1, (-1, net.width)).transpose(1, 2) for part in net.parts)
        rate = 0.2 if net.training else 0.0
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, **options)
        return net.out(found.transpose(1, 2).flatten(2))

    def parts(width: int) -> dict[str, nn.Module]:
        sizes = 4 * width, 4 * width // shared, 4 * width // shared
        projections = nn.ModuleList(nn.Linear(width, size) for size in sizes)
        return {"parts": projections, "out": nn.Linear(4 * width, width)}

    return _on_tokens(parts, _width, run)


CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
ATTENTION: dict[str, Make] = {
    "sizes of heads": _attention(_two, _width, dropout=0.2),
    "numbers of heads": _attention(_width, _two, dropout=0.2),
    "both": _attention(lambda width: width // 4, _width),
    "more keys": _attention(_two, _width, add_bias_kv=True, add_zero_attn=True),
    "weights": _attention(_two, _width, {"need_weights": True}, dropout=0.2),
    "weights of numbers of heads": _attention(_width, _two, {"need_weights": True}, dropout=0.2),
    "weights of each head": _attention(_width, _two, {"need_weights": True, "average_attn_weights": False}),
    "causal": _attention(_width, _two, {"attn_mask": CAUSAL, "is_causal": True}, dropout=0.2),
    "other keys": _other_keys,
    "feed-forward width": _encoder(lambda _: 4, lambda width: 3 * width, _two),
    "encoder": _encoder(lambda width: 2 * width, lambda width: 3 * width, _two),
    "encoder of heads": _encoder(lambda width: 2 * width, _two, _width, norm_first=True, activation="gelu"),
    "decoder": _decoder,
    "by hand": _by_hand,
    "torch's own": _scaled(),
    "torch's own, grouped": _scaled(enable_gqa=True),
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_are_padded_gate_by_gate(kind: str) -> None:
    assert_as_alone(RECURRENT[kind], WIDTHS, **ADAM)


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_is_padded_head_by_head(kind: str) -> None:
    # Not by Adam, which follows the rounding of a gradient of zero: the bias of keys has one.
    assert_as_alone(ATTENTION[kind], WIDTHS, **SGD)


def test_transformers_without_biases_by_other_optimizers() -> None:
    make = _encoder(lambda width: 2 * width, lambda width: 3 * width, _two, bias=False)
    assert_as_alone(make, [4, 8, 4], **{**ADAM, "optimizer": mf.each(["adamw", "adam", "rmsprop"])})


RATES = {4: 0.1, 8: 0.3}
OWN_RATES: dict[str, Make] = {
    "lstm": lambda width: _recurrent(nn.LSTM, num_layers=2, dropout=RATES[width], bidirectional=True)(width),
    "attention": lambda width: _attention(_width, _two, dropout=RATES[width])(width),
    "weights": lambda width: _attention(_two, _width, {"need_weights": True}, dropout=RATES[width])(width),
}


@pytest.mark.parametrize("kind", OWN_RATES)
def test_rates_differ_beside_the_widths(kind: str) -> None:
    assert_as_alone(OWN_RATES[kind], WIDTHS)


@pytest.mark.parametrize("kind", ["both directions of lstms", "encoder"])
def test_in_float32(kind: str) -> None:
    torch.set_default_dtype(torch.float32)
    assert_as_alone({**RECURRENT, **ATTENTION}[kind], WIDTHS)


def _projected(width: int) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.last(net.lstm(x.unsqueeze(-1))[0][:, -1])

    return Wide(width, {"lstm": nn.LSTM(1, width, proj_size=2, batch_first=True), "last": nn.Linear(2, 3)}, run)


def _longer_axes(width: int) -> nn.Module:
    """More heads for one width, and larger ones for another."""
    return _attention(lambda w: {4: 8, 8: 2}[w], lambda w: {4: 1, 8: 12}[w])(width)


def _wider_parts(width: int) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        heads = 4 if net.width == 4 else 2
        parts = net.first(x).view(len(x), heads, -1)
        return net.last((parts * torch.softmax(parts, 1)).flatten(1))

    return Wide(width, {"first": nn.Linear(6, 2 * width), "last": nn.Linear(2 * width, 3)}, run)


APART = {
    "heads": (_longer_axes, "more heads for one width, and larger ones for another"),
    "longer axes": (_wider_parts, "makes an axis of 2 for the widest member, and of 4 for another"),
}


@pytest.mark.parametrize("kind", APART)
def test_what_has_no_rule_says_why_and_has_lanes_of_its_own(kind: str) -> None:
    make, reason = APART[kind]
    given = data()
    with pytest.raises(mf.StrategyError, match=reason):
        build(make, WIDTHS).fit(given, batch_size=8, strategy="fused", progress=False)
    fleet = build(make, [4, 8] * 4)
    fleet.fit(given, epochs=1, batch_size=8, progress=False)
    lanes = fleet.plan(given, batch_size=8).lanes
    assert [len(lane.members) for lane in lanes] == [4, 4]


def test_heads_of_one_sum_are_groups_by_their_number() -> None:
    """Padding would compute as many heads as the one has, of the size that the other has."""
    counts = [2, 4, 2, 4, 2, 4]

    def make(width: int) -> nn.Module:
        return _attention(_width, lambda count: 8 // count)(width)

    fleet = build(make, counts)
    fleet.fit(data(), epochs=1, batch_size=8, progress=False)
    lanes = fleet.plan(data(), batch_size=8).lanes
    assert [lane.members for lane in lanes] == [("0", "2", "4"), ("1", "3", "5")]
    assert all(lane.fused for lane in lanes)


def test_projections_of_lstms_are_not_fused() -> None:
    fleet = build(_projected, WIDTHS)
    history = fleet.fit(data(), epochs=1, batch_size=8, progress=False)
    assert not any(lane.fused and len(lane.members) > 1 for lane in fleet.plan(data(), batch_size=8).lanes)
    assert np.isfinite([history[name]["loss"][-1] for name in fleet.names]).all()
