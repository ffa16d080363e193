"""Functions of trees as TensorFlow graphs, one for every set of shapes; and XLA's form of those that run long.

A graph runs at once as TensorFlow has it. If enough is left to do, XLA compiles it in a thread beside the
training. Both forms are timed, and the faster one is used from then on.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from modelfleet.types import Tree

Function = Callable[..., Tree]
Leaf: TypeAlias = tf.Tensor | tf.TensorSpec

LONG = 6.0  # seconds left to run; with fewer, XLA's 1 to 5 seconds of compiling do not pay off
TRIALS = 16  # calls that are timed to see which form is faster: half of them XLA's, half of them not

# XLA draws other random numbers than TensorFlow does without it, and a member must draw what it draws alone. Its
# convolutions on a CPU take several times as long: not worth a trial.
_NOT_FOR_XLA = re.compile(r"Random|Multinomial|TruncatedNormal|Conv[23][dD]")


class ConcreteFunction(Protocol):
    """A function that TensorFlow has traced for certain shapes (`tf.types.experimental.ConcreteFunction`)."""

    graph: tf.Graph
    inputs: Sequence[tf.Tensor]
    outputs: Sequence[tf.Tensor]
    captured_inputs: Sequence[tf.Tensor]

    def __call__(self, *tensors: tf.Tensor) -> Sequence[tf.Tensor]:
        """Return the function's results."""
        ...


class Program:
    """A function of trees of tensors and arrays; None holds no tensor. Numbers of Python become int32 tensors.

    Args:
        function: The function.
        device: Where it runs.
        calls_left: Returns how often it will still be called, as far as is known.
    """

    def __init__(self, function: Function, device: str, calls_left: Callable[[], float] = lambda: 0) -> None:
        self._function = function
        self._device = device
        self._calls_left = calls_left
        self._graphs: dict[Hashable, Graph] = {}
        self._recent: tuple[Tree, tuple[list[tf.Tensor], Hashable]] = None, ([], None)

    def __call__(self, *args: Tree) -> Tree:
        """Run the function. The first call with new shapes traces it."""
        graph, tensors = self._graph(args)
        found = graph(tensors, self._calls_left())
        tree = filled(graph.structure, iter(found))
        # The next step is usually given what this one returns, whose tensors need not be flattened again.
        self._recent = tree, (found, graph.key)
        return tree

    def trace(self, args: Sequence[Tree]) -> "Graph":
        """Return the graph for arguments like these."""
        return self._graph(args)[0]

    @property
    def graphs(self) -> list["Graph"]:
        """Return all graphs that were traced."""
        return list(self._graphs.values())

    def _graph(self, args: Sequence[Tree]) -> tuple["Graph", list[tf.Tensor]]:
        """Return the graph for arguments like these, and the tensors of the arguments."""
        tensors: list[tf.Tensor] = []
        keys: list[Hashable] = []
        for arg in args:
            recent, known = self._recent
            own, key = known if arg is not None and arg is recent else flat(arg)
            tensors += own
            keys.append(key)
        graph = self._graphs.get(tuple(keys))
        if graph is None:
            graph = self._graphs[tuple(keys)] = Graph(self._function, args, tensors, self._device)
        return graph, tensors


