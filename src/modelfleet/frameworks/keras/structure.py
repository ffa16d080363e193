"""Structure of a Keras model: everything that decides what it computes, except its weights.

Models with equal signatures run as one program with stacked weights. Names that Keras numbers (`dense_1`),
initializers and the start of a seed do not count. If it is unknown whether two models compute the same, they count
as different.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import keras
from keras import tree
from keras.src.utils.backend_utils import DynamicBackend

from modelfleet.frameworks.keras.values import NOTHING, Owned, freeze, show, unnumbered
from modelfleet.frameworks.structure import Opaque, Signature

_LAYER = frozenset(vars(keras.layers.Layer())) | {"name", "_name"}
# Attributes that Keras keeps on a model for itself, some from the first `compile` or `fit` on.
_MODEL = frozenset(vars(keras.Model())) | {
    *(
        "_compile_config",
        "_compiled_trainable_state",
        "_jax_state",
        "_eval_epoch_iterator",
        "history",
        "optimizer",
        "output_names",
    ),
    *("stop_training", "stop_evaluating", "stop_predicting", "_functional", "_inputs", "_inputs_struct"),
    *("_outputs", "_outputs_struct", "_nodes", "_nodes_by_depth", "_operations", "_operations_by_depth"),
}

# They follow from the shapes of weights, or are the same for all.
_NOT_COMPARED = (keras.InputSpec, DynamicBackend)
# Attributes of Keras's own that affect the numbers.
_COMPARED = (
    *("activity_regularizer", "autocast", "_supports_masking"),
    *("_call_has_training_arg", "_convert_input_args"),
)
# Attributes that layers keep between calls, and that do not affect what they compute.
_CACHES = frozenset(
    {"_dropout_mask", "_recurrent_dropout_mask", "is_gptq_calibrated", "is_awq_calibrated"}
    | {"gptq_unpacked_column_size", "awq_unpacked_column_size"}
)


class Weight(NamedTuple):
    """A weight in a signature."""

    shape: tuple[int, ...]
    dtype: str
    trained: bool
    regularizer: Hashable
    constraint: Hashable
    others: Hashable


class _Tensor(NamedTuple):
    """An output of a layer in a functional model."""

    layer: int
    call: int
    output: int


class _Again(NamedTuple):
    """A layer that occurs in the model a second time."""

    first: str


def signature(model: keras.Model) -> Signature:
    """Return the structure of `model`: its layers, their connections, their settings and their weights."""
    entries: list[tuple[str, Hashable]] = []
    owned = owned_by(model)
    _walk(model, "", {}, entries, owned)
    trained = {id(variable) for variable in model.trainable_variables}
    for index, variable in enumerate(model.variables):
        weight = Weight(
            tuple(variable.shape),
            str(variable.dtype),
            id(variable) in trained,
            freeze(variable.regularizer, owned),
            freeze(variable.constraint, owned),
            (variable._autocast, variable.overwrite_with_gradient),
        )
        entries.append((f"weight {index}", weight))
    return Signature(tuple(entries))


def owned_by(model: keras.Model) -> Owned:
    """Return the position of each layer, variable and seed, by id. Models of one structure have the same ones."""
    found: dict[int, Hashable] = {id(v): ("weight", index) for index, v in enumerate(model.variables)}
    for index, layer in enumerate(model._flatten_layers()):
        found[id(layer)] = "layer", index
        for number, seeds in enumerate(layer._seed_generators):
            found[id(seeds)] = "seeds", index, number
    return found


def difference(a: Signature, b: Signature) -> str | None:
    """Return where `a` first differs from `b`, as in "layers.2.units is 64, not 32"; None if nowhere."""
    for (path, value), (other_path, other) in zip(a.entries, b.entries, strict=False):
        if path != other_path:
            ours, theirs = dict(a.entries), dict(b.entries)
            if path not in theirs:
                return f"has {path}, the other has none"
            return (
                f"has no {other_path}"
                if other_path not in ours
                else f"has {path} where the other has {other_path}"
            )
        if value != other:
            return _describe_difference(path, value, other)
    if len(a.entries) != len(b.entries):
        longer = max(a.entries, b.entries, key=len)
        path = longer[min(len(a.entries), len(b.entries))][0]
        return f"has {path}, the other has none" if longer is a.entries else f"has no {path}"
    return None


def trained_twice(models: Sequence[keras.Model]) -> tuple[int, int, str] | None:
    """Return the positions of two models that would train the same variable, and its name in the second."""
    owners: dict[int, int] = {}
    for position, model in enumerate(models):
        for variable in model.trainable_variables:
            if owners.setdefault(id(variable), position) != position:
                return owners[id(variable)], position, variable.path
    return None


def _walk(
    layer: keras.Operation, path: str, seen: dict[int, str], entries: list[tuple[str, Hashable]], owned: Owned
) -> None:
    first = seen.setdefault(id(layer), path)
    if first != path:
        entries.append((path, _Again(first)))
        return
    dot = f"{path}." if path else ""
    entries.append((path or "the model", type(layer)))
    for key, value in _settings(layer):
        entries.append((dot + key, freeze(value, owned)))
    if hasattr(layer, "_nodes_by_depth"):
        entries += [(dot + key, value) for key, value in _connections(layer, owned)]
    for name, child in _children(layer):
        _walk(child, dot + name, seen, entries, owned)


def _children(layer: keras.Operation) -> Iterator[tuple[str, keras.Operation]]:
    """Yield the layers and operations within a layer, by the names that their owner has for them."""
    if hasattr(layer, "_nodes_by_depth"):
        found = getattr(layer, "operations", [])
    elif isinstance(layer, keras.Sequential):
        found = layer.layers
    else:
        found = getattr(layer, "_layers", [])
        own = {**vars(layer), **getattr(layer, "_modules", {})}  # on torch, a module keeps its modules apart
        names = {id(value): name for name, value in own.items() if isinstance(value, keras.layers.Layer)}
        for index, child in enumerate(found):
            if not isinstance(child, keras.metrics.Metric):
                yield names.get(id(child), f"layers.{index}"), child
        return
    for index, child in enumerate(found):
        yield f"layers.{index}", child


def _settings(layer: keras.Operation) -> Iterator[tuple[str, object]]:
    """Yield the settings of a layer: its attributes that are not Keras's bookkeeping.

    The config is not enough. It only names functions, may be incomplete for a user's own class, and making it
    imports TensorFlow on every backend.
    """
    yield "trainable", getattr(layer, "trainable", True)
    yield "dtype", getattr(getattr(layer, "dtype_policy", None), "name", None)
    for name in _COMPARED:
        yield name, getattr(layer, name, None)
    known = _MODEL if isinstance(layer, keras.Model) else _LAYER
    seeded = hasattr(layer, "_flatten_layers") and any(own._seed_generators for own in layer._flatten_layers())
    for name, value in sorted(vars(layer).items()):
        skipped = name in known or name in _CACHES or name.startswith("_self_") or isinstance(value, _NOT_COMPARED)
        if not skipped and not (seeded and name == "seed"):  # its seeds are compared as variables
            yield name, value


def _connections(model: keras.Model, owned: Owned) -> Iterator[tuple[str, Hashable]]:
    """Yield how the layers of a functional model are called on each other's outputs."""
    places = {id(operation): index for index, operation in enumerate(model.operations)}
    own = {id(node) for nodes in model._nodes_by_depth.values() for node in nodes}
    starts = {id(tensor): index for index, tensor in enumerate(model.inputs)}
    calls = {
        (id(operation), number): rank
        for operation in model.operations
        for rank, number in enumerate(n for n, node in enumerate(operation._inbound_nodes) if id(node) in own)
    }

    def refer(value: object) -> object:
        history = getattr(value, "_keras_history", None)
        if history is None:
            return value
        if id(value) in starts:
            return "input", starts[id(value)]
        operation, number, output = history
        return _Tensor(places[id(operation)], calls[id(operation), number], output)

    for index, operation in enumerate(model.operations):
        for node in operation._inbound_nodes:
            if id(node) in own and not node.is_input:
                arguments = (node.arguments.args, node.arguments.kwargs)
                yield f"layers.{index}'s inputs", freeze(tree.map_structure(refer, arguments), owned)
    yield "inputs", freeze(tree.map_structure(refer, model.input), owned)
    yield "outputs", freeze(tree.map_structure(refer, model.output), owned)
    for what, tensors in (("input", model.inputs), ("output", model.outputs)):
        if len(tensors) > 1:  # data, losses and logs use these names
            names = getattr(model, f"{what}_names", [])
            makers = [tensor._keras_history.operation for tensor in tensors]
            yield f"{what} names", freeze([unnumbered(*pair) for pair in zip(names, makers, strict=False)])


