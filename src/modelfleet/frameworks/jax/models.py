"""Two kinds of JAX models, as parts that can be stacked: Flax NNX modules, and `(params, apply)` pairs.

A pair's `apply` is called as `apply(params, x)`. If it also takes `train` or `rng` by name, it gets True in
training, and the member's own key for each step.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.jax.structure import freeze, is_module, named_leaves, statics
from modelfleet.types import Model, Tensor, Tree

Array = jax.Array | np.ndarray
Parts = dict[str, Array]  # by structural key
Result = TypeVar("Result")


def is_pair(model: Model) -> bool:
    """Return True for a pair of a tree of arrays and a function."""
    if not (isinstance(model, tuple) and len(model) == 2 and callable(model[1])):
        return False
    arrays = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves(model[0])]
    numbers = [isinstance(leaf, int | float | complex) for leaf in jax.tree.leaves(model[0])]
    return any(arrays) and all(map(any, zip(arrays, numbers, strict=True)))


def form_of(model: Model) -> "Module | Pair":
    """Return the object that takes a model apart, calls it by its parts, and puts it together again."""
    return Module(model) if is_module(model) else Pair(model)


def variables(model: Model) -> Tree:
    """Return a model's arrays as a tree: the state of a module, or the params of a pair."""
    if not is_module(model):
        return model[0]
    from flax import nnx

    return nnx.state(model)


def paired(params: Tree, model: Model) -> Model:
    """Return a pair like `model`, which may be a named tuple, with other params."""
    return type(model)(params, model[1]) if hasattr(model, "_fields") else (params, model[1])


def raw(leaf: Array) -> Array:
    """Return an array in a dtype that NumPy has: for random keys, their data."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def like(value: Array, leaf: Array) -> Array:
    """Return an array of `raw` in its original form: a key if `leaf` is one."""
    return _of_kind(value, _key_kind(leaf))


def key_data(seed: int) -> np.ndarray:
    """Return the data of a random key from all 63 bits of a seed. JAX itself would use the lower 32."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], dtype=np.uint32)


def key_of(data: Tensor) -> jax.Array:
    """Return the random key of `key_data`."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")


class TreeLayout:
    """Converts a tree of arrays to a dict with structural keys, and back."""

    def __init__(self, tree: Tree) -> None:
        named = named_leaves(tree)
        self.keys = [f"{number:03}.{name}" for number, (name, _) in enumerate(named)]
        self.trained = {
            key for key, (_, leaf) in zip(self.keys, named, strict=True) if jnp.issubdtype(leaf.dtype, jnp.inexact)
        }
        """Keys of the arrays that can have a gradient."""
        self._kinds = [_key_kind(leaf) for _, leaf in named]
        self._definition = jax.tree.structure(tree)

    def parts(self, tree: Tree) -> Parts:
        """Return the arrays of a tree of this form, some of which may be missing."""
        leaves = self._definition.flatten_up_to(tree)
        return {key: raw(leaf) for key, leaf in zip(self.keys, leaves, strict=True) if leaf is not None}

    def tree(self, parts: Mapping[str, Array]) -> Tree:
        """Return the tree of arrays, with None for missing keys."""
        leaves = [
            _of_kind(parts[key], kind) if key in parts else None
            for key, kind in zip(self.keys, self._kinds, strict=True)
        ]
        return jax.tree.unflatten(self._definition, leaves)

    def after(
        self, before: list[tuple[str, Array]], parts: Mapping[str, Array], named: Mapping[str, Array]
    ) -> Parts:
        """Return the arrays after a call of the model; those of `parts` if the model did not replace them.

        Args:
            before: Leaves of the tree before the call, with their names.
            parts: Arrays before the call.
            named: Arrays after the call, by name.

        Raises:
            InputError: An array has another shape or dtype than before.
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


class _Form:
    """Trained arrays of a model, as a dict and as the tree that an optimizer takes.

    Attributes:
        changes: Path of an attribute, other than a variable, that a call has changed.
        keep: True to keep such changes from call to call, for steps that run their Python.
    """

    changes: str | None = None
    keep = False

    def __init__(self, params: Tree) -> None:
        self._params = TreeLayout(params)

    def tree(self, params: Parts) -> Tree:
        """Return the params as a tree, for the optimizer."""
        return self._params.tree(params)

    def flat(self, tree: Tree) -> Parts:
        """Return the params of a tree from the optimizer."""
        return self._params.parts(tree)