class Graph:
    """A function for arguments of certain shapes."""

    def __init__(
        self, function: Function, args: Sequence[Tree], tensors: Sequence[tf.Tensor], device: str
    ) -> None:
        structure: Tree = None

        def results(*values: tf.Tensor) -> list[tf.Tensor]:
            nonlocal structure
            structure = function(*filled(tuple(args), iter(values)))
            return flat(structure)[0]

        self._device = device
        with tf.device(device):
            self.concrete: ConcreteFunction = traced(results, tensors)
        # With the graph's own outputs, so that nothing is kept that only lived while it was traced.
        self.structure = filled(structure, iter(self.concrete.outputs))
        self.key = flat(self.structure)[1]
        self._plain = _Call(self.concrete)
        self._xla: _Call | None = None
        self._worth_trying = not any(_NOT_FOR_XLA.search(kind) for kind in operations(self.concrete))
        self._thread: threading.Thread | None = None
        self._trials = 0

    @property
    def compiled(self) -> bool:
        """Return True if the form compiled by XLA was chosen."""
        return self._xla is not None and self._trials >= TRIALS

    @property
    def compiling(self) -> bool:
        """Return True if XLA is compiling this graph."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until XLA has compiled the graph."""
        if self._thread is not None:
            self._thread.join()

    def __call__(self, tensors: Sequence[tf.Tensor], calls_left: float = 0) -> list[tf.Tensor]:
        """Return the function's results, flat. Within another graph, this calls the graph."""
        if not tf.executing_eagerly():
            return list(self.concrete(*tensors))
        with tf.device(self._device):
            if self._xla is not None:
                return self._with_xla(self._xla, tensors)
            if self._worth_trying and calls_left:
                self._consider(tensors, calls_left)
            return self._plain(tensors)

    def _consider(self, tensors: Sequence[tf.Tensor], calls_left: float) -> None:
        """Have XLA compile the graph if enough is left to do, or as `MODELFLEET_COMPILE` says."""
        asked = os.environ.get("MODELFLEET_COMPILE", "auto")
        if asked == "never" or (asked == "auto" and self._plain.seconds * calls_left <= LONG):
            return
        self._worth_trying = False
        self._thread = threading.Thread(target=self._compile, args=(list(tensors),))
        self._thread.start()
        if asked == "now":
            self._thread.join()

    def _with_xla(self, xla: "_Call", tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Run one of the two forms: in turns while they are timed, and then the faster one."""
        if self._trials >= TRIALS:
            return xla(tensors)
        if self._trials == 0:
            xla.forget()
            self._plain.forget()
        self._trials += 1
        found = xla(tensors) if self._trials % 2 else self._plain(tensors)
        if self._trials == TRIALS and xla.seconds > self._plain.seconds:
            self._xla = None
        return found

    def _compile(self, tensors: Sequence[tf.Tensor]) -> None:
        # The graph is there already, so none of the model's Python runs in this thread.
        concrete = self.concrete
        compiled = tf.function(lambda *values: concrete(*values), autograph=False, jit_compile=True)
        try:
            with tf.device(self._device):
                # `_Call` ignores how a function itself is to be compiled, but not how those within it are.
                xla = _Call(traced(lambda *values: compiled(*values), tensors))
                xla(tensors)  # XLA compiles at the first call
        except tf.errors.OpError:  # XLA lacks some operations
            return
        self._xla = xla


class _Call:
    """Calls a graph with flat tensors, as directly as TensorFlow allows, and records its shortest time."""

    def __init__(self, concrete: ConcreteFunction) -> None:
        self._concrete = concrete  # also keeps it alive: TensorFlow knows it by name only
        self._captured = list(concrete.captured_inputs)
        self._dtypes = [tensor.dtype for tensor in concrete.outputs]
        self.seconds = 0.0  # 0 until it has run a few times: the first calls take longer
        self._warming = 3

    def __call__(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        begun = time.perf_counter()
        found = tf.raw_ops.StatefulPartitionedCall(
            args=[*tensors, *self._captured], Tout=self._dtypes, f=self._concrete
        )
        taken = time.perf_counter() - begun
        self._warming -= 1
        if self._warming == 0:
            self.seconds = taken
        elif self._warming < 0:
            self.seconds = min(self.seconds, taken)
        return found

    def forget(self) -> None:
        """Forget the times of earlier calls."""
        self.seconds, self._warming = 0.0, 1


def operations(concrete: ConcreteFunction) -> set[str]:
    """Return the kinds of operations in a graph and in all graphs that it calls."""
    definition = concrete.graph.as_graph_def()
    own = {node.op for node in definition.node}
    return own | {node.op for function in definition.library.function for node in function.node_def}


def live_bytes(concrete: ConcreteFunction) -> int:
    """Return the peak size of a graph's tensors, if its operations run in the order of the trace.

    Inputs, outputs, and tensors within loops and calls are not counted.
    """
    steps = concrete.graph.get_operations()
    last = {id(tensor): number for number, step in enumerate(steps) for tensor in step.inputs}
    kept = {id(tensor) for tensor in (*concrete.inputs, *concrete.outputs)}
    ending: dict[int, int] = {}
    now = most = 0
    for number, step in enumerate(steps):
        for tensor in step.outputs:
            if id(tensor) in last and id(tensor) not in kept and tensor.shape.is_fully_defined():
                size = tensor.shape.num_elements() * tensor.dtype.size
                now += size
                ending[last[id(tensor)]] = ending.get(last[id(tensor)], 0) + size
        most = max(most, now)
        now -= ending.pop(number, 0)
    return most


def traced(function: Function, tensors: Sequence[tf.Tensor | tf.TensorSpec]) -> ConcreteFunction:
    """Return a function of flat tensors, traced for tensors like these."""
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def flat(tree: Tree) -> tuple[list[Any], Hashable]:
    """Return a tree's tensors or specs, and a key that trees of another structure or other shapes do not have."""
    tensors: list[Leaf] = []
    parts: list[Hashable] = []
    _flatten(tree, tensors, parts)
    return tensors, tuple(parts)


def _flatten(tree: Tree, tensors: list[Leaf], parts: list[Hashable]) -> None:
    """Append a tree's tensors, and the parts of its key."""
    if isinstance(tree, dict):
        names = sorted(tree)  # as tf.nest does: the order in which a dict was filled does not matter
        parts.append(tuple(names))
        for name in names:
            _flatten(tree[name], tensors, parts)
    elif isinstance(tree, list | tuple):
        parts.append((type(tree), len(tree)))
        for value in tree:
            _flatten(value, tensors, parts)
    elif tree is None:
        parts.append(None)
    else:
        tensor = tree if tf.is_tensor(tree) or isinstance(tree, tf.TensorSpec) else _tensor(tree)
        parts.append((tuple(tensor.shape), tensor.dtype))
        tensors.append(tensor)


def _tensor(value: np.ndarray | int) -> tf.Tensor:
    return tf.constant(value, dtype=tf.int32) if isinstance(value, int) else tf.convert_to_tensor(value)


def filled(tree: Tree, following: Iterator[Leaf]) -> Tree:
    """Return the same tree with other tensors, in the order of `flat`."""
    if isinstance(tree, dict):
        return {name: filled(tree[name], following) for name in sorted(tree)}
    if isinstance(tree, tuple):
        values = [filled(value, following) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if isinstance(tree, list):
        return [filled(value, following) for value in tree]
    return None if tree is None else next(following)
