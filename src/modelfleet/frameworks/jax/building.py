"""JAX models as the layers above handle them: checked, copied, and their weights for files."""

from collections.abc import Hashable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.jax.models import (
    Array,
    is_module,
    is_pair,
    key_data,
    key_of,
    like,
    named_leaves,
    paired,
    raw,
    variables,
)
from modelfleet.frameworks.weight_mismatch import Spec, mismatch
from modelfleet.types import Arrays, Model, Tree


def is_model(value: object) -> bool:
    """Return True for a Flax NNX module, or a pair of params and a function."""
    return is_module(value) or is_pair(value)


@contextmanager
def seeding(seed: int) -> Iterator[None]:
    """Do nothing: JAX has no global generator. A factory gets `rngs` or `seed` if it takes them."""
    yield


def rngs(seed: int) -> Any:
    """Return random streams of Flax for a factory."""
    from flax import nnx

    return nnx.Rngs(key_of(key_data(seed)))


def check_model(model: Model, name: str) -> None:
    """Raise InputError for a model whose weights are abstract, or not arrays."""
    for path, leaf in named_leaves(variables(model)):
        if isinstance(leaf, int | float | complex) and not hasattr(leaf, "dtype"):
            raise InputError(
                f"member {name!r}: its {path!r} is {leaf!r}, a Python number; params are arrays. "
                f"Give jnp.asarray({leaf!r}) to train it, or have it in the closure of the function."
            )
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise InputError(f"member {name!r}: its {path!r} is abstract, without values. Load its weights.")


def copy_model(model: Model) -> Model:
    """Return a copy of a model, with the same weights."""
    if is_module(model):
        from flax import nnx

        return nnx.clone(model)
    return paired(
        jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, model[0]), model
    )


def randomness() -> None:
    """Return None: JAX has no global generator."""


def restore_randomness(state: None) -> None:
    """Do nothing."""


def weights_key(model: Model) -> Hashable:
    """Return what models must have in common for their weights to be stacked in one file."""
    return tuple((name, np.shape(leaf), str(leaf.dtype)) for name, leaf in _weights(model).items())


def stacked_weights(models: Sequence[Model]) -> Arrays:
    """Return the weights of models with one key, `(member, …)` each."""
    weights = [_weights(model) for model in models]
    return {name: np.stack([np.asarray(own[name]) for own in weights]) for name in weights[0]}


def fill(model: Model, tensors: Mapping[str, Array]) -> str | None:
    """Copy weights into a model. If they do not fit, change nothing and return the first difference."""
    wrong = mismatch(_specs(_weights(model)), _specs(tensors))
    if wrong is not None:
        return wrong
    if is_module(model):
        from flax import nnx

        state = nnx.state(model)
        leaves = [like(jnp.asarray(tensors[name]), leaf) for name, leaf in named_leaves(state)]
        nnx.update(model, jax.tree.unflatten(jax.tree.structure(state), leaves))
        return None
    return _fill_containers(model[0], "", tensors)


def _fill_containers(node: Tree, path: str, tensors: Mapping[str, Array]) -> str | None:
    """Put arrays into a tree of dicts and lists, in place, since a pair can't be changed."""
    if isinstance(node, MutableMapping):
        items = list(node.items())
    elif isinstance(node, MutableSequence):
        items = list(enumerate(node))
    else:
        return (
            f"its params are a {type(node).__name__}, which can't be filled. Have the factory make dicts or lists"
        )
    for key, value in items:
        inner = f"{path}.{key}" if path else str(key)
        if inner in tensors:
            node[key] = jnp.asarray(tensors[inner])
        elif jax.tree.leaves(value):
            wrong = _fill_containers(value, inner, tensors)
            if wrong:
                return wrong
    return None


def _weights(model: Model) -> dict[str, Array]:
    return {name: raw(leaf) for name, leaf in named_leaves(variables(model))}


def _specs(arrays: Mapping[str, Array]) -> dict[str, Spec]:
    return {name: Spec(tuple(array.shape), str(array.dtype)) for name, array in arrays.items()}
