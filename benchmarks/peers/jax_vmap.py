"""`jax.vmap` and `jax.jit` by hand: weights stacked, Adam written out, one jitted step for all members."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.peers import Round, serve
from benchmarks.peers.jax_nets import FORWARD, Forward, Params, init
from benchmarks.rows import Row, datasets


class State(NamedTuple):
    """Everything that a step changes; each leaf has the member as its first axis, but for `step`."""

    params: Params
    first: Params
    second: Params
    step: Array
    loss: Array
    correct: Array


def loss_and_output(forward: Forward, params: Params, x: Array, y: Array) -> tuple[Array, Array]:
    """The mean cross-entropy of one member's batch, and its logits."""
    output = forward(params, x)
    picked = jnp.take_along_axis(jax.nn.log_softmax(output), y[:, None], 1)
    return -picked.mean(), output


def make_step(row: Row) -> Callable[[State, Array, Array, Array, Array], State]:
    """The jitted step: gather, loss and gradient, Adam, and the sums for loss and accuracy."""
    forward = FORWARD[row.net]

    def gradient(params: Params, x: Array, y: Array, rows: Array) -> tuple[Params, Array, Array]:
        x, y = x[rows], y[rows]
        (loss, output), grads = jax.value_and_grad(lambda p: loss_and_output(forward, p, x, y), has_aux=True)(params)
        return grads, loss * len(rows), (output.argmax(1) == y).sum()

    axis = 0 if row.own_data else None
    gradients = jax.vmap(gradient, (0, axis, axis, 0))

    def step(state: State, rates: Array, x: Array, y: Array, rows: Array) -> State:
        grads, loss, correct = gradients(state.params, x, y, rows)
        count = state.step + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.first, grads)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state.second, grads)
        scale = rates / (1 - 0.9**count)
        root = (1 - 0.999**count) ** -0.5

        def update(p: Array, m: Array, v: Array) -> Array:
            return p - scale.reshape(-1, *(1,) * (p.ndim - 1)) * m / (jnp.sqrt(v) * root + 1e-8)

        params = jax.tree.map(update, state.params, first, second)
        return State(params, first, second, count, state.loss + loss, state.correct + correct)

    return jax.jit(step, donate_argnums=0)
