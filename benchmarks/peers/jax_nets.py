"""The networks of the rows by hand in JAX: the same arithmetic as `benchmarks.nets`, weights `(in, out)`."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.rows import RECURRENT_INPUT, TOKENS, VOCABULARY, Row

WIDTH, HEADS, HIDDEN = 32, 4, 64

Params = dict[str, Any]
Forward = Callable[[Params, Array], Array]


def linear(params: Params, x: Array) -> Array:
    # One flat product per member: XLA is some 15 % slower with the leading axes left apart.
    flat = x.reshape(-1, x.shape[-1]) @ params["w"] + params["b"]
    return flat.reshape(*x.shape[:-1], -1)


def layer_norm(params: Params, x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * params["w"] + params["b"]


def mlp(params: Params, x: Array) -> Array:
    for layer in params["layers"][:-1]:
        x = jax.nn.relu(linear(layer, x))
    return linear(params["layers"][-1], x)


def convolve(params: Params, x: Array) -> Array:
    """A 3×3 convolution of `x` `(batch, height, width, channel)` with padding 1, as one product of patches.

    `lax.conv` under `vmap` becomes a grouped convolution: no faster alone, 5 × slower in the epoch's loop.
    """
    _, height, width, _ = x.shape
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifts = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return linear(params, jnp.concatenate(shifts, -1))


def pool(x: Array) -> Array:
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max((2, 4))


def cnn(params: Params, x: Array) -> Array:
    x = jnp.moveaxis(x, 1, -1)
    x = pool(jax.nn.relu(convolve(params["first"], x)))
    x = pool(jax.nn.relu(convolve(params["second"], x)))
    return linear(params["head"], x.reshape(len(x), -1))


def attention(params: Params, x: Array) -> Array:
    batch, tokens, width = x.shape
    split = linear(params["qkv"], x).reshape(batch, tokens, 3, HEADS, width // HEADS)
    query, key, value = split[:, :, 0], split[:, :, 1], split[:, :, 2]
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // HEADS) ** -0.5)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape)
    return linear(params["out"], mixed)


def transformer(params: Params, tokens: Array) -> Array:
    x = params["embedding"][tokens] + params["positions"]
    for layer in params["layers"]:
        x = layer_norm(layer["norm1"], x + attention(layer, x))
        x = layer_norm(layer["norm2"], x + linear(layer["down"], jax.nn.relu(linear(layer["up"], x))))
    return linear(params["head"], x.mean(1))


def lstm(params: Params, x: Array) -> Array:
    inputs = jnp.moveaxis(linear(params["input"], x), 1, 0)  # (step, batch, 4 × width), all steps at once

    def step(carry: tuple[Array, Array], given: Array) -> tuple[tuple[Array, Array], None]:
        hidden, cell = carry
        gate_in, gate_forget, change, gate_out = jnp.split(given + linear(params["hidden"], hidden), 4, -1)
        cell = jax.nn.sigmoid(gate_forget) * cell + jax.nn.sigmoid(gate_in) * jnp.tanh(change)
        return (jax.nn.sigmoid(gate_out) * jnp.tanh(cell), cell), None

    start = jnp.zeros((len(x), WIDTH))
    (hidden, _), _ = lax.scan(step, (start, start), inputs)
    return linear(params["head"], hidden)


FORWARD: dict[str, Forward] = {"mlp": mlp, "cnn": cnn, "transformer": transformer, "lstm": lstm}


def init(row: Row, key: Array) -> Params:
    """Fresh weights of one member."""
    keys = iter(jax.random.split(key, 32))

    def uniform(fan_in: int, *shape: int) -> Array:
        return jax.random.uniform(next(keys), shape, minval=-(fan_in**-0.5), maxval=fan_in**-0.5)

    def dense(inputs: int, outputs: int) -> Params:
        return {"w": uniform(inputs, inputs, outputs), "b": uniform(inputs, outputs)}

    def norm() -> Params:
        return {"w": jnp.ones(WIDTH), "b": jnp.zeros(WIDTH)}

    def block() -> Params:
        return {
            "qkv": dense(WIDTH, 3 * WIDTH),
            "out": dense(WIDTH, WIDTH),
            "up": dense(WIDTH, HIDDEN),
            "down": dense(HIDDEN, WIDTH),
            "norm1": norm(),
            "norm2": norm(),
        }

    if row.net == "mlp":
        return {"layers": [dense(*widths) for widths in pairwise(row.widths)]}
    if row.net == "cnn":
        return {"first": dense(9, 8), "second": dense(9 * 8, 16), "head": dense(16 * 7 * 7, row.classes)}
    if row.net == "lstm":
        # As in torch, every bound is that of the hidden width.
        return {
            "input": {"w": uniform(WIDTH, RECURRENT_INPUT, 4 * WIDTH), "b": uniform(WIDTH, 4 * WIDTH)},
            "hidden": dense(WIDTH, 4 * WIDTH),
            "head": dense(WIDTH, row.classes),
        }
    return {
        "embedding": jax.random.normal(next(keys), (VOCABULARY, WIDTH)),
        "positions": jax.random.normal(next(keys), (TOKENS, WIDTH)) * 0.02,
        "layers": [block(), block()],
        "head": dense(WIDTH, row.classes),
    }
