"""Trials of a Keras node before the training: what it makes of a few rows, what it draws, what time it takes."""

import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from modelfleet.errors import InputError
from modelfleet.formatting import without_period
from modelfleet.frameworks.keras.nodes.jax.draws import DrawsError
from modelfleet.frameworks.keras.nodes.jax.programs import NodePrograms, Values, is_float
from modelfleet.frameworks.node_engine import NodeTrial, TrialInputs
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Tree

TIMES = 2  # that a node is timed, after it has been compiled


def try_node(
    programs: NodePrograms, params: Values, kept: Values, given: TrialInputs, wanted: Sequence[int], *, train: bool
) -> NodeTrial:
    """Return what a node does with some rows. Nothing of it changes.

    Raises:
        InputError: The model can't take the inputs.
    """
    inputs, rows = given.whole, len(leaves(given.whole)[0])
    fewer_rows = len(leaves(given.fewer)[0])
    fewer = map_tree(lambda leaf: leaf[:fewer_rows], inputs)
    try:
        if not train:
            outputs = programs.predict(params, kept, inputs)
            return NodeTrial(outputs, programs.predict(params, kept, fewer), 0.0, 0.0, 0, (), mixes_rows=False)
        outputs, _, vjp = programs.train(params, kept, inputs, wanted, 0, rows)
        few, _, _ = programs.train(params, kept, fewer, (), 0, rows)
    except InputError:
        raise
    except (TypeError, ValueError, jax.errors.JAXTypeError) as error:  # what Keras and JAX raise for shapes
        raise InputError(f"node {programs.name!r}: {_in_words(error)}.") from error
    problem = ""
    try:
        programs.check_draws(params, kept, inputs)
    except DrawsError as error:
        problem = f"{error}, so its draws can't be divided by rows. Leave the draw out of the loop."
    ends = [jnp.ones(leaf.shape, leaf.dtype) for leaf in leaves(outputs) if is_float(leaf)]
    forward = _time(lambda: programs.train(params, kept, inputs, wanted, 0, rows)[:2])
    backward = _time(lambda: programs.backward(vjp, ends))
    return NodeTrial(
        outputs, few, forward, backward, kept_bytes(vjp, params), problem or (), _mixes_rows(outputs, few)
    )


def _in_words(error: Exception) -> str:
    """Return the line of an error that says what is wrong. Keras colours it, and puts other lines around it."""
    coloured = re.search(r"\x1b\[1m(.*?)\x1b\[0m", str(error), re.DOTALL)
    return without_period(" ".join((coloured[1] if coloured else str(error)).split())[:300])


def _mixes_rows(outputs: Tree, few: Tree) -> bool:
    """Return True if the output for a row depends on the other rows, as BatchNorm's does."""
    pairs = zip(leaves(outputs), leaves(few), strict=True)
    return not all(
        np.allclose(one[: len(other)], other, rtol=1e-3, atol=1e-4, equal_nan=True) for one, other in pairs
    )


def _time(run: Any) -> float:
    """Return the seconds of a computation that has been compiled, or will be at the first call."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(TIMES):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def kept_bytes(vjp: Any, params: Values) -> int:
    """Return the size of what a backward pass needs, without the weights."""
    weights = Counter((value.shape, value.dtype) for value in params)
    total = 0
    for leaf in jax.tree.leaves(vjp):
        key = leaf.shape, leaf.dtype
        if weights[key]:
            weights[key] -= 1
        else:
            total += leaf.nbytes
    return total
