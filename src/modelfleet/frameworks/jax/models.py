"""The two kinds of models of JAX, as parts that can be stacked: Flax NNX modules, and `(params, apply)` pairs.

A pair's `apply` is called as `apply(params, x)`; where it also takes `train` or `rng` by name, it is given whether
it is trained, and a key of the member's own for each step.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.jax.structure import freeze, is_module, named_leaves, statics

Array = jax.Array | np.ndarray
Parts = dict[str, Any]  # arrays by structural key
Use = Callable[[Any], Any]


def is_pair(model: Any) -> bool:
    """Whether it is a pair of a tree of arrays and a function."""
    if not (isinstance(model, tuple) and len(model) == 2 and callable(model[1])):
        return False
    arrays = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves(model[0])]
    numbers = [isinstance(leaf, int | float | complex) for leaf in jax.tree.leaves(model[0])]  # refused by name
    return any(arrays) and all(map(any, zip(arrays, numbers, strict=True)))


def form_of(model: Any) -> "Module | Pair":
    """How to take a model apart, call it by its parts, and put it together again."""
    return Module(model) if is_module(model) else Pair(model)


def raw(leaf: Any) -> Any:
    """An array in a dtype that NumPy has: of random keys, their data."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def like(value: Any, leaf: Any) -> Any:
    """What `raw` gave, as it was: a key for a key."""
    return _of_kind(value, jax.random.key_impl(leaf) if _is_key(leaf) else None)


def key_data(seed: int) -> np.ndarray:
    """The data of a random key of all 63 bits of a seed; JAX itself would take the lower 32."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], dtype=np.uint32)


def key_of(data: Any) -> jax.Array:
    """The random key of such data."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")


class Tree:
    """A tree of arrays as a dict with structural keys, and back."""

    def __init__(self, tree: Any) -> None:
        named = named_leaves(tree)
        self.keys = [f"{number:03}.{name}" for number, (name, _) in enumerate(named)]
        self._kinds = [jax.random.key_impl(leaf) if _is_key(leaf) else None for _, leaf in named]
        self._fractions = [jnp.issubdtype(leaf.dtype, jnp.inexact) for _, leaf in named]
        self._definition = jax.tree.structure(tree)

    def parts(self, tree: Any) -> Parts:
        """The arrays of a tree of this form, or of one that lacks some."""
        leaves = self._definition.flatten_up_to(tree)
        return {key: raw(leaf) for key, leaf in zip(self.keys, leaves, strict=True) if leaf is not None}

    def tree(self, parts: Mapping[str, Any]) -> Any:
        """The tree of such arrays; None, which is no array, where there is none of a key."""
        leaves = [
            _of_kind(parts[key], kind) if key in parts else None
            for key, kind in zip(self.keys, self._kinds, strict=True)
        ]
        return jax.tree.unflatten(self._definition, leaves)

    def after(self, before: list[tuple[str, Any]], parts: Mapping[str, Any], named: Mapping[str, Any]) -> Parts:
        """The arrays that have these names now; those of `parts` where nothing was put in their place.

        `before` are the leaves of the tree that was made of them.
        Raises `InputError` for one that has become another shape or dtype.
        """
        found: Parts = {}
        for key, (name, old) in zip(self.keys, before, strict=True):
            leaf = named.get(name, old)
            if leaf.shape != old.shape or leaf.dtype != old.dtype:
                raise InputError(
                    f"its {name!r} was {_spec(old)}, now it is {_spec(leaf)}. A member's variables "
                    f"keep their shapes and dtypes: cast what the model assigns."
                )
            found[key] = parts[key] if leaf is old else raw(leaf)
        return found

    @property
    def trained(self) -> set[str]:
        """The keys of what can have a gradient."""
        return {key for key, fraction in zip(self.keys, self._fractions, strict=True) if fraction}


