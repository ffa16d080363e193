"""Structure of a JAX model: everything that decides what it computes, except its weights.

Models with equal signatures run as one program with stacked weights. If it is unknown whether two models compute
the same, they count as different.
"""

import functools
import sys
import types
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from modelfleet.frameworks.structure import Opaque, Signature, cell_contents, without_numbers
from modelfleet.types import Model, Tree

# Attributes that `Module.train` and `eval` set. A lane sets them itself for each step.
_MODES = frozenset({"deterministic", "use_running_average"})


@dataclass(frozen=True)
class _Tensor:
    kind: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}" if self.kind == "array" else f"{self.kind} {self.shape} {self.dtype}"


@dataclass(frozen=True)
class _Again:
    first: str

    def __str__(self) -> str:
        return f"the same as {self.first or 'the model'}"


def is_module(model: Model) -> bool:
    """Return True for a Flax NNX module. There are none before Flax is imported."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


def named_leaves(tree: Tree) -> list[tuple[str, Any]]:
    """Return every leaf of a tree with its path, such as `layers.0.kernel`."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in found]


def signature(model: Model) -> Signature:
    """Return the structure of a model."""
    if is_module(model):
        return Signature(tuple(_entries(model, "", {})))
    params, apply = model
    entries: list[tuple[str, Hashable]] = [("kind of model", type(model)), ("apply", freeze(apply))]
    entries += [(f"params.{name}", _tensor("array", leaf)) for name, leaf in named_leaves(params)]
    return Signature((*entries, ("form of params", jax.tree.structure(params))))


def family(signature: Signature, task: Any) -> Hashable:
    """Return what members have in common that differ only in their optimizers and in numbers."""
    return without_numbers(signature), task.family


def difference(a: Signature, b: Signature) -> str | None:
    """Return where `a` first differs from `b`, as in "layers.0.kernel is (4, 8), not (4, 16)"; None if nowhere."""
    if a == b:
        return None
    ours, theirs = dict(a.entries), dict(b.entries)
    for path, value in a.entries:
        if path not in theirs:
            return f"has {path or 'the model'}, the other has none"
        if value != theirs[path]:
            return f"{path or 'the class'} is {_show(value)}, not {_show(theirs[path])}"
    missing = next((path for path in theirs if path not in ours), None)
    return "its parts are in another order" if missing is None else f"has no {missing}"


def trained_twice(models: Sequence[Model]) -> tuple[int, int, str] | None:
    """Return the positions of two models that would train the same variable, and its name in the second.

    Modules may share an `nnx.Param`. Pairs share nothing that is trained, since arrays never change.
    """
    owners: dict[int, int] = {}
    for position, model in enumerate(models):
        if not is_module(model):
            continue
        from flax import nnx

        for path, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Param) and owners.setdefault(id(node), position) != position:
                return owners[id(node)], position, ".".join(map(str, path))
    return None


def _entries(node: Any, path: str, seen: dict[int, str]) -> Iterator[tuple[str, Hashable]]:
    """Yield every part of a module with its path, parents first."""
    from flax import nnx

    if isinstance(node, nnx.Variable | nnx.Pytree | dict | list | tuple | jax.Array | np.ndarray):
        first = seen.setdefault(id(node), path)
        if first != path:
            yield path, _Again(first)
            return
    if isinstance(node, nnx.Variable):
        yield path, _tensor(type(node).__name__, node.get_value())
        # A layer may also read a variable's metadata, such as an axis name or a sharding.
        for name, value in sorted(node.get_metadata().items()):
            yield f"{path}.{name}", freeze(value)
    elif isinstance(node, jax.Array | np.ndarray):
        yield path, _tensor("array", node)
    elif isinstance(node, nnx.Pytree):
        yield path, type(node)
        stock = type(node).__module__.startswith("flax.")
        for name, value in sorted(vars(node).items()):
            # In Flax's own layers, `…_init` is only for making the weights.
            if not name.startswith("_pytree__") and name not in _MODES and not (stock and name.endswith("_init")):
                yield from _entries(value, f"{path}.{name}" if path else name, seen)
    elif isinstance(node, Mapping):
        yield path, type(node)
        for name, value in node.items():
            yield from _entries(value, f"{path}.{name}", seen)
    elif isinstance(node, list | tuple):
        yield path, (type(node), len(node))
        for number, value in enumerate(node):
            yield from _entries(value, f"{path}.{number}", seen)
    else:
        yield path, freeze(node)


def statics(node: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield every Python value that a module holds beside its variables, and its classes, with their paths."""
    from flax import nnx

    seen = set() if seen is None else seen
    if isinstance(node, nnx.Variable | jax.Array | np.ndarray) or id(node) in seen:
        return
    if isinstance(node, nnx.Pytree):
        seen.add(id(node))
        for name, value in list(vars(node).items()):
            if not name.startswith("_pytree__") and name not in _MODES:
                yield from statics(value, f"{path}.{name}" if path else name, seen)
        yield f"{path}'s class", type(node)
    elif isinstance(node, nnx.List | nnx.Dict):
        return
    else:
        yield path, node


def freeze(value: Any, within: tuple[int, ...] = ()) -> Hashable:
    """Return a plain value as one that can be compared. Functions compare by code and closure.

    Args:
        value: The value.
        within: The ids of the values that contain it. A local function that calls itself is in its own closure.
    """
    if id(value) in within:
        return ("itself", within.index(id(value)))
    inner = functools.partial(freeze, within=(*within, id(value)))
    if isinstance(value, types.FunctionType):
        cells = tuple(inner(cell_contents(cell)) for cell in value.__closure__ or ())
        defaults = (*(value.__defaults__ or ()), *sorted((value.__kwdefaults__ or {}).items()))
        return ("function", value.__code__, id(value.__globals__), cells, tuple(map(inner, defaults)))
    if isinstance(value, types.MethodType):
        return ("method", inner(value.__func__), inner(value.__self__))
    if isinstance(value, functools.partial):
        keywords = tuple((key, inner(own)) for key, own in sorted(value.keywords.items()))
        return ("partial", inner(value.func), tuple(map(inner, value.args)), keywords)
    if isinstance(value, jax.Array | np.ndarray):
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return Opaque(value)
        if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        return ("array", array.shape, str(array.dtype), array.tobytes())
    if isinstance(value, dict):
        return (dict, tuple((inner(key), inner(own)) for key, own in value.items()))
    if isinstance(value, list | tuple):
        return (type(value), *map(inner, value))
    if isinstance(value, float | int | complex):
        return (type(value), repr(value))  # 1, 1.0 and True differ; NaN equals NaN
    try:
        hash(value)
    except TypeError:
        return Opaque(value)
    return value


def _tensor(kind: str, leaf: Any) -> _Tensor:
    return _Tensor(kind, tuple(np.shape(leaf)), str(getattr(leaf, "dtype", type(leaf).__name__)))


def _show(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2 and value[0] in (float, int, bool, complex):
        return value[1]
    if isinstance(value, tuple) and value and value[0] in ("function", "method", "partial"):
        code = value[1] if value[0] == "function" else None
        return f"the function {code.co_qualname}" if code is not None else f"another {value[0]}"
    return value.__qualname__ if isinstance(value, type) else str(value)
