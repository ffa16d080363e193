"""Merges traced functions that differ only in numbers into one function with a table of these numbers.

A jaxpr has every constant as a literal, or among its consts. So the jaxprs of several variants of a function are
walked side by side. Primitives, parameters, shapes and connections must be equal. Constants that differ become
tables `(variant, …)`. The merged function binds the equations of the first variant, with the row of its variant
from each table in place of the constant.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from modelfleet.frameworks.functional.merged_definition import DifferenceError
from modelfleet.frameworks.jax.settings import settings
from modelfleet.types import Tensor, Tree

_MAX_BYTES = 1 << 24  # of one table: XLA keeps them in its program, and takes long for large constants

# Equations that only call another jaxpr, by the parameter that has it. They are never differentiated again here,
# so that the rules for derivatives, which are among their parameters, do not count.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
_DERIVATIVES = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"})


class JaxMerger:
    """Traces functions to jaxprs, and merges these (see `merged_definition.Merger`)."""

    def shapes(self, args: tuple[Tree, ...]) -> tuple[tuple[Tree, ...], Hashable]:
        """Return the arguments' shapes, and a key for them."""
        shapes = jax.tree.map(_shape, args)
        leaves, tree = jax.tree.flatten(shapes)
        return shapes, (tree, tuple((s.shape, s.dtype, s.weak_type) for s in leaves), tuple(settings().items()))

    def trace(self, function: Callable[..., Any], shapes: tuple[Tree, ...]) -> tuple[ClosedJaxpr, Hashable]:
        """Return a function's jaxpr, and the tree of its results."""
        jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*shapes)
        return jaxpr, jax.tree.structure(results)

    def merge(self, traced: Sequence[ClosedJaxpr]) -> "MergedFunction":
        """Return jaxprs as one function."""
        return MergedFunction(traced)

    def run(self, merged: "MergedFunction", form: Any, variant: Tensor, args: tuple[Tree, ...]) -> Tree:
        """Return the results of a variant."""
        return jax.tree.unflatten(form, merged(variant, *jax.tree.leaves(args)))

    def pick(self, numbers: np.ndarray, variant: Tensor) -> jax.Array:
        """Return the number of a variant."""
        return jnp.asarray(numbers)[variant]


@dataclass
class _Merged:
    """Jaxpr of the first variant, and the places where other variants have other numbers."""

    jaxpr: Jaxpr
    consts: Sequence[Any]
    sites: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of a table, by equation and operand. The outputs count as one more equation."""
    inner: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Merged jaxprs within an equation, by equation and parameter, if they differ."""

    @property
    def differs(self) -> bool:
        return bool(self.sites or self.inner)


