"""Reference for JAX members: one model, trained alone by a loop as a user would write it.

The loop shares as little as possible with the fused path, so that an error there is not repeated here.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from modelfleet.testing.reference import Training
from modelfleet.types import Arrays, Data, Model, Tree

LossOf = Callable[[Model, Callable[[Tree], Tree], Tree], jax.Array]
"""Loss of a model, a function that calls it on inputs, and a batch."""

LOSSES: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "cross_entropy": lambda o, y: optax.softmax_cross_entropy_with_integer_labels(o, y).mean(),
    "mse": lambda o, y: optax.squared_error(o, y).mean(),
    "mae": lambda o, y: jnp.abs(o - y).mean(),
    "huber": lambda o, y: optax.huber_loss(o, y).mean(),
    "bce_with_logits": lambda o, y: optax.sigmoid_binary_cross_entropy(o, y).mean(),
}


def alone(model: Model, data: Data, training: Training) -> Model:
    """Return a trained copy of `model` (see `modelfleet.testing.alone`). Every step runs its Python.

    Raises:
        ValueError: The precision is not float32.
    """
    if training.precision != "float32":
        raise ValueError(f"a JAX model is trained alone in float32 only, not in {training.precision}.")
    update = _transformation(training)
    batches = (batch for epoch in range(training.epochs) for batch in _batches(data, epoch, training))

    def loss_of(model: Model, call: Callable[[Tree], Tree], batch: Tree) -> jax.Array:
        if training.objective is not None:
            result = training.objective(model, batch)
            return result[0] if isinstance(result, tuple) else result
        x, target = batch
        loss = LOSSES[training.loss] if isinstance(training.loss, str) else training.loss
        return jnp.mean(loss(call(x), target))

    if isinstance(model, nnx.Module):
        return _train_module(nnx.clone(model), update, loss_of, batches)
    return _train_pair(model, update, loss_of, batches, training.seed)


def _train_module(
    model: nnx.Module, update: optax.GradientTransformation, loss_of: LossOf, batches: Iterator[Tree]
) -> nnx.Module:
    model.train()
    optimizer = nnx.Optimizer(model, update, wrt=nnx.Param)

    for batch in batches:
        gradients = nnx.grad(lambda model, batch=batch: loss_of(model, model, batch))(model)
        optimizer.update(model, gradients)
    return model


def _train_pair(
    model: Model, update: optax.GradientTransformation, loss_of: LossOf, batches: Iterator[Tree], seed: int
) -> Model:
    params, apply = model
    takes = inspect.signature(apply).parameters
    words = jnp.array([seed >> 32, seed & 0xFFFFFFFF], dtype=jnp.uint32)
    base = jax.random.wrap_key_data(words, impl="threefry2x32")
    state = update.init(params)

    for number, batch in enumerate(batches):
        given = {"rng": jax.random.fold_in(base, number), "train": True}
        own = functools.partial(apply, **{key: value for key, value in given.items() if key in takes})

        def loss(params: Tree, own: Callable[..., Tree] = own, batch: Tree = batch) -> jax.Array:
            return loss_of((params, own), lambda x: own(params, x), batch)

        changes, state = update.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, changes)
    return type(model)(params, apply) if hasattr(model, "_fields") else (params, apply)


def _transformation(training: Training) -> optax.GradientTransformation:
    optimizer, given = training.optimizer, training.hyperparameters
    if isinstance(optimizer, str):
        optimizer = getattr(optax, optimizer)
    if not isinstance(optimizer, optax.GradientTransformation):
        given = {"learning_rate" if key == "lr" else key: value for key, value in given.items()}
        rate = {} if training.schedule is None else {"learning_rate": training.schedule}
        optimizer = optimizer(**rate, **given)
    if training.clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(training.clip_norm), optimizer)


def _batches(data: Data, epoch: int, training: Training) -> Iterator[Tree]:
    for rows in training.rows(len(jax.tree.leaves(data)[0]), epoch):
        yield jax.tree.map(lambda leaf, rows=rows: jnp.asarray(leaf[rows]), data)


def weights(model: Model) -> Arrays:
    """Return all arrays of a module, or of a pair's params, by path."""
    tree = nnx.state(model) if isinstance(model, nnx.Module) else model[0]
    found: Arrays = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found[jax.tree_util.keystr(path, simple=True, separator=".")] = np.asarray(leaf)
    return found