class Module(_Form):
    """Flax NNX module. Its `nnx.Param`s are trained; all other variables are buffers."""

    def __init__(self, model: Model) -> None:
        from flax import nnx

        self._nnx = nnx
        own = nnx.clone(model)  # modes are set on a copy: the model is the user's
        own.train()
        self._train = nnx.graphdef(own)
        own.eval()
        self._eval = nnx.graphdef(own)
        self._assigned: dict[str, Any] = {}
        self._python = _frozen(model)  # values of the user's model when it was last read
        params, others = nnx.split(own, nnx.Param, ...)[1:]
        super().__init__(params)
        self._others = TreeLayout(others)

    def take(self, model: Model) -> None:
        """Take over attributes that the user has changed since the model was last read or written."""
        now = _frozen(model)
        values = dict(statics(model))
        self._assigned |= {path: values[path] for path in now if now[path] != self._python.get(path)}
        self._python = now

    def parts(self, model: Model) -> tuple[Parts, Parts]:
        """Return the params and the buffers of a model."""
        params, others = self._nnx.split(model, self._nnx.Param, ...)[1:]
        found, is_trained = self._params.parts(params), self._params.trained
        trained = {key: value for key, value in found.items() if key in is_trained}
        frozen = {f"param.{key}": value for key, value in found.items() if key not in is_trained}
        return trained, {**frozen, **self._others.parts(others)}

    def _all_params(self, params: Parts, buffers: Parts) -> Parts:
        """Return the trained params, and those that are buffers, since they can't have a gradient."""
        return {key: params[key] if key in params else buffers[f"param.{key}"] for key in self._params.keys}

    def run(
        self, params: Parts, buffers: Parts, key: jax.Array, use: Callable[[Model], Result], *, train: bool
    ) -> tuple[Result, Parts, Parts]:
        """Return the result of `use` on the model with these parts, and its params and buffers afterwards.

        Arrays that the model does not replace are returned as the same objects.
        """
        whole = self._all_params(params, buffers)
        own, others = self._params.tree(whole), self._others.tree(buffers)
        before = named_leaves(own), named_leaves(others)  # read now: the trees may become the model's own
        model = self._nnx.merge(self._train if train else self._eval, own, others)
        for path, value in self._assigned.items():
            _assign(model, path, value)
        python = dict(statics(model))
        result = use(model)
        for path, value in statics(model):
            if path not in python or freeze(python[path]) != freeze(value):
                self.changes = path
                if self.keep:
                    self._assigned[path] = value
        # By name: a call may have sown new variables.
        after = dict(named_leaves(self._nnx.state(model)))
        trained = self._params.after(before[0], whole, after)
        frozen = {f"param.{key}": value for key, value in trained.items()}
        kept = {**frozen, **self._others.after(before[1], buffers, after)}
        return result, {key: trained[key] for key in params}, {key: kept[key] for key in buffers}

    def write_back(self, model: Model, params: Parts, buffers: Parts) -> Model:
        """Write these parts into the model, and return it."""
        trees = self._params.tree(self._all_params(params, buffers)), self._others.tree(buffers)
        arrays = jax.tree.map(jnp.asarray, trees)
        self._nnx.update(model, *arrays)
        for path, value in self._assigned.items():
            _assign(model, path, value)
        self._python = _frozen(model)
        return model

    @staticmethod
    def call(model: Model, x: Tree) -> Tree:
        """Call a module with a dict as keywords, a tuple or list as arguments, or a single array."""
        if isinstance(x, Mapping):
            return model(**x)
        return model(*x) if isinstance(x, tuple | list) else model(x)


class Pair(_Form):
    """Pair `(params, apply)`, or a named tuple of the two. Floats are trained; integers are buffers."""

    def __init__(self, model: Model) -> None:
        super().__init__(model[0])
        self._apply = model[1]
        self._takes = _keywords(model[1])

    def take(self, model: Model) -> None:
        """Do nothing: a pair has no attributes."""

    def parts(self, model: Model) -> tuple[Parts, Parts]:
        """Return the params and the buffers of a model."""
        found, is_trained = self._params.parts(model[0]), self._params.trained
        trained = {key: value for key, value in found.items() if key in is_trained}
        return trained, {key: value for key, value in found.items() if key not in is_trained}

    def run(
        self, params: Parts, buffers: Parts, key: jax.Array, use: Callable[[Model], Result], *, train: bool
    ) -> tuple[Result, Parts, Parts]:
        """Return the result of `use` on the model with these parts, and the parts, which do not change."""
        given: dict[str, Any] = {}
        if "train" in self._takes:
            given["train"] = train
        if "rng" in self._takes and (train or self._takes["rng"]):
            given["rng"] = key
        apply = functools.partial(self._apply, **given) if given else self._apply
        return use((self._params.tree({**params, **buffers}), apply)), params, buffers

    def write_back(self, model: Model, params: Parts, buffers: Parts) -> Model:
        """Return a new pair with these parts, since a tuple can't be changed."""
        return paired(jax.tree.map(jnp.asarray, self._params.tree({**params, **buffers})), model)

    @staticmethod
    def call(model: Model, x: Tree) -> Tree:
        """Apply the function to the params and the input."""
        params, apply = model
        return apply(params, x)


def _frozen(model: Model) -> dict[str, Hashable]:
    """Return the Python values of a module in a form that can be compared."""
    return {path: freeze(value) for path, value in statics(model)}


def _assign(model: Model, path: str, value: object) -> None:
    *parts, name = path.split(".")
    for part in parts:
        model = getattr(model, part)
    setattr(model, name, value)


def _keywords(function: Callable[..., Any]) -> dict[str, bool]:
    """Return the arguments of a function that can be passed by name: True if they have no default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default is p.empty for p in parameters if p.kind in named}


def _is_key(leaf: Array) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_kind(leaf: Array) -> Any:  # a PRNGSpec, which JAX does not export
    return jax.random.key_impl(leaf) if _is_key(leaf) else None


def _of_kind(value: Tensor, kind: Any) -> Array:
    return value if kind is None else jax.random.wrap_key_data(value, impl=kind)


def _spec(array: Array) -> str:
    return f"{tuple(array.shape)} {array.dtype}"


def as_numpy(parts: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """Return arrays of any kind as NumPy arrays, in dtypes that JAX has."""
    arrays = {key: np.asarray(value) for key, value in parts.items()}
    return {key: a.astype(jax.dtypes.canonicalize_dtype(a.dtype), copy=False) for key, a in arrays.items()}
