"""Cut Keras models into stages: Functional and Sequential ones, between the calls of their layers."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
from keras import ops, tree
from keras.src.backend import get_keras_mask
from keras.src.models.functional import Functional

from modelfleet.errors import InputError
from modelfleet.formatting import without_period
from modelfleet.frameworks.grouping import crossing_bytes, group
from modelfleet.frameworks.keras.building import copy_model
from modelfleet.frameworks.keras.engine import backend_module
from modelfleet.frameworks.keras.steps import by_key
from modelfleet.frameworks.pieces import BuiltStage, CannotCutError, Piece, Timing
from modelfleet.frameworks.rounds import Timed, shortest_times
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Tensor, Tree

_REPEATS = 3
_PER_STAGE = 8  # every piece is compiled to be measured


def pieces(model: keras.Model, stages: int, example: Tree, train: bool) -> "KerasPieces":
    """Return a model's pieces.

    Raises:
        CannotCutError: The model's graph of layers is not known.
        InputError: The model does not accept the example.
    """
    # Sub-models leave nodes in the layers that they are made of: those to be measured are made of a copy.
    return KerasPieces(_Graph(model), _Graph(copy_model(model)), stages, example, train)


class _Graph:
    """The calls of a model's layers, with names for what they return.

    Names follow from the names of layers, so that they are the same in a copy.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.functional = functional = _functional(model)
        own = [
            node
            for depth in sorted(functional._nodes_by_depth, reverse=True)
            for node in functional._nodes_by_depth[depth]
        ]
        counts: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.tensors: dict[str, Any] = {}
        by_operation = sorted(own, key=lambda node: node.operation._inbound_nodes.index(node))
        for node in by_operation:
            call = counts[id(node.operation)] = counts.get(id(node.operation), -1) + 1
            for number, tensor in enumerate(node.outputs):
                name = f"{node.operation.name}/{call}/{number}"
                self.names[id(tensor)] = name
                self.tensors[name] = tensor
        self.nodes = {self.names[id(node.outputs[0])]: node for node in own if not node.is_input}

    def needs(self, node: Any) -> list[str]:
        """Return the values that a node is called with."""
        return [self.names[id(tensor)] for tensor in node.arguments.keras_tensors]

    def outputs(self) -> list[str]:
        """Return the values that the model returns."""
        return [self.names[id(tensor)] for tensor in self.functional.outputs]

    def stage(self, nodes: Sequence[str], inputs: Sequence[str], outputs: Sequence[str] | None) -> keras.Model:
        """Return a model of some nodes that shares their layers; with `outputs` None, the model's output."""
        known: dict[int, Any] = {}
        given = []
        for name in inputs:
            tensor = self.tensors[name]
            given.append(keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype))
            known[id(tensor)] = given[-1]
        for name in nodes:
            node = self.nodes[name]
            args, keywords = node.arguments.fill_in(known)
            found = tree.flatten(node.operation(*args, **keywords))
            known |= {id(tensor): value for tensor, value in zip(node.outputs, found, strict=True)}
        if outputs is None:
            structure = tree.map_structure(lambda tensor: known[id(tensor)], self.functional._outputs_struct)
        else:
            own = [known[id(self.tensors[name])] for name in outputs]
            structure = own[0] if len(own) == 1 else own
        return keras.Model(given[0] if len(given) == 1 else given, structure)


