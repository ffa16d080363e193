"""What the functional engine asks of JAX: to map over members, compile, and loop over steps."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from modelfleet.frameworks.jax.arrays import from_host
from modelfleet.trees import map_tree

Function = Callable[..., Any]

# A third less time to compile than at XLA's own level, and steps that are no slower (jax 0.10, small networks).
_CPU_OPTIONS = {"xla_backend_optimization_level": 1}

_LITTLE = 1 << 27  # bytes that no lane need fear for

_REASONS = {  # why a function can't be traced, the narrower classes first
    jax.errors.TracerBoolConversionError: "its Python branches on an array's values (jnp.where or lax.cond can)",
    jax.errors.TracerArrayConversionError: "it hands an array to NumPy (jax.numpy can be traced)",
    jax.errors.ConcretizationTypeError: "its Python needs an array's values as numbers while it is traced",
}


class JaxBackend:
    """JAX on one device (see `functional.Backend`)."""

    name = "jit"

    def __init__(self, device: jax.Device) -> None:
        self.device = device

    def tensor(self, array: Any) -> jax.Array:
        """An array as a tensor of its own on the device, in a dtype that JAX has there."""
        # Copied, which device_put does not do on the CPU even with may_alias=False (jax 0.10): programs write over
        # the state that they are given, and somebody may write over the array.
        return jax.device_put(np.array(array), self.device)

    def host(self, tree: Any) -> Any:
        """A tree of tensors as NumPy arrays; bfloat16 as float32."""
        return map_tree(_host, jax.device_get(tree))

    def exactly(self, tree: Any) -> Any:
        """A tree of tensors as NumPy arrays of their own dtypes."""
        return map_tree(np.asarray, jax.device_get(tree))

    def loaded(self, array: Any, like: jax.Array) -> jax.Array:
        """What `arrays.host` gave of a tensor, as one like another."""
        return self.tensor(from_host(np.asarray(array), like))

    def map(self, function: Function, args: Sequence[Any], mapped: Sequence[bool]) -> Any:
        """`function` of every member."""
        return jax.vmap(function, in_axes=tuple(0 if own else None for own in mapped))(*args)

    def where(self, chosen: jax.Array, new: Any, old: Any) -> jax.Array:
        """`new` for the members that are chosen, `old` for the others."""
        return jnp.where(chosen.reshape(-1, *[1] * (jnp.ndim(old) - 1)), new, old)

    def take(self, tree: Any, rows: Any) -> Any:
        """The rows of every tensor."""
        return map_tree(lambda t: t[rows], tree)

    def put(self, tree: Any, rows: Any, part: Any) -> Any:
        """Every tensor with some of its rows replaced."""
        return jax.tree.map(lambda whole, own: whole.at[rows].set(own), tree, part)

    def lengthened(self, tree: Any, length: int) -> Any:
        """Every array with a longer first axis."""
        return map_tree(lambda leaf: _lengthened(leaf, length), tree)

    def loop(self, step: Callable[[Any, Any], Any], state: Any, xs: Any, count: Any) -> Any:
        """The state after `count` steps."""

        def body(number: Any, state: Any) -> Any:
            return step(state, map_tree(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), xs))

        return lax.fori_loop(0, count, body, state)

    def compile(self, function: Function, *, donate: bool = False) -> Function:
        """The function under `jax.jit`."""
        options = _CPU_OPTIONS if self.device.platform == "cpu" else None
        return jax.jit(function, donate_argnums=(0,) if donate else (), compiler_options=options)

    def within(self, program: Function, function: Function) -> Function:
        """The function: JAX takes a program's options at the outside only."""
        return function

    def trace(self, program: Any, args: Sequence[Any]) -> None:
        """Trace a program; raises what the tracing raises."""
        program.trace(*args)

    def shapes(self, function: Function, *args: Any) -> Any:
        """What a function gives, without computing it if that can be."""
        return shapes(function, *args)

    def working_bytes(self, program: Any, args: Sequence[Any]) -> int | None:
        """What a program takes on the device beside what goes in and comes out.

        XLA knows exactly, once it has compiled the program. Where all that is ever computed in it is little, that
        is told instead: it is known at once, and compiling takes seconds.
        """
        traced = program.trace(*args)
        most = _computed_bytes(traced.jaxpr)
        if most < _LITTLE:
            return most
        analysis = traced.lower().compile().memory_analysis()
        return most if analysis is None else int(analysis.temp_size_in_bytes)

    def reason(self, error: Exception) -> str:
        """Why a function could not be traced, in a line."""
        for kind, words in _REASONS.items():
            if isinstance(error, kind):
                return words
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return f"{type(error).__name__}: {line}".rstrip(".: ")

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device is out of memory."""
        return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def shapes(function: Function, *args: Any) -> Any:
    """What a function gives, as a tree of shapes; one that looks at the numbers themselves is run for it."""
    try:
        return jax.eval_shape(function, *args)
    except jax.errors.JAXTypeError:
        return function(*args)


def _computed_bytes(jaxpr: Any) -> int:
    """The bytes of everything that a traced function computes, as if nothing was ever freed."""
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
