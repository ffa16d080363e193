"""Merges traced functions that differ only in numbers into one function with a table of these numbers.

TensorFlow traces a function to a graph, in which every constant is an operation of its own. So the graphs of
several variants of a function are walked side by side. Operations, attributes and connections must be equal.
Floating constants that differ become tables `(variant, …)`. The merged function makes the operations of the first
variant again, with the row of its variant from each table in place of the constant.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from modelfleet.frameworks.functional.merged_definition import DifferenceError
from modelfleet.frameworks.tensorflow.programs import ConcreteFunction, Function, filled, flat, traced
from modelfleet.types import Tensor, Tree

_MAX_BYTES = 1 << 24  # of one table: it is a constant of the merged graph
_BOOKKEEPING = frozenset({"_class", "_output_shapes", "_gradient_op_type"})  # attributes of operations


class Traced(NamedTuple):
    """A traced function."""

    concrete: ConcreteFunction
    results: Tree
    """Results as the function returned them: the graph's own outputs."""


class TensorFlowMerger:
    """Traces functions to graphs, and merges these (see `merged_definition.Merger`)."""

    def shapes(self, args: tuple[Tree, ...]) -> tuple[tuple[Tree, ...], Hashable]:
        """Return the arguments' specs, and a key for them."""
        tensors, key = flat(args)
        return filled(args, iter([tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors])), key

    def trace(self, function: Function, shapes: tuple[Tree, ...]) -> tuple[Traced, Hashable]:
        """Return a traced function, and the form of its results."""
        structure: Tree = None

        def results(*values: tf.Tensor) -> list[tf.Tensor]:
            nonlocal structure
            structure = function(*filled(shapes, iter(values)))
            return flat(structure)[0]

        concrete = traced(results, flat(shapes)[0])
        structure = filled(structure, iter(concrete.outputs))
        return Traced(concrete, structure), flat(structure)[1]

    def merge(self, traced: Sequence[Traced]) -> "MergedFunction":
        """Return traced functions as one."""
        return MergedFunction(traced)

    def run(self, merged: "MergedFunction", form: Hashable, variant: Tensor, args: tuple[Tree, ...]) -> Tree:
        """Return the results of a variant."""
        return filled(merged.results, iter(merged(variant, flat(args)[0])))

    def pick(self, numbers: np.ndarray, variant: Tensor) -> tf.Tensor:
        """Return the number of a variant."""
        return tf.gather(tf.constant(numbers), variant)