class KerasPieces:
    """The pieces of one model (see `frameworks.pieces.Pieces`)."""

    reasons: Sequence[str] = ("cut between its layers",)

    def __init__(self, graph: _Graph, copied: _Graph, stages: int, example: Tree, train: bool) -> None:
        """Run, time and group the layers.

        Args:
            graph: The model whose layers the stages get.
            copied: The graph of a copy.
            stages: The number of stages that are wanted.
            example: Inputs of the model.
            train: Measure the backward pass, too.
        """
        self._graph = graph
        self._copy = copied
        self._train = train
        self._order = list(graph.nodes)
        given = _given(graph, example)
        self._values, seconds, masked = _run(copied, self._order, given)
        self._needs = {name: graph.needs(node) for name, node in graph.nodes.items()}
        self._needs[self._order[-1]] = [*self._needs[self._order[-1]], *graph.outputs()]
        crossing = crossing_bytes(len(self._order), self._lifetimes())
        self._ranges = group(self._boundaries(masked), seconds, crossing, stages, _PER_STAGE)
        self.inputs: Mapping[str, int] = {name: _bytes(value) for name, value in given.items()}
        self.pieces: Sequence[Piece] = self._measured()

    def build(self, start: int, stop: int, outputs: Sequence[str]) -> BuiltStage:
        """Return pieces as a model of the original's layers."""
        stage, inputs = self._built(self._graph, start, stop, outputs)
        names = {id(variable): name for name, variable in by_key(self._graph.model.variables).items()}
        paths = {name: names[id(variable)] for name, variable in by_key(stage.variables).items()}
        return BuiltStage(stage, tuple(inputs), paths)

    def measure(self, cuts: Sequence[tuple[int, int, Sequence[str]]]) -> list[Timing]:
        """Return the time of each stage."""
        programs = []
        for cut in cuts:
            stage, inputs = self._built(self._copy, *cut)
            programs.append(_timed(stage, [self._values[name] for name in inputs], self._train))
        return [Timing(first, max(0.0, both - first)) for first, both in shortest_times(programs)]

    def check(self, cuts: Sequence[tuple[int, int, Sequence[str]]]) -> None:
        """Run stages, and compare their output with the model's."""
        known = {name: self._values[name] for name in self.inputs}
        found: Any = None
        for start, stop, outputs in cuts:
            stage, inputs = self._built(self._copy, start, stop, outputs)
            own = [known[name] for name in inputs]
            found = stage(own[0] if len(own) == 1 else own, training=False)
            known |= zip(outputs, [found] if len(outputs) == 1 else found if outputs else [], strict=True)
        expected = _called(self._copy, known)
        for one, other in zip(tree.flatten(found), tree.flatten(expected), strict=True):
            if not bool(ops.all(ops.isclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True))):
                raise CannotCutError("its stages compute other outputs than it does itself")

    def _built(
        self, graph: _Graph, start: int, stop: int, outputs: Sequence[str]
    ) -> tuple[keras.Model, list[str]]:
        first, last = self._ranges[start][0], self._ranges[stop - 1][1]
        inputs = self._arriving(first, last)
        is_last = last == len(self._order)
        return graph.stage(self._order[first:last], inputs, None if is_last else outputs), inputs

    def _arriving(self, first: int, last: int) -> list[str]:
        """Return the values from outside that a range of nodes needs."""
        own = self._order[first:last]
        inside = {made for name in own for made in self._made(name)}
        return list(dict.fromkeys(value for name in own for value in self._needs[name] if value not in inside))

    def _made(self, name: str) -> list[str]:
        return [self._graph.names[id(tensor)] for tensor in self._graph.nodes[name].outputs]

    def _last_uses(self) -> dict[str, int]:
        return {value: index for index, name in enumerate(self._order) for value in self._needs[name]}

    def _lifetimes(self) -> Iterator[tuple[int, int, int]]:
        last = self._last_uses()
        for index, name in enumerate(self._order):
            for value in self._made(name):
                yield index, last.get(value, index), _bytes(self._values[value])

    def _boundaries(self, masked: set[str]) -> list[int]:
        """Return where a cut is possible: not between uses of a variable, nor between a mask and its last user."""
        last = self._last_uses()
        inside: set[int] = set()
        first: dict[int, int] = {}
        for index, name in enumerate(self._order):
            for value in self._made(name):
                if value in masked:
                    inside.update(range(index + 1, last.get(value, index) + 1))
            for variable in getattr(self._graph.nodes[name].operation, "variables", []):
                inside.update(range(first.setdefault(id(variable), index) + 1, index + 1))
        return [index for index in range(1, len(self._order)) if index not in inside]

    def _measured(self) -> list[Piece]:
        last = self._last_uses()
        values = [[own for name in self._order[slice(*ends)] for own in self._made(name)] for ends in self._ranges]
        makes = [
            {own: _bytes(self._values[own]) for own in made if last.get(own, 0) >= stop}
            for made, (_, stop) in zip(values, self._ranges, strict=True)
        ]
        timings = self.measure([(number, number + 1, tuple(own)) for number, own in enumerate(makes)])
        found = []
        for number, (start, _) in enumerate(self._ranges):
            stage, inputs = self._built(self._copy, number, number + 1, tuple(makes[number]))
            kept = values[number] if self._train else makes[number]
            found.append(
                Piece(
                    name=self._graph.nodes[self._order[start]].operation.name,
                    timing=timings[number],
                    parameters=stage.count_params(),
                    weight_bytes=sum(_bytes(variable) for variable in stage.variables),
                    trained_bytes=sum(_bytes(own) for own in stage.trainable_variables) if self._train else 0,
                    activation_bytes=sum(_bytes(self._values[own]) for own in kept),
                    makes=makes[number],
                    needs=tuple(inputs),
                )
            )
        return found


