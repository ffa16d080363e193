"""`jax.vmap` and `jax.jit` by hand: weights stacked, Adam written out, an epoch of everyone in one call."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.peers import Round, serve
from benchmarks.peers.jax_nets import FORWARD, Forward, Params, init
from benchmarks.rows import Row, datasets


class State(NamedTuple):
    """Everything that a step changes; each leaf but `count` has the member as its first axis."""

    params: Params
    first: Params
    second: Params
    count: Array
    loss: Array
    correct: Array


Epoch = Callable[[State, Array, Array, Array, Array], State]


def loss_and_output(forward: Forward, params: Params, x: Array, y: Array) -> tuple[Array, Array]:
    """The mean cross-entropy of one member's batch, and its logits."""
    output = forward(params, x)
    picked = jnp.take_along_axis(jax.nn.log_softmax(output), y[:, None], 1)
    return -picked.mean(), output


def make_epoch(row: Row) -> Epoch:
    """The jitted epoch: for each batch gather, loss and gradient, Adam, and the sums for loss and accuracy.

    It takes the state (donated), the rates `(member,)`, the data, and the order `(step, member, batch)`.
    """
    forward = FORWARD[row.net]

    def gradient(params: Params, x: Array, y: Array, rows: Array) -> tuple[Params, Array, Array]:
        x, y = x[rows], y[rows]
        value_and_grad = jax.value_and_grad(lambda p: loss_and_output(forward, p, x, y), has_aux=True)
        (loss, output), grads = value_and_grad(params)
        return grads, loss * len(rows), (output.argmax(1) == y).sum()

    axis = 0 if row.own_data else None
    gradients = jax.vmap(gradient, (0, axis, axis, 0))

    def step(state: State, rates: Array, x: Array, y: Array, rows: Array) -> State:
        grads, loss, correct = gradients(state.params, x, y, rows)
        count = state.count + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.first, grads)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state.second, grads)
        scale = rates / (1 - 0.9**count)
        root = (1 - 0.999**count) ** -0.5

        def update(p: Array, m: Array, v: Array) -> Array:
            return p - scale.reshape(-1, *(1,) * (p.ndim - 1)) * m / (jnp.sqrt(v) * root + 1e-8)

        params = jax.tree.map(update, state.params, first, second)
        return State(params, first, second, count, state.loss + loss, state.correct + correct)

    def epoch(state: State, rates: Array, x: Array, y: Array, order: Array) -> State:
        state = state._replace(loss=jnp.zeros_like(state.loss), correct=jnp.zeros_like(state.correct))
        return lax.scan(lambda now, rows: (step(now, rates, x, y, rows), None), state, order)[0]

    return jax.jit(epoch, donate_argnums=0)


def start_state(row: Row) -> State:
    """Fresh weights for every member, and Adam at zero."""
    params = jax.vmap(lambda key: init(row, key))(jax.random.split(jax.random.key(0), row.members))
    first, second = jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)
    members = jnp.zeros(row.members)
    return State(params, first, second, jnp.zeros(()), members, members.astype(jnp.int32))


def trainer(row: Row) -> Callable[[], Round]:
    """What trains one round; nothing is compiled yet."""
    data = datasets(row)
    x, y = (np.stack(arrays) for arrays in zip(*data, strict=True)) if row.own_data else data[0]
    x, y, rates = jnp.asarray(x), jnp.asarray(y, jnp.int32), jnp.asarray(row.rates())
    epoch, state = make_epoch(row), start_state(row)
    random = np.random.default_rng(0)
    unshuffled = np.tile(np.arange(row.examples, dtype=np.int32), (row.members, 1))

    def shuffled() -> Array:
        order = random.permuted(unshuffled, axis=1).reshape(row.members, row.steps, row.batch)
        return jnp.asarray(order.swapaxes(0, 1))

    def train_round() -> Round:
        nonlocal state
        for _ in range(row.epochs):  # dispatch is asynchronous: the next shuffle is made while this epoch runs
            state = epoch(state, rates, x, y, shuffled())
        loss = float(state.loss.mean()) / row.examples
        return Round(row.members * row.steps * row.epochs, loss)

    return train_round


def prepare(row: Row) -> Callable[[], Round]:
    train_round = trainer(row)
    train_round()
    return train_round


if __name__ == "__main__":
    serve(prepare)