class MergedFunction:
    """Function of one of several variants, merged from their graphs for the same arguments.

    Args:
        variants: The traced functions.

    Raises:
        DifferenceError: They differ in more than numbers.
    """

    def __init__(self, variants: Sequence[Traced]) -> None:
        self.tables: list[np.ndarray] = []
        """Numbers that differ, each `(variant, …)`."""
        self.results = variants[0].results
        self._concrete = variants[0].concrete
        self._numbers: dict[tf.Operation, dict[str, int]] = {}  # tables by operation and attribute
        self._known: dict[Hashable, int] = {}  # tables by content
        concretes = [own.concrete for own in variants]
        graphs = [own.graph for own in concretes]
        for operations in _side_by_side(graphs):
            for name, values in _different_attributes(operations, graphs):
                self._note(operations[0], name, _numbers(operations, name, values))
        _refuse_other_ends(concretes)
        for placeholder, captured in _captured(concretes):
            self._note(placeholder, "captured", captured)

    def __call__(self, variant: tf.Tensor, args: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the results of a variant, by its number, for a flat list of arguments."""
        graph = tf.compat.v1.get_default_graph()
        for function in self._concrete.graph._functions.values():
            graph._add_function_recursive(function)
        picked = [tf.gather(tf.constant(table), variant) for table in self.tables]
        given = dict(
            zip(
                (inner.op for inner in self._concrete.inputs),
                [*args, *self._concrete.captured_inputs],
                strict=True,
            )
        )
        values: dict[tf.Operation, Sequence[tf.Tensor]] = {}
        made: dict[tf.Operation, tf.Operation] = {}
        for operation in self._concrete.graph.get_operations():
            operands = [values[tensor.op][tensor.value_index] for tensor in operation.inputs]
            if operation in self._numbers:
                numbers = {name: picked[table] for name, table in self._numbers[operation].items()}
                values[operation] = [_RULES[operation.type](*operands, **numbers)]
            elif operation in given:
                values[operation] = [tf.convert_to_tensor(given[operation])]
            else:
                before = [made[other] for other in operation.control_inputs if other in made]
                with graph.control_dependencies(before):
                    made[operation] = _made_again(operation, operands, graph)
                values[operation] = made[operation].outputs
        return [values[tensor.op][tensor.value_index] for tensor in self._concrete.outputs]

    def _note(self, operation: tf.Operation, name: str, numbers: Sequence[np.ndarray]) -> None:
        """Note that the variants have these numbers in an operation."""
        contents = tuple(own.tobytes() for own in numbers)
        if all(own == contents[0] for own in contents):
            return
        if sum(map(len, contents)) > _MAX_BYTES:
            raise DifferenceError(f"constants of {len(contents[0]) / 1e6:.0f} MB differ")
        key = numbers[0].shape, numbers[0].dtype, contents
        if key not in self._known:
            self._known[key] = len(self.tables)
            self.tables.append(np.stack(numbers))
        self._numbers.setdefault(operation, {})[name] = self._known[key]


# --- comparing ---------------------------------------------------------------------------------------------------


def _side_by_side(graphs: Sequence[tf.Graph]) -> Iterator[tuple[tf.Operation, ...]]:
    """Yield the operations of graphs that have the same ones, connected in the same way."""
    listed = [graph.get_operations() for graph in graphs]
    places = [{operation: number for number, operation in enumerate(own)} for own in listed]
    for operations in zip(*listed, strict=False):
        first = operations[0]
        other = next((own for own in operations if own.type != first.type), None)
        if other is not None:
            raise DifferenceError(f"one computes {first.type} where the other computes {other.type}")
        connections = [_connections(own, place) for own, place in zip(operations, places, strict=True)]
        if any(own != connections[0] for own in connections):
            raise DifferenceError(f"{first.type} takes another operand")
        yield operations
    longest, shortest = max(listed, key=len), min(map(len, listed))
    if len(longest) > shortest:
        raise DifferenceError(f"only one computes {longest[shortest].type}")


def _connections(operation: tf.Operation, places: Mapping[tf.Operation, int]) -> Hashable:
    return (
        [(places[tensor.op], tensor.value_index) for tensor in operation.inputs],
        [places[other] for other in operation.control_inputs],
    )


def _different_attributes(
    operations: Sequence[tf.Operation], graphs: Sequence[tf.Graph]
) -> Iterator[tuple[str, list[Any]]]:
    """Yield the attributes of an operation that are not equal in all graphs, with their values."""
    attributes = [_attributes(own) for own in operations]
    for name in dict.fromkeys(name for own in attributes for name in own):
        values = [own.get(name) for own in attributes]
        if all(own == values[0] for own in values):
            continue
        functions = [_functions_in(own, graph) for own, graph in zip(values, graphs, strict=True)]
        if not functions[0]:
            yield name, values
            continue
        for same in zip(*functions, strict=True):
            _refuse_other_functions(operations[0].type, same)


def _attributes(operation: tf.Operation) -> dict[str, Any]:
    """Return the attributes that decide what an operation computes."""
    return {name: value for name, value in operation.node_def.attr.items() if name not in _BOOKKEEPING}


def _functions_in(value: Any, graph: tf.Graph) -> list[Any]:
    """Return the functions that an attribute names, as graphs."""
    from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

    if value is None:
        return []
    names = [value.func.name, *(own.name for own in value.list.func)]
    with graph.as_default():  # where functions within these are looked up
        return [function_def_to_graph(graph._get_function(name).cached_definition) for name in names if name]


def _refuse_other_functions(what: str, graphs: Sequence[tf.Graph]) -> None:
    """Raise if functions within an operation differ, also if only in numbers."""
    for operations in _side_by_side(graphs):
        for name, values in _different_attributes(operations, graphs):
            numbers = _numbers(operations, name, values)
            if any(own.tobytes() != numbers[0].tobytes() for own in numbers):
                raise DifferenceError(f"a number within {what} differs")


def _numbers(operations: Sequence[tf.Operation], name: str, values: Sequence[Any]) -> list[np.ndarray]:
    """Return the numbers that an attribute has in several graphs.

    Raises:
        DifferenceError: It is no number, or there is no rule for an operation with a number per member.
    """
    first = operations[0]
    kind: Any = first.outputs[0].dtype if first.outputs else None
    if first.type == "Const" and name == "value":
        arrays = [tf.make_ndarray(own.tensor) for own in values]
        if kind == tf.string and all(map(_only_shown, operations)):
            return arrays[:1]
        if (kind.is_floating or kind.is_complex) and len({array.shape for array in arrays}) == 1:
            return arrays
        one, other = (
            _short(own.tolist()) for own in (arrays[0], next(a for a in arrays if _differ(a, arrays[0])))
        )
        raise DifferenceError(f"a constant is {one} or {other}")
    if name in _NUMBERS.get(first.type, ()):
        return [np.array(own.f, kind.as_numpy_dtype) for own in values]
    other = next(own for own in values if own != values[0])
    raise DifferenceError(f"the {name} of {first.type} is {_shown(values[0])} or {_shown(other)}")


def _only_shown(operation: tf.Operation) -> bool:
    """Return True if a text is a message of a check, in which a layer's name may differ."""
    return all(user.type == "Assert" for tensor in operation.outputs for user in tensor.consumers())


def _refuse_other_ends(concretes: Sequence[ConcreteFunction]) -> None:
    """Raise if functions read tensors at other places, or return the results of other operations."""
    ends = []
    for own in concretes:
        places = {operation: number for number, operation in enumerate(own.graph.get_operations())}
        ends.append([(places[tensor.op], tensor.value_index) for tensor in (*own.inputs, *own.outputs)])
    if any(own != ends[0] for own in ends):
        raise DifferenceError("another tensor is read or returned")


def _captured(concretes: Sequence[ConcreteFunction]) -> Iterator[tuple[tf.Operation, list[np.ndarray]]]:
    """Yield the tensors from outside that are not the same one for all variants, with their numbers.

    Raises:
        DifferenceError: They are no numbers.
    """
    given = len(concretes[0].inputs) - len(concretes[0].captured_inputs)
    inner = concretes[0].inputs[given:]
    for placeholder, *tensors in zip(inner, *(own.captured_inputs for own in concretes), strict=True):
        if all(own is tensors[0] for own in tensors):
            continue
        kind = tensors[0].dtype
        if not (kind.is_floating or kind.is_complex) or any(own.dtype != kind for own in tensors):
            raise DifferenceError("a variable or a tensor from outside is another one")
        yield placeholder.op, [np.asarray(own) for own in tensors]


def _differ(array: np.ndarray, other: np.ndarray) -> bool:
    return array.shape != other.shape or array.tobytes() != other.tobytes()


def _shown(value: Any) -> str:
    return "missing" if value is None else _short(str(value).strip())


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


# --- running -----------------------------------------------------------------------------------------------------


def _made_again(operation: tf.Operation, operands: list[tf.Tensor], graph: tf.Graph) -> tf.Operation:
    """Return the same operation in another graph, on other operands."""
    return graph.create_op(
        operation.type,
        operands,
        [tensor.dtype for tensor in operation.outputs],
        name=operation.name.rpartition("/")[2],
        attrs=_attributes(operation),
    )


def _leaky_relu(x: tf.Tensor, *, alpha: tf.Tensor) -> tf.Tensor:
    return tf.where(x > 0, x, x * alpha)


def _leaky_relu_gradient(gradient: tf.Tensor, x: tf.Tensor, *, alpha: tf.Tensor) -> tf.Tensor:
    return tf.where(x > 0, gradient, gradient * alpha)


# Operations with a number per member, by its names: in the place of a constant, and among the attributes.
_RULES: Mapping[str, Callable[..., tf.Tensor]] = {
    "Const": lambda *, value: value,
    "Placeholder": lambda *, captured: captured,
    "LeakyRelu": _leaky_relu,
    "LeakyReluGrad": _leaky_relu_gradient,
}
_NUMBERS = {"LeakyRelu": ("alpha",), "LeakyReluGrad": ("alpha",)}
