"""Functions of trees as TensorFlow graphs, one for every set of shapes; and XLA's form of those that run long.

A graph runs at once as TensorFlow has it. Where enough is left to do, XLA compiles it in a thread beside the
training, and the faster of the two goes on.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

Function = Callable[..., Any]

LONG = 6.0  # seconds still to run, from which on XLA's 1 to 5 seconds of compiling are won back
TRIALS = 16  # calls, half of them XLA's form and half of them not, to see which is faster

# XLA draws other random numbers than TensorFlow does without it, and a member must draw what it draws alone. Its
# convolutions on a CPU take several times as long: not worth a trial.
_NOT_FOR_XLA = re.compile(r"Random|Multinomial|TruncatedNormal|Conv[23][dD]")


class Program:
    """A function of trees of tensors and arrays; None holds no tensor. Numbers of Python become int32 tensors.

    `calls_left` says how often it will be called yet, as far as is known.
    """

    def __init__(self, function: Function, device: str, calls_left: Callable[[], float] = lambda: 0) -> None:
        self._function = function
        self._device = device
        self._calls_left = calls_left
        self._graphs: dict[Any, Graph] = {}
        self._recent: tuple[Any, list[Any], Any] = (None, [], None)

    def __call__(self, *args: Any) -> Any:
        """Run it; the first call with new shapes traces."""
        tensors, key = self._flat(args)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = Graph(self._function, args, tensors, self._device)
        found = graph(tensors, self._calls_left())
        tree = _filled(graph.structure, iter(found))
        # What a step gives is what the next one is given: its tensors are at hand then.
        self._recent = tree, found, graph.gives
        return tree

    def trace(self, args: Sequence[Any]) -> "Graph":
        """Have the graph for arguments like these."""
        tensors, key = self._flat(args)
        if key not in self._graphs:
            self._graphs[key] = Graph(self._function, args, tensors, self._device)
        return self._graphs[key]

    @property
    def graphs(self) -> list["Graph"]:
        """All that was traced."""
        return list(self._graphs.values())

    def _flat(self, args: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the tensors of the arguments, and a key for their structure and shapes."""
        tensors: list[Any] = []
        keys: list[Any] = []
        for arg in args:
            if arg is not None and arg is self._recent[0]:
                own, key = self._recent[1:]
            else:
                own, parts = [], []
                _flatten(arg, own, parts)
                key = tuple(parts)
            tensors += own
            keys.append(key)
        return tensors, tuple(keys)


class Graph:
    """A function for arguments of certain shapes."""

    def __init__(self, function: Function, args: Sequence[Any], tensors: Sequence[Any], device: str) -> None:
        self.structure: Any = None

        def flat(*values: Any) -> list[Any]:
            self.structure = function(*_filled(tuple(args), iter(values)))
            found: list[Any] = []
            _flatten(self.structure, found, [])
            return found

        self._device = device
        with tf.device(device):
            specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
            traced = tf.function(flat, autograph=False)
            self.concrete = traced.get_concrete_function(*specs)
        found = self.concrete.outputs
        self.structure = _filled(self.structure, iter(found))  # without what only lived while it was traced
        parts: list[Any] = []
        _flatten(self.structure, [], parts)
        self.gives = tuple(parts)
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
        """Wait until XLA is done with it."""
        if self._thread is not None:
            self._thread.join()

    def __call__(self, tensors: Sequence[Any], calls_left: float = 0) -> list[Any]:
        """Return the function's results, flat. Within another graph, this calls the graph."""
        if not tf.executing_eagerly():
            return list(self.concrete(*tensors))
        with tf.device(self._device):
            if self._xla is not None:
                return self._with_xla(self._xla, tensors)
            if self._worth_trying and calls_left:
                self._consider(tensors, calls_left)
            return self._plain(tensors)

    def _consider(self, tensors: Sequence[Any], calls_left: float) -> None:
        """Have XLA compile it if enough is left to do, or as `MODELFLEET_COMPILE` says."""
        asked = os.environ.get("MODELFLEET_COMPILE", "auto")
        if asked == "never" or (asked == "auto" and self._plain.seconds * calls_left <= LONG):
            return
        self._worth_trying = False
        self._thread = threading.Thread(target=self._compile, args=(list(tensors),))
        self._thread.start()
        if asked == "now":
            self._thread.join()

    def _with_xla(self, xla: "_Call", tensors: Sequence[Any]) -> list[Any]:
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

    def _compile(self, tensors: Sequence[Any]) -> None:
        # The graph is there already, so none of the model's Python runs in this thread.
        concrete = self.concrete
        compiled = tf.function(lambda *values: concrete(*values), autograph=False, jit_compile=True)
        # `_Call` passes over how a function is to be compiled, but not those that are called within it.
        outer = tf.function(lambda *values: compiled(*values), autograph=False)
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        try:
            with tf.device(self._device):
                xla = _Call(outer.get_concrete_function(*specs))
                xla(tensors)  # XLA compiles at the first call
        except tf.errors.OpError:  # it has not every operation
            return
        self._xla = xla


class _Call:
    """Calls a graph with flat tensors, as directly as TensorFlow lets one, and notes its shortest time."""

    def __init__(self, concrete: Any) -> None:
        self._concrete = concrete  # also keeps it alive: TensorFlow knows it by name only
        self._captured = list(concrete.captured_inputs)
        self._dtypes = [tensor.dtype for tensor in concrete.outputs]
        self.seconds = 0.0  # until it has run a few times: the first calls take longer
        self._warming = 3

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
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
        """Begin anew to time it."""
        self.seconds, self._warming = 0.0, 1


def operations(concrete: Any) -> set[str]:
    """Return the kinds of operations in a graph and in all graphs that it calls."""
    definition = concrete.graph.as_graph_def()
    own = {node.op for node in definition.node}
    return own | {node.op for function in definition.library.function for node in function.node_def}


def live_bytes(concrete: Any) -> int:
    """Return the peak size of a graph's tensors, if its operations run in the order of the trace.

    Without what goes in and comes out; what loops and calls take within themselves is not counted.
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


def _flatten(tree: Any, tensors: list[Any], parts: list[Any]) -> None:
    """Add a tree's tensors, and what tells it from trees of other structure or shapes."""
    if isinstance(tree, dict):
        names = sorted(tree)  # as tf.nest does: the order in which a dict was filled says nothing
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
        tensor = tree if tf.is_tensor(tree) else _tensor(tree)
        parts.append((tuple(tensor.shape), tensor.dtype))
        tensors.append(tensor)


def _tensor(value: Any) -> Any:
    return tf.constant(value, dtype=tf.int32) if isinstance(value, int) else tf.convert_to_tensor(value)


def _filled(tree: Any, following: Iterator[Any]) -> Any:
    """Return the same tree with other tensors, in the order of `_flatten`."""
    if isinstance(tree, dict):
        return {name: _filled(tree[name], following) for name in sorted(tree)}
    if isinstance(tree, tuple):
        values = [_filled(value, following) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if isinstance(tree, list):
        return [_filled(value, following) for value in tree]
    return None if tree is None else next(following)