def _functional(model: keras.Model) -> Functional:
    """Return the graph of a model's layers."""
    found = model._functional if isinstance(model, keras.Sequential) else model
    if not isinstance(found, Functional) or type(found).call is not Functional.call:
        raise CannotCutError(
            "it has a `call` of its own, and Keras knows the graph of Functional and Sequential models only"
        )
    return found


def _given(graph: _Graph, example: Tree) -> dict[str, Tensor]:
    """Return the values of the model's inputs, in the order of the example's leaves."""
    structure = graph.functional._inputs_struct
    pairs: list[tuple[Any, Any]]
    if isinstance(example, Mapping):
        named = structure if isinstance(structure, dict) else {own.name: own for own in graph.functional.inputs}
        pairs = [(named.get(key), leaf) for key, leaf in example.items()]
    else:
        own = graph.functional.inputs
        parts = leaves(example)
        pairs = list(zip(own, parts, strict=True)) if len(own) == len(parts) else [(None, None)]
    if any(tensor is None for tensor, _ in pairs) or len(pairs) != len(graph.functional.inputs):
        expected = ", ".join(f"{own.name} {own.shape}" for own in graph.functional.inputs)
        raise InputError(
            f"the example has other inputs than the {type(graph.model).__name__}, which takes {expected}. "
            f"Give one array for each of them, as to the model itself."
        )
    return {graph.names[id(tensor)]: ops.convert_to_tensor(leaf, dtype=tensor.dtype) for tensor, leaf in pairs}


def _called(graph: _Graph, values: Mapping[str, Tensor]) -> Tree:
    """Return the model's output for values of its inputs."""
    own = tree.map_structure(lambda tensor: values[graph.names[id(tensor)]], graph.functional._inputs_struct)
    return graph.functional(own, training=False)


def _run(
    graph: _Graph, order: Sequence[str], given: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[float], set[str]]:
    """Return all values, the seconds of each node, and the values that have a mask."""
    try:
        _called(graph, given)
    except Exception as error:  # a layer may raise anything
        shapes = map_tree(lambda leaf: tuple(leaf.shape), list(given.values()))
        raise InputError(
            f"the {type(graph.model).__name__} does not accept the example {shapes}: {without_period(error)}. "
            f"Give an example with the shapes of a batch's inputs."
        ) from error
    seconds = [float("inf")] * len(order)
    values: dict[str, Tensor] = {}
    for _ in range(_REPEATS):
        values = dict(given)
        known = {id(graph.tensors[name]): value for name, value in given.items()}
        for index, name in enumerate(order):
            node = graph.nodes[name]
            args, keywords = node.arguments.fill_in(known)
            start = time.perf_counter()
            found = tree.flatten(node.operation(*args, **keywords))
            ops.convert_to_numpy(found[0])  # waits for it
            seconds[index] = min(seconds[index], time.perf_counter() - start)
            for tensor, value in zip(node.outputs, found, strict=True):
                known[id(tensor)] = values[graph.names[id(tensor)]] = value
    masked = {name for name, value in values.items() if get_keras_mask(value) is not None}
    return values, seconds, masked


def _timed(stage: keras.Model, inputs: Sequence[Tensor], train: bool) -> Timed:
    """Return a function for the seconds of a stage: forward, and with its gradients. It runs compiled."""
    trained = stage.trainable_variables
    is_float = [keras.backend.is_float_dtype(keras.backend.standardize_dtype(own.dtype)) for own in inputs]

    def compute(values: Sequence[Tensor]) -> Tensor:
        own = iter(values[len(trained) :])
        x = [next(own) if floating else given for given, floating in zip(inputs, is_float, strict=True)]
        with keras.StatelessScope(list(zip(trained, values, strict=False))):
            found = tree.flatten(stage(x[0] if len(x) == 1 else x, training=train))
        return sum((ops.sum(ops.cast(part, "float32")) for part in found), start=ops.zeros(()))

    values = [variable.value for variable in trained]
    values += [given for given, floating in zip(inputs, is_float, strict=True) if floating]
    forward, both = backend_module.timed_programs(compute, values)

    def once() -> tuple[float, float]:
        start = time.perf_counter()
        forward()
        first = time.perf_counter() - start
        if not train or not values:
            return first, first
        start = time.perf_counter()
        both()
        return first, time.perf_counter() - start

    return once


def _bytes(tensor: Tensor) -> int:
    size = 1
    for length in tensor.shape:
        size *= int(length)
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return size * (1 if dtype == "bool" else int("".join(filter(str.isdigit, dtype.partition("_")[0]))[-2:]) // 8)