class MergedFunction:
    """Function of one of several variants, merged from their jaxprs for the same arguments.

    Args:
        variants: The jaxprs.

    Raises:
        DifferenceError: They differ in more than numbers.
    """

    def __init__(self, variants: Sequence[ClosedJaxpr]) -> None:
        self.tables: list[np.ndarray] = []
        """Numbers that differ, each `(variant, …)`."""
        self._known: dict[Any, int] = {}  # the numbers of tables, by content
        self._merged = self._merge([(closed.jaxpr, closed.consts) for closed in variants])

    def __call__(self, variant: jax.Array, *args: Any) -> list[Any]:
        """Return the results of a variant, by its number, for a flat list of arguments."""
        picked = [lax.dynamic_index_in_dim(jnp.asarray(t), variant, keepdims=False) for t in self.tables]
        return _run(self._merged, picked, args)

    # --- merging -------------------------------------------------------------------------------------------------

    def _merge(self, variants: Sequence[tuple[Jaxpr, Sequence[Any]]]) -> _Merged:
        first, consts = variants[0]
        merged = _Merged(first, consts)
        if all(jaxpr is first and own is consts for jaxpr, own in variants):
            return merged
        names = [_Names(jaxpr, own) for jaxpr, own in variants]
        _same_shapes("the arguments", [jaxpr.invars for jaxpr, _ in variants])
        for own, (jaxpr, _) in zip(names, variants, strict=True):
            own.add(jaxpr.invars)
        for index, equations in enumerate(zip(*(jaxpr.eqns for jaxpr, _ in variants), strict=False)):
            self._merge_equation(merged, index, equations, names)
        counts = [len(jaxpr.eqns) for jaxpr, _ in variants]
        for (jaxpr, _), count in zip(variants, counts, strict=True):
            if count != counts[0]:
                longer = jaxpr if count > counts[0] else first
                raise DifferenceError(f"only one computes {longer.eqns[min(count, counts[0])].primitive}")
        outputs = [jaxpr.outvars for jaxpr, _ in variants]
        _same_shapes("the results", outputs)
        self._merge_atoms(merged, counts[0], outputs, names)
        return merged

    def _merge_equation(
        self, merged: _Merged, index: int, equations: Sequence[JaxprEqn], names: Sequence["_Names"]
    ) -> None:
        first = equations[0]
        for other in equations:
            if other.primitive is not first.primitive:
                raise DifferenceError(f"one computes {first.primitive} where the other computes {other.primitive}")
        what = f"{first.primitive}"
        _same_shapes(f"the operands of {what}", [equation.invars for equation in equations])
        _same_shapes(f"the results of {what}", [equation.outvars for equation in equations])
        self._merge_atoms(merged, index, [equation.invars for equation in equations], names)
        inner = self._merge_parameters(what, [equation.params for equation in equations])
        if inner:
            if what not in _CALLS and what not in _RULES:
                raise DifferenceError(f"a number within {what} differs")
            merged.inner[index] = inner
        for own, equation in zip(names, equations, strict=True):
            own.add(equation.outvars)

    def _merge_atoms(
        self, merged: _Merged, index: int, atoms: Sequence[Sequence[Any]], names: Sequence["_Names"]
    ) -> None:
        """Compare the operands of an equation, and note where they are different constants."""
        for position, operands in enumerate(zip(*atoms, strict=True)):
            found = [own.look_up(atom) for own, atom in zip(names, operands, strict=True)]
            if all(isinstance(value, int) for value in found):
                if any(value != found[0] for value in found):
                    raise DifferenceError("an operation takes another operand")
            elif any(isinstance(value, int) for value in found):
                raise DifferenceError("a number of one is computed by the other")
            else:
                number = self._table([value.value for value in found], operands[0].aval)
                if number is not None:
                    merged.sites[index, position] = number

    def _merge_parameters(self, what: str, params: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Compare the parameters of an equation, and return the merged jaxprs among them that differ."""
        first = params[0]
        found: dict[str, Any] = {}
        for key, value in first.items():
            values = [own.get(key) for own in params]
            if key in _DERIVATIVES:
                continue
            if _is_jaxpr(value):
                merged = self._merge([_opened(own) for own in values])
                if merged.differs:
                    found[key] = merged
            elif isinstance(value, tuple) and value and all(map(_is_jaxpr, value)):
                several = tuple(self._merge([_opened(own) for own in each]) for each in zip(*values, strict=True))
                if any(merged.differs for merged in several):
                    found[key] = several
            elif not all(_equal(value, own) for own in values):
                other = next(own for own in values if not _equal(value, own))
                raise DifferenceError(f"the {key} of {what} is {_short(value)} or {_short(other)}")
        return found

    def _table(self, values: Sequence[Any], aval: Any) -> int | None:
        """Return the number of the table of a constant's values; None if they are all equal."""
        if all(value is values[0] for value in values):
            return None
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
            arrays = [np.asarray(jax.random.key_data(value)) for value in values]
        else:
            arrays = [np.asarray(value, dtype=aval.dtype) for value in values]
        contents = [array.tobytes() for array in arrays]
        if all(content == contents[0] for content in contents):
            return None
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
            raise DifferenceError("a random key is another constant")
        if sum(map(len, contents)) > _MAX_BYTES:
            raise DifferenceError(f"constants of {len(contents[0]) / 1e6:.0f} MB differ")
        key = aval.shape, aval.dtype, tuple(contents)
        if key not in self._known:
            self._known[key] = len(self.tables)
            self.tables.append(np.stack(arrays))
        return self._known[key]


@dataclass(frozen=True)
class _Constant:
    value: Any


class _Names:
    """Variables of one jaxpr: numbers in the order in which they are defined, or constants."""

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> None:
        self._found: dict[Any, int | _Constant] = {
            variable: _Constant(value) for variable, value in zip(jaxpr.constvars, consts, strict=True)
        }
        self._count = 0

    def add(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            self._found[variable] = self._count
            self._count += 1

    def look_up(self, atom: Any) -> Any:
        return _Constant(atom.val) if isinstance(atom, Literal) else self._found[atom]


# --- running -----------------------------------------------------------------------------------------------------


def _run(merged: _Merged, picked: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Return what `jax.core.eval_jaxpr` would, with values from the tables in place of some constants."""
    jaxpr = merged.jaxpr
    values = dict(zip(jaxpr.constvars, merged.consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)

    def read(index: int, atoms: Sequence[Any]) -> list[Any]:
        found = []
        for position, atom in enumerate(atoms):
            site = merged.sites.get((index, position))
            if site is not None:
                found.append(picked[site])
            else:
                found.append(atom.val if isinstance(atom, Literal) else values[atom])
        return found

    for index, equation in enumerate(jaxpr.eqns):
        operands, primitive = read(index, equation.invars), equation.primitive
        with equation.ctx.manager:
            if index not in merged.inner:
                found = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
            else:
                inner = merged.inner[index]
                if primitive.name in _CALLS:
                    found = _run(inner[_CALLS[primitive.name]], picked, operands)
                else:
                    found = _RULES[primitive.name](equation, inner, picked, operands)
        values |= zip(equation.outvars, found if primitive.multiple_results else [found], strict=True)
    return read(len(jaxpr.eqns), jaxpr.outvars)


def _part(equation: JaxprEqn, inner: Mapping[str, Any], key: str) -> _Merged:
    """Return one of the jaxprs of an equation that has several, of which some differ."""
    return inner[key] if key in inner else _Merged(*_opened(equation.params[key]))


def _run_scan(
    equation: JaxprEqn, inner: Mapping[str, Any], picked: Sequence[Any], operands: list[Any]
) -> list[Any]:
    params, body = equation.params, inner["jaxpr"]
    first, second = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carried, xs = operands[:first], operands[first:second], operands[second:]

    def step(carried: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        found = _run(body, picked, [*consts, *carried, *xs])
        return found[: len(carried)], found[len(carried) :]

    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    carried, ys = lax.scan(step, carried, xs, **options)
    return [*carried, *ys]


def _run_while(
    equation: JaxprEqn, inner: Mapping[str, Any], picked: Sequence[Any], operands: list[Any]
) -> list[Any]:
    first = equation.params["cond_nconsts"]
    second = first + equation.params["body_nconsts"]
    condition, body = _part(equation, inner, "cond_jaxpr"), _part(equation, inner, "body_jaxpr")
    return lax.while_loop(
        lambda carried: _run(condition, picked, [*operands[:first], *carried])[0],
        lambda carried: _run(body, picked, [*operands[first:second], *carried]),
        operands[second:],
    )


def _run_cond(
    equation: JaxprEqn, inner: Mapping[str, Any], picked: Sequence[Any], operands: list[Any]
) -> list[Any]:
    def branch(merged: _Merged) -> Callable[..., list[Any]]:
        return lambda *args: _run(merged, picked, args)

    index, *others = operands
    return lax.switch(index, [branch(merged) for merged in inner["branches"]], *others)


def _run_remat(
    equation: JaxprEqn, inner: Mapping[str, Any], picked: Sequence[Any], operands: list[Any]
) -> list[Any]:
    # Bound again, as the backward pass of a checkpoint: it must not be merged with the forward pass.
    def function(picked: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        return _run(inner["jaxpr"], picked, args)

    closed = jax.make_jaxpr(function)(list(picked), operands)
    jaxpr = closed.jaxpr.replace(constvars=(), invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars])
    return equation.primitive.bind(*closed.consts, *picked, *operands, **{**equation.params, "jaxpr": jaxpr})


_RULES = {
    "scan": _run_scan,
    "while": _run_while,
    "cond": _run_cond,
    "remat2": _run_remat,
    "checkpoint": _run_remat,
}


# --- comparing ---------------------------------------------------------------------------------------------------


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)


def _opened(value: Any) -> tuple[Jaxpr, Sequence[Any]]:
    return (value.jaxpr, value.consts) if isinstance(value, ClosedJaxpr) else (value, ())


def _same_shapes(what: str, atoms: Sequence[Sequence[Any]]) -> None:
    """Raise if the shapes and dtypes of operands or results differ."""
    first, *rest = atoms
    for others in rest:
        if len(others) != len(first):
            raise DifferenceError(f"{what} are {len(first)} or {len(others)} arrays")
        for one, other in zip(first, others, strict=True):
            if any(
                getattr(one.aval, name, None) != getattr(other.aval, name, None) for name in ("shape", "dtype")
            ):
                raise DifferenceError(f"{what} are {one.aval.str_short()} or {other.aval.str_short()}")


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # of whatever class a parameter is
        return False


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf), weak_type=weak)