class Module:
    """A Flax NNX module: its `nnx.Param`s are trained, and all other variables are buffers."""

    def __init__(self, model: Any) -> None:
        from flax import nnx

        self._nnx = nnx
        own = nnx.clone(model)  # modes are set on a copy: the model is somebody else's
        own.train()
        self._train = nnx.graphdef(own)
        own.eval()
        self._eval = nnx.graphdef(own)
        self.changes: str | None = None
        """What a call has changed that is no variable."""
        self.keep = False
        """Whether to go on from what calls change so; who runs Python at every step does."""
        self._assigned: dict[str, Any] = {}
        self._python = _frozen(model)  # what its owner's model held when it was last looked at
        params, others = nnx.split(own, nnx.Param, ...)[1:]
        self._params, self._others = Tree(params), Tree(others)
        self._trained = self._params.trained

    def take(self, model: Any) -> None:
        """Go on from attributes that its owner has changed since the model was last looked at or written to."""
        now = _frozen(model)
        values = dict(statics(model))
        self._assigned |= {path: values[path] for path in now if now[path] != self._python.get(path)}
        self._python = now

    def parts(self, model: Any) -> tuple[Parts, Parts]:
        """The params and the buffers of a model."""
        params, others = self._nnx.split(model, self._nnx.Param, ...)[1:]
        found = self._params.parts(params)
        trained = {key: value for key, value in found.items() if key in self._trained}
        frozen = {f"param.{key}": value for key, value in found.items() if key not in self._trained}
        return trained, {**frozen, **self._others.parts(others)}

    def tree(self, params: Parts) -> Any:
        """The params as the optimizer is to see them."""
        return self._params.tree(params)

    def flat(self, tree: Any) -> Parts:
        """The params of what the optimizer gave."""
        return self._params.parts(tree)

    def run(self, params: Parts, buffers: Parts, key: Any, use: Use, *, train: bool) -> tuple[Any, Parts, Parts]:
        """What `use` makes of the model with these parts, and its params and buffers afterwards.

        What the model has not replaced is the very array that was given.
        """
        nnx = self._nnx
        whole = {key: params[key] if key in params else buffers[f"param.{key}"] for key in self._params.keys}
        graph = self._train if train else self._eval
        own, others = self._params.tree(whole), self._others.tree(buffers)
        before = named_leaves(own), named_leaves(others)  # now: the trees may be the model's own variables
        model = nnx.merge(graph, own, others)
        for path, value in self._assigned.items():
            _assign(model, path, value)
        python = dict(statics(model))
        result = use(model)
        for path, value in statics(model):
            if path not in python or freeze(python[path]) != freeze(value):
                self.changes = path
                if self.keep:
                    self._assigned[path] = value
        # By name: a model may have sown variables that were not there before.
        after = dict(named_leaves(nnx.state(model)))
        trained = self._params.after(before[0], whole, after)
        frozen = {f"param.{key}": value for key, value in trained.items()}
        kept = {**frozen, **self._others.after(before[1], buffers, after)}
        return result, {key: trained[key] for key in params}, {key: kept[key] for key in buffers}

    def write_back(self, model: Any, params: Parts, buffers: Parts) -> Any:
        """The model itself, with these parts."""
        whole = {key: params[key] if key in params else buffers[f"param.{key}"] for key in self._params.keys}
        arrays = jax.tree.map(jnp.asarray, (self._params.tree(whole), self._others.tree(buffers)))
        self._nnx.update(model, *arrays)
        for path, value in self._assigned.items():
            _assign(model, path, value)
        self._python = _frozen(model)
        return model

    @staticmethod
    def call(model: Any, x: Any) -> Any:
        """Call a module as its input is shaped: a dict as keywords, a tuple or list as arguments."""
        if isinstance(x, Mapping):
            return model(**x)
        return model(*x) if isinstance(x, tuple | list) else model(x)


class Pair:
    """A `(params, apply)` pair, or a named tuple of the two: fractions are trained, whole numbers are buffers."""

    changes: str | None = None
    keep = False

    def __init__(self, model: Any) -> None:
        self._params = Tree(model[0])
        self._trained = self._params.trained
        self._apply = model[1]
        self._takes = _keywords(model[1])

    def take(self, model: Any) -> None:
        """A function keeps nothing in its model."""

    def parts(self, model: Any) -> tuple[Parts, Parts]:
        """The params and the buffers of a model."""
        found = self._params.parts(model[0])
        trained = {key: value for key, value in found.items() if key in self._trained}
        return trained, {key: value for key, value in found.items() if key not in self._trained}

    def tree(self, params: Parts) -> Any:
        """The params as the optimizer is to see them."""
        return self._params.tree(params)

    def flat(self, tree: Any) -> Parts:
        """The params of what the optimizer gave."""
        return self._params.parts(tree)

    def run(self, params: Parts, buffers: Parts, key: Any, use: Use, *, train: bool) -> tuple[Any, Parts, Parts]:
        """What `use` makes of the model with these parts, and these, which a function leaves as they are."""
        given: dict[str, Any] = {}
        if "train" in self._takes:
            given["train"] = train
        if "rng" in self._takes and (train or self._takes["rng"]):
            given["rng"] = key
        apply = functools.partial(self._apply, **given) if given else self._apply
        return use((self._params.tree({**params, **buffers}), apply)), params, buffers

    def write_back(self, model: Any, params: Parts, buffers: Parts) -> Any:
        """A new pair with these parts: a tuple can't be changed."""
        arrays = jax.tree.map(jnp.asarray, self._params.tree({**params, **buffers}))
        return type(model)(arrays, model[1]) if hasattr(model, "_fields") else (arrays, model[1])

    @staticmethod
    def call(model: Any, x: Any) -> Any:
        """Apply the function to the params and the input, of whatever shape."""
        params, apply = model
        return apply(params, x)


def _frozen(model: Any) -> dict[str, Any]:
    """The Python values that a module holds, for comparing."""
    return {path: freeze(value) for path, value in statics(model)}


def _assign(model: Any, path: str, value: Any) -> None:
    *parts, name = path.split(".")
    for part in parts:
        model = getattr(model, part)
    setattr(model, name, value)


def _keywords(function: Callable[..., Any]) -> dict[str, bool]:
    """The arguments of a function that can be given by name, and whether they must be."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default is p.empty for p in parameters if p.kind in named}


def _of_kind(value: Any, kind: Any) -> Any:
    return value if kind is None else jax.random.wrap_key_data(value, impl=kind)


def _spec(array: Any) -> str:
    return f"{tuple(array.shape)} {array.dtype}"


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_numpy(parts: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays of any kind as NumPy's, in dtypes that JAX has."""
    arrays = {key: np.asarray(value) for key, value in parts.items()}
    return {key: a.astype(jax.dtypes.canonicalize_dtype(a.dtype), copy=False) for key, a in arrays.items()}
