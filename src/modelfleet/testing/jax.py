"""One JAX model trained alone, as a person would write it: the reference that fleets are compared with.

As little as can be is shared with the fused path: what is wrong there must not be wrong here in the same way.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from modelfleet.members import member_seed
from modelfleet.streams import permutations

LOSSES: Mapping[str, Callable[[Any, Any], jax.Array]] = {
    "cross_entropy": lambda o, y: optax.softmax_cross_entropy_with_integer_labels(o, y).mean(),
    "mse": lambda o, y: optax.squared_error(o, y).mean(),
    "mae": lambda o, y: jnp.abs(o - y).mean(),
    "huber": lambda o, y: optax.huber_loss(o, y).mean(),
    "bce_with_logits": lambda o, y: optax.sigmoid_binary_cross_entropy(o, y).mean(),
}


def alone(
    model: Any,
    name: str,
    data: Any,
    *,
    optimizer: Any,
    loss: Any,
    objective: Callable[[Any, Any], Any] | None,
    seed: int,
    epochs: int,
    batch_size: int,
    shuffle: bool,
    clip_norm: float | None,
    precision: str,
    schedule: Callable[[Any], Any] | None,
    schedule_per: str = "step",
    **hyperparameters: Any,
) -> Any:
    """A trained copy of `model`; see `modelfleet.testing.alone`. `schedule` is one of Optax.

    Nothing is compiled: every step runs its Python.
    """
    if precision != "float32":
        raise ValueError(f"a JAX model is trained alone in float32 only, not in {precision}.")
    update = _transformation(optimizer, schedule, clip_norm, hyperparameters)
    own_seed = member_seed(seed, name)
    batches = (
        batch
        for epoch in range(epochs)
        for batch in _batches(data, own_seed if shuffle else None, epoch, batch_size)
    )

    def loss_of(model: Any, call: Callable[[Any], Any], batch: Any) -> Any:
        if objective is not None:
            result = objective(model, batch)
            return result[0] if isinstance(result, tuple) else result
        x, target = batch
        return jnp.mean((LOSSES[loss] if isinstance(loss, str) else loss)(call(x), target))

    if isinstance(model, nnx.Module):
        return _train_module(nnx.clone(model), update, loss_of, batches)
    return _train_pair(model, update, loss_of, batches, own_seed)


def _train_module(model: Any, update: Any, loss_of: Callable[..., Any], batches: Iterator[Any]) -> Any:
    model.train()
    optimizer = nnx.Optimizer(model, update, wrt=nnx.Param)

    for batch in batches:
        gradients = nnx.grad(lambda model, batch=batch: loss_of(model, model, batch))(model)
        optimizer.update(model, gradients)
    return model


def _train_pair(model: Any, update: Any, loss_of: Callable[..., Any], batches: Iterator[Any], seed: int) -> Any:
    params, apply = model
    takes = inspect.signature(apply).parameters
    words = jnp.array([seed >> 32, seed & 0xFFFFFFFF], dtype=jnp.uint32)
    base = jax.random.wrap_key_data(words, impl="threefry2x32")
    slots = update.init(params)

    for number, batch in enumerate(batches):
        given = {"rng": jax.random.fold_in(base, number), "train": True}
        own = functools.partial(apply, **{key: value for key, value in given.items() if key in takes})

        def loss(params: Any, own: Any = own, batch: Any = batch) -> Any:
            return loss_of((params, own), lambda x: own(params, x), batch)

        changes, slots = update.update(jax.grad(loss)(params), slots, params)
        params = optax.apply_updates(params, changes)
    return type(model)(params, apply) if hasattr(model, "_fields") else (params, apply)


def _transformation(optimizer: Any, schedule: Any, clip_norm: float | None, given: Mapping[str, Any]) -> Any:
    if isinstance(optimizer, str):
        optimizer = getattr(optax, optimizer)
    if not isinstance(optimizer, optax.GradientTransformation):
        given = {"learning_rate" if key == "lr" else key: value for key, value in given.items()}
        optimizer = optimizer(**given) if schedule is None else optimizer(learning_rate=schedule, **given)
    return optimizer if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)


def _batches(data: Any, seed: int | None, epoch: int, size: int) -> Iterator[Any]:
    rows = len(jax.tree.leaves(data)[0])
    order = np.arange(rows)
    if seed is not None:
        order = permutations(np.array([seed]), epoch, np.array([rows]))[0]
    for start in range(0, rows, size):
        chosen = order[start : start + size]
        yield jax.tree.map(lambda leaf, chosen=chosen: jnp.asarray(leaf[chosen]), data)


def weights(model: Any) -> dict[str, np.ndarray]:
    """All that a module or a pair's params hold, by path."""
    tree = nnx.state(model) if isinstance(model, nnx.Module) else model[0]
    found: dict[str, np.ndarray] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found[jax.tree_util.keystr(path, simple=True, separator=".")] = np.asarray(leaf)
    return found
