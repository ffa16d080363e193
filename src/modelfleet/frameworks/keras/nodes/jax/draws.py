"""Random draws of a micro-batch: those that the undivided batch would have drawn for the same rows.

A function is traced for a micro-batch and for the whole batch. Where the shapes of a draw differ, the micro-batch
takes its rows from the draw of the whole batch. Keras's seeds are the same for all micro-batches of a step, so
dropout is that of the undivided model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_DRAW = "random_bits"
_CALL = "jit"  # an equation that only calls another jaxpr


class DrawsError(Exception):
    """Raised if it is unknown which numbers of a draw belong to which rows. The message is part of a sentence."""


@dataclass(frozen=True)
class Draw:
    """How a micro-batch takes its part of one draw."""

    shape: tuple[int, ...]
    """Shape of the draw of the whole batch."""
    axis: int | None
    """The axis that has the rows; None if the draw does not depend on their number."""
    size: int
    """How much of this axis a micro-batch has."""
    per_row: int
    """How much of it a row has."""


def find_draws(few: ClosedJaxpr, rows: int, whole: ClosedJaxpr, rows_of_whole: int) -> list[Draw]:
    """Return the draws of a function that was traced for some rows and for the whole batch.

    Raises:
        DrawsError: A draw is in a loop, or its shape does not say where the rows are.
    """
    own, others = list(_shapes(few.jaxpr)), list(_shapes(whole.jaxpr))
    if len(own) != len(others):
        raise DrawsError("how often it draws depends on the number of rows")
    return [_draw(*pair, rows, rows_of_whole) for pair in zip(own, others, strict=True)]


def _draw(own: tuple[int, ...], whole: tuple[int, ...], rows: int, rows_of_whole: int) -> Draw:
    axes = [axis for axis, (a, b) in enumerate(zip(own, whole, strict=False)) if a != b]
    if len(own) != len(whole) or len(axes) > 1:
        raise DrawsError(f"it draws {own} for {rows} rows and {whole} for {rows_of_whole}")
    if not axes:
        return Draw(whole, None, 0, 0)
    (axis,) = axes
    if own[axis] % rows or own[axis] // rows * rows_of_whole != whole[axis]:
        raise DrawsError(f"it draws {own} for {rows} rows and {whole} for {rows_of_whole}")
    return Draw(whole, axis, own[axis], own[axis] // rows)


def evaluate(
    closed: ClosedJaxpr, args: Sequence[jax.Array], draws: Sequence[Draw], start: jax.Array
) -> list[jax.Array]:
    """Return the results of a traced function for the rows from `start` on, with its part of each draw."""
    return _evaluate(closed.jaxpr, closed.consts, args, iter(draws), start)


def _evaluate(
    jaxpr: Jaxpr, consts: Sequence[jax.Array], args: Sequence[jax.Array], draws: Iterator[Draw], start: jax.Array
) -> list[jax.Array]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def value(atom: object) -> jax.Array:
        return atom.val if isinstance(atom, Literal) else values[atom]  # pyrefly: ignore

    for equation in jaxpr.eqns:
        operands = [value(atom) for atom in equation.invars]
        primitive, params = equation.primitive, equation.params
        if primitive.name == _DRAW:
            draw = next(draws)
            found = primitive.bind(*operands, **{**params, "shape": draw.shape})
            if draw.axis is not None:
                found = lax.dynamic_slice_in_dim(found, start * draw.per_row, draw.size, draw.axis)
        elif primitive.name == _CALL and any(True for _ in _shapes(params["jaxpr"].jaxpr)):
            inner = params["jaxpr"]
            found = _evaluate(inner.jaxpr, inner.consts, operands, draws, start)
        else:
            found = primitive.bind(*operands, **primitive.get_bind_params(params))
        several = primitive.multiple_results or isinstance(found, list)
        values.update(zip(equation.outvars, found if several else [found], strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _shapes(jaxpr: Jaxpr) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of all draws, in order."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == _DRAW:
            yield tuple(equation.params["shape"])
            continue
        inner = [
            leaf for leaf in jax.tree.leaves(equation.params) if hasattr(getattr(leaf, "jaxpr", leaf), "eqns")
        ]
        for one in inner:
            found = list(_shapes(getattr(one, "jaxpr", one)))
            if found and equation.primitive.name != _CALL:
                raise DrawsError(f"it draws within a {equation.primitive.name}")
            yield from found
