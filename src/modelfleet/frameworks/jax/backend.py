"""JAX as the functional engine uses it: to map over members, compile, and loop over steps."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from modelfleet.frameworks.jax.arrays import from_host
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Tree

Function = Callable[..., Any]

# A third less time to compile than at XLA's own level, and steps that are no slower (jax 0.10, small networks).
_CPU_OPTIONS = {"xla_backend_optimization_level": 1}
# XLA's newer code for fused operations takes twice as long to compile. It pays for large arrays (jax 0.10).
_QUICK_OPTIONS = {**_CPU_OPTIONS, "xla_cpu_use_fusion_emitters": False}
_QUICK = 1 << 19  # bytes of a program's first argument, the state; steps on less are no slower

_SMALL = 1 << 27  # bytes; less is no risk for any lane

_REASONS = {  # why a function can't be traced, the narrower classes first
    jax.errors.TracerBoolConversionError: "its Python branches on an array's values (use jnp.where or lax.cond)",
    jax.errors.TracerArrayConversionError: "it passes an array to NumPy (use jax.numpy)",
    jax.errors.ConcretizationTypeError: "its Python needs an array's values as numbers while it is traced",
}


class JaxBackend:
    """JAX on one device (see `functional.Backend`)."""

    name = "jit"

    def __init__(self, device: jax.Device) -> None:
        self.device = device

    def tensor(self, array: np.ndarray) -> jax.Array:
        """Return a copy of an array as a tensor on the device, in a dtype that JAX has there."""
        # Copied, which device_put does not do on the CPU even with may_alias=False (jax 0.10): programs write over
        # their state, and the owner of the array may write to the array.
        return jax.device_put(np.array(array), self.device)

    def host(self, tree: Tree) -> Tree:
        """Return a tree of tensors as NumPy arrays; bfloat16 as float32."""
        return map_tree(_host, jax.device_get(tree))

    def exactly(self, tree: Tree) -> Tree:
        """Return a tree of tensors as NumPy arrays of the same dtypes."""
        return map_tree(np.asarray, jax.device_get(tree))

    def loaded(self, array: jax.Array | np.ndarray, like: jax.Array) -> jax.Array:
        """Return an array that `arrays.host` returned as a tensor like another."""
        return self.tensor(from_host(np.asarray(array), like))

    def map(self, function: Function, args: Sequence[Tree], mapped: Sequence[bool]) -> Tree:
        """Return `function` of every member."""
        return jax.vmap(function, in_axes=tuple(0 if own else None for own in mapped))(*args)

    def without_axis(self, tree: Tree) -> Tree:
        """Return the tensors of the only member without the member axis."""
        return map_tree(lambda t: lax.squeeze(t, (0,)) if isinstance(t, jax.Array) else t[0], tree)

    def with_axis(self, tree: Tree) -> Tree:
        """Return the tensors of a member with a member axis."""
        return map_tree(lambda t: lax.expand_dims(t, (0,)) if isinstance(t, jax.Array) else t[None], tree)

    def first(self, tree: Tree) -> Tree:
        """Return the first member's part of every tensor."""
        if self.device.platform == "cpu":  # where NumPy reads the same memory, and compiles nothing
            return map_tree(lambda t: np.asarray(t)[0], tree)
        return map_tree(lambda t: t[0], tree)

    def where(self, chosen: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
        """Return `new` for the members that are chosen, and `old` for the others."""
        return jnp.where(chosen.reshape(-1, *[1] * (jnp.ndim(old) - 1)), new, old)

    def is_finite(self, tensor: jax.Array) -> jax.Array:
        """Return True for each number that is finite."""
        return jnp.isfinite(tensor)

    def take(self, tree: Tree, rows: jax.Array) -> Tree:
        """Return the rows of every tensor."""
        return map_tree(lambda t: t[rows], tree)

    def put(self, tree: Tree, rows: jax.Array, part: Tree) -> Tree:
        """Return every tensor with some of its rows replaced."""
        return jax.tree.map(lambda whole, own: whole.at[rows].set(own), tree, part)

    def join(self, tensors: Sequence[jax.Array]) -> jax.Array:
        """Return arrays as one, along their first axis."""
        return jnp.concatenate(tensors)

    def lengthened(self, tree: Tree, length: int) -> Tree:
        """Return every array with a longer first axis."""
        return map_tree(lambda leaf: _lengthened(leaf, length), tree)

    def loop(self, step: Callable[[Tree, Tree, jax.Array], Tree], state: Tree, xs: Tree, count: jax.Array) -> Tree:
        """Return the state after `count` steps."""

        def body(number: jax.Array, state: Tree) -> Tree:
            x = map_tree(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), xs)
            return step(state, x, number)

        return lax.fori_loop(0, count, body, state)

    def compile(self, function: Function, *, donate: bool = False) -> Function:
        """Return the function under `jax.jit`."""
        donated = (0,) if donate else ()
        if self.device.platform == "cpu":
            return _CpuProgram(function, donated)
        return jax.jit(function, donate_argnums=donated)

    def within(self, program: Function, function: Function) -> Function:
        """Return the function: JAX accepts compiler options only for the outermost program."""
        return function

    def trace(self, program: Any, args: Sequence[Tree]) -> None:
        """Trace a program. Raise what the tracing raises."""
        program.trace(*args)

    def shapes(self, function: Function, *args: Tree) -> Tree:
        """Return the shapes of a function's results, if possible without computing them."""
        return shapes(function, *args)

    def working_bytes(self, program: Any, args: Sequence[Tree]) -> int | None:
        """Return the memory that a program needs beside its arguments and results.

        XLA knows the exact number, but only after compiling for seconds. For a small program, return the size of
        all its intermediate results instead.
        """
        traced = program.trace(*args)
        most = _computed_bytes(traced.jaxpr)
        if most < _SMALL:
            return most
        analysis = traced.lower().compile().memory_analysis()
        return most if analysis is None else int(analysis.temp_size_in_bytes)

    def reason(self, error: Exception) -> str:
        """Return one line that says why a function could not be traced."""
        for kind, words in _REASONS.items():
            if isinstance(error, kind):
                return words
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return f"{type(error).__name__}: {line}".rstrip(".: ")

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error means that the device is out of memory."""
        return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


class _CpuProgram:
    """A function under `jax.jit`, compiled in the way that suits the size of its first argument."""

    def __init__(self, function: Function, donated: tuple[int, ...]) -> None:
        self._quick: Any = jax.jit(function, donate_argnums=donated, compiler_options=_QUICK_OPTIONS)
        self._large: Any = jax.jit(function, donate_argnums=donated, compiler_options=_CPU_OPTIONS)

    def __call__(self, *args: Tree) -> Tree:
        return self._for(args)(*args)

    def trace(self, *args: Tree) -> Any:
        """Return the function, traced for arguments like these."""
        return self._for(args).trace(*args)

    def _cache_size(self) -> int:  # as of jax.jit, for tests
        return self._quick._cache_size() + self._large._cache_size()

    def _for(self, args: Sequence[Tree]) -> Any:
        size = sum(getattr(leaf, "nbytes", 0) for leaf in leaves(args[0]))
        return self._quick if size < _QUICK else self._large


def shapes(function: Function, *args: Tree) -> Tree:
    """Return a function's results as a tree of shapes. A function that reads values is run for this."""
    try:
        return jax.eval_shape(function, *args)
    except jax.errors.JAXTypeError:
        return function(*args)


def _computed_bytes(jaxpr: Any) -> int:
    """Return the size of everything that a traced function computes, as if nothing was ever freed."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    total = 0
    for equation in jaxpr.eqns:
        inner = [
            value for value in jax.tree.leaves(equation.params) if hasattr(getattr(value, "jaxpr", value), "eqns")
        ]
        total += sum(map(_computed_bytes, inner))
        if not inner:
            shapes = (variable.aval for variable in equation.outvars)
            total += sum(int(np.prod(aval.shape)) * aval.dtype.itemsize for aval in shapes)
    return total


def _host(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _lengthened(leaf: Any, length: int) -> Any:
    numpy = np if isinstance(leaf, np.ndarray) else jnp
    return numpy.concatenate([leaf, numpy.zeros((length - len(leaf), *leaf.shape[1:]), leaf.dtype)])
