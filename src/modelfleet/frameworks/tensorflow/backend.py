"""TensorFlow for the functional engine: maps functions over members, compiles them, and loops over steps."""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import tensorflow as tf

from modelfleet.frameworks.tensorflow import rules
from modelfleet.frameworks.tensorflow.arrays import Array, from_host
from modelfleet.frameworks.tensorflow.programs import Function, Graph, Program, live_bytes
from modelfleet.trees import leaves, map_tree, rebuild
from modelfleet.types import Tensor, Tree

# How long their results are depends on the numbers.
_UNKNOWN_LENGTH = {"Where", "Unique", "UniqueV2", "UniqueWithCounts"}
_LOOPED = re.compile(r"Using a while_loop for converting (\w+)")
_GLOBAL = re.compile(r"Random(Uniform(Int)?|StandardNormal|Gamma|PoissonV2|Shuffle)|TruncatedNormal|Multinomial")
_MISSING = re.compile(r"No pfor vectorization defined for (\w+)")

rules.register()


class TensorFlowBackend:
    """TensorFlow on one device (see `functional.Backend`)."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.calls_left = 0.0
        """Number of calls of train steps that are left."""
        self.looped: set[str] = set()
        """Operations of mapped steps that run for one member after the other, as they can't be vectorized."""
        self._steps: list[Program] = []

    @property
    def name(self) -> str:
        """Return how steps run."""
        compiled = any(graph.compiled for graph in self.graphs)
        return "XLA" if compiled else "tf.function"

    @property
    def graphs(self) -> list[Graph]:
        """Return the graphs of all train steps."""
        return [graph for program in self._steps for graph in program.graphs]

    def tensor(self, array: np.ndarray) -> tf.Tensor:
        """Return a copy of an array as a tensor on the device."""
        with tf.device(self.device):
            # Copied: on a CPU the tensor may otherwise read NumPy's memory in place.
            return tf.identity(tf.constant(np.array(array)))

    def host(self, tree: Tree) -> Tree:
        """Return a tree of tensors as NumPy arrays; bfloat16 as float32."""
        return map_tree(_host, tree)

    def exactly(self, tree: Tree) -> Tree:
        """Return a tree of tensors as NumPy arrays of the same dtypes."""
        return map_tree(np.asarray, tree)

    def loaded(self, array: tf.Tensor | np.ndarray, like: tf.Tensor) -> tf.Tensor:
        """Return an array that `arrays.host` returned as a tensor like another."""
        return self.tensor(from_host(np.asarray(array), like))

    def map(self, function: Function, args: Sequence[Tree], mapped: Sequence[bool]) -> Tree:
        """Return `function` of every member."""
        own = [arg for arg, yes in zip(args, mapped, strict=True) if yes]

        def member(values: list[tf.Tensor]) -> list[tf.Tensor]:
            parts = iter(rebuild(own, values))
            structure = function(*(next(parts) if yes else arg for arg, yes in zip(args, mapped, strict=True)))
            _refuse_global_draws()
            trees.append(structure)
            return leaves(structure)

        trees: list[Tree] = []
        looped: set[str] = set()
        with _collecting_loops(looped):
            found = tf.vectorized_map(member, leaves(own), fallback_to_while_loop=True)
        if looped & _UNKNOWN_LENGTH:
            raise NotImplementedError(
                f"the length of what {min(looped & _UNKNOWN_LENGTH)} gives depends on the member's numbers"
            )
        self.looped |= looped
        return rebuild(trees[-1], found)

    def without_axis(self, tree: Tree) -> Tree:
        """Return the tensors of the only member without the member axis."""
        # A tensor's [0] takes four constants, and several times as long to trace.
        return map_tree(lambda t: tf.squeeze(t, [0]) if isinstance(t, tf.Tensor) else t[0], tree)

    def with_axis(self, tree: Tree) -> Tree:
        """Return the tensors of a member with a member axis."""
        return map_tree(lambda t: tf.expand_dims(t, 0) if isinstance(t, tf.Tensor) else t[None], tree)

    def first(self, tree: Tree) -> Tree:
        """Return the first member's part of every tensor."""
        return map_tree(lambda t: t[0], tree)

    def where(self, chosen: tf.Tensor, new: Tensor, old: Tensor) -> tf.Tensor:
        """Return `new` for the members that are chosen, `old` for the others."""
        rank = len(old.shape) if tf.is_tensor(old) else 0
        if chosen.shape[0] != 1:  # that of a single member fits any shape
            chosen = tf.reshape(chosen, [-1, *[1] * (rank - 1)])
        found = tf.where(chosen, new, old)
        if rank:
            found.set_shape(old.shape)
        return found

    def is_finite(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return True for each number that is finite."""
        return tf.math.is_finite(tensor)

    def take(self, tree: Tree, rows: tf.Tensor) -> Tree:
        """Return the rows of every tensor."""
        return map_tree(lambda t: tf.gather(t, rows), tree)

    def put(self, tree: Tree, rows: tf.Tensor, part: Tree) -> Tree:
        """Return every tensor with some of its rows replaced."""
        places = tf.expand_dims(rows, 1)

        def replaced(tensor: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
            return tf.tensor_scatter_nd_update(tensor, places, tf.cast(own, tensor.dtype))

        return tf.nest.map_structure(replaced, tree, part)

    def join(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return tensors as one, along their first axis."""
        return tf.concat(list(tensors), 0)

    def lengthened(self, tree: Tree, length: int) -> Tree:
        """Return every array with a longer first axis."""
        return map_tree(lambda leaf: _lengthened(leaf, length), tree)

    def loop(self, step: Callable[[Tree, Tree, tf.Tensor], Tree], state: Tree, xs: Tree, count: tf.Tensor) -> Tree:
        """Return the state after `count` steps."""

        def body(number: tf.Tensor, state: Tree) -> tuple[tf.Tensor, Tree]:
            return number + 1, step(state, map_tree(lambda x: x[number], xs), number)

        return tf.while_loop(lambda number, _: number < count, body, (tf.constant(0), state))[1]

    def compile(self, function: Function, *, donate: bool = False) -> Program:
        """Return the function as TensorFlow's graphs. Only graphs that replace the state run long."""
        if not donate:
            return Program(function, self.device)
        self._steps.append(Program(function, self.device, lambda: self.calls_left))
        return self._steps[-1]

    def within(self, program: Function, function: Function) -> Function:
        """Return the program: a graph can call its graph."""
        return program

    def trace(self, program: Function, args: Sequence[Tree]) -> None:
        """Trace a program. Raise what the tracing raises."""
        assert isinstance(program, Program)
        program.trace(args)

    def shapes(self, function: Function, *args: Tree) -> Tree:
        """Return the shapes of a function's results without computing them."""
        return Program(function, self.device).trace(args).structure

    def working_bytes(self, program: Function, args: Sequence[Tree]) -> int | None:
        """Return the memory that a program needs beside its arguments and results, by its graph."""
        assert isinstance(program, Program)
        return live_bytes(program.trace(args).concrete)

    def reason(self, error: Exception) -> str:
        """Return one line that says why a function could not be traced."""
        missing = _MISSING.search(str(error))
        if missing is not None:
            return f"{missing[1]} has no form for several members (tf.vectorized_map)"
        if "'variant'" in str(error):  # TensorFlow 2.21 has no zeros for the list that such a gradient is kept in
            return "a loop over time steps has a gradient with no form for several members; unroll=True has one"
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return f"{type(error).__name__}: {line}".rstrip(".: ")

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error means that the device is out of memory."""
        return isinstance(error, tf.errors.ResourceExhaustedError | MemoryError)


@contextmanager
def _collecting_loops(found: set[str]) -> Iterator[None]:
    """Collect the operations that `vectorized_map` has no form for, which only its log names."""
    logger = logging.getLogger("tensorflow")
    level = logger.level

    def collect(record: logging.LogRecord) -> bool:
        match = _LOOPED.match(record.getMessage())
        if match is not None:
            found.add(match[1])
        # The exception of a failure holds all that is logged of it.
        return False

    logger.addFilter(collect)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeFilter(collect)


def _refuse_global_draws() -> None:
    """Raise NotImplementedError for draws from TensorFlow's global generator.

    A member's draws would depend on the other members.
    """
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if _GLOBAL.fullmatch(operation.type):
            raise NotImplementedError(
                f"{operation.type} draws from TensorFlow's global generator; keras.random with a SeedGenerator "
                f"of the layer's own can be fused"
            )


def _host(tensor: tf.Tensor | np.ndarray) -> np.ndarray:
    array = np.asarray(tensor)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _lengthened(leaf: Tensor | np.ndarray, length: int) -> Array:
    if isinstance(leaf, np.ndarray):
        return np.concatenate([leaf, np.zeros((length - len(leaf), *leaf.shape[1:]), leaf.dtype)])
    return tf.concat([leaf, tf.zeros([length - leaf.shape[0], *leaf.shape[1:]], leaf.dtype)], 0)