def _describe_difference(path: str, value: Hashable, other: Hashable) -> str:
    if isinstance(value, Weight) and isinstance(other, Weight):
        if value.shape != other.shape:
            return f"{path} is {value.shape}, not {other.shape}"
        if value.dtype != other.dtype:
            return f"{path} is {value.dtype}, not {other.dtype}"
        if value.trained != other.trained:
            return f"{path} is trained, not frozen" if value.trained else f"{path} is frozen, not trained"
        for what in ("regularizer", "constraint"):
            own, theirs = getattr(value, what), getattr(other, what)
            if own != theirs:
                return f"{path} has the {what} {show(own)}, not {show(theirs)}"
        return f"{path} has other options"
    if isinstance(value, type) and isinstance(other, type):
        return f"{path} is a {value.__qualname__}, not a {other.__qualname__}" + (
            " of that name" if value.__qualname__ == other.__qualname__ else ""
        )
    if isinstance(value, _Again) or isinstance(other, _Again):
        return f"{path} is {_origin(value)}, not {_origin(other)}"
    for side in (value, other):
        if isinstance(side, Opaque):
            return f"attribute {path} of type {type(side.value).__name__} can't be compared"
    if NOTHING in (value, other):
        return f"{path} is a layer or a weight in one of them"
    if path.endswith((" inputs", ".inputs", ".outputs")) or path in ("inputs", "outputs"):
        return f"{path} come from other layers"
    text, other_text = show(value), show(other)
    if path.endswith(" names"):
        return f"{path} are {text}, not {other_text}"
    return f"{path} is {text}, not {other_text}" if text != other_text else f"{path} is another {text}"


def _origin(value: object) -> str:
    return f"the layer {value.first or 'itself'} again" if isinstance(value, _Again) else "a layer of its own"
