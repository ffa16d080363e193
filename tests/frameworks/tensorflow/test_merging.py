"""Graphs that differ in numbers, merged into one: each variant computes what it computes alone."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from modelfleet.frameworks.functional.merged_definition import DifferenceError, classes
from modelfleet.frameworks.tensorflow.backend import TensorFlowBackend
from modelfleet.frameworks.tensorflow.merging import TensorFlowMerger

Function = Callable[..., Any]
MERGER = TensorFlowMerger()
X = np.random.default_rng(0).normal(size=(5, 4))
SEED = [1, 2]


def drop(x: Any, rate: float) -> Any:
    return tf.nn.experimental.stateless_dropout(x, rate=rate, seed=SEED)


def normalized(x: Any, epsilon: float) -> Any:
    mean, variance = tf.nn.moments(x, [0])
    return {"x": tf.nn.batch_normalization(x, mean, variance, None, None, epsilon), "mean": mean * epsilon}


def leaky(x: Any, slope: float) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.nn.leaky_relu(x, alpha=slope) ** 2
    return y, tape.gradient(y, x)


def with_arrays(x: Any, factor: float) -> Any:
    return x * np.array([1.0, factor, 3.0, 4.0]) + factor


def made(factor: float) -> Function:
    outside = tf.constant(np.linspace(0, factor, 400))  # too many to become a constant of the graph
    return lambda x: tf.reduce_sum(x) * outside


def with_cond(x: Any, factor: float) -> Any:
    return factor * tf.cond(tf.reduce_sum(x) > 0, lambda: x + 1, lambda: x - 1)


def checked(x: Any, factor: float) -> Any:
    with tf.name_scope(f"layer_{int(factor * 10)}"):
        y = tf.identity(x * factor)
    tf.debugging.assert_less(tf.reduce_sum(y), tf.constant(1e9, y.dtype), message=f"layer {factor}")
    return y + 1


def variants(function: Function, numbers: list[float]) -> list[Function]:
    return [lambda x, number=number: function(x, number) for number in numbers]


def traced(functions: list[Function]) -> list[Any]:
    shapes, _ = MERGER.shapes((X,))
    return [MERGER.trace(own, shapes)[0] for own in functions]


def close(found: Any, expected: Any) -> None:
    pairs = zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-14, atol=1e-14)


def compare(functions: list[Function], *, tables: int | None = None) -> None:
    """Compare what members compute together and one by one with what their functions compute."""
    merged = MERGER.merge(traced(functions))
    if tables is not None:
        assert len(merged.tables) == tables
    backend = TensorFlowBackend("/CPU:0")
    members = np.array([1, 0, len(functions) - 1], np.int32)
    xs = np.stack([X, X + 1, X - 1])

    def member(variant: Any, x: Any) -> Any:
        return MERGER.run(merged, None, variant, (x,))

    together = backend.compile(lambda *args: backend.map(member, args, (True, True)))(members, xs)
    one_by_one = backend.compile(member)
    for row, (number, x) in enumerate(zip(members, xs, strict=True)):
        expected = tf.function(functions[number], autograph=False)(tf.constant(x))
        close(tf.nest.map_structure(lambda t, row=row: t[row], together), expected)
        close(one_by_one(np.int32(number), x), expected)


@pytest.mark.parametrize("function", [drop, normalized, leaky, with_arrays, with_cond, checked])
def test_functions_that_differ_in_a_number_are_one(function: Function) -> None:
    compare(variants(function, [0.5, 0.25, 0.75]))


def test_tensors_from_outside_become_tables() -> None:
    compare([made(1.5), made(2.5)], tables=1)


def test_equal_functions_have_no_tables() -> None:
    compare(variants(normalized, [0.5, 0.5]), tables=0)


def test_arguments_and_results_keep_their_structure() -> None:
    def function(tree: Any, factor: float) -> Any:
        return {"b": (tree["y"] * factor, None), "a": [tree["x"]]}

    tree = {"y": X, "x": X + 1, "none": None}
    shapes, _ = MERGER.shapes((tree,))
    merged = MERGER.merge([MERGER.trace(own, shapes)[0] for own in variants(function, [2.0, 3.0])])
    found = tf.function(lambda: MERGER.run(merged, None, tf.constant(1), (tree,)))()
    close(found["b"][0], 3 * X)
    close(found["a"][0], X + 1)
    assert found["b"][1] is None


class Held:
    def __init__(self) -> None:
        self.variable = tf.Variable(tf.constant(2.0, tf.float64))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (lambda x: x * 2, lambda x: x + 2, "computes Mul where the other computes AddV2"),
        (lambda x: x * 2, lambda x: tf.exp(x * 2), "only one computes Exp|where the other computes"),
        (lambda x: tf.reduce_sum(x, 0), lambda x: tf.reduce_sum(x, 1), "a constant is 0 or 1"),
        (lambda x: x[:2] * 1.0, lambda x: x[:3] * 1.0, "a constant is"),
        (lambda x: x * np.ones(4), lambda x: x * np.ones((5, 4)), "a constant is"),
        (lambda x: (x + 1, x + 2)[::-1], lambda x: (x + 1, x + 2), "takes another operand"),
        (lambda x: (x + 1) - x, lambda x: x - (x + 1), "takes another operand"),
        (lambda x: tf.cast(x, tf.float32), lambda x: tf.cast(x, tf.float16), "the DstT of Cast"),
        (
            lambda x: tf.cond(x[0, 0] > 0, lambda: x * 2, lambda: x),
            lambda x: tf.cond(x[0, 0] > 0, lambda: x * 3, lambda: x),
            "a number within .*If differs",
        ),
    ],
)
def test_functions_that_differ_in_more_are_refused(first: Function, second: Function, message: str) -> None:
    with pytest.raises(DifferenceError, match=message):
        MERGER.merge(traced([first, second]))


def test_functions_that_read_variables_of_their_own_are_refused() -> None:
    held = [Held(), Held()]
    with pytest.raises(DifferenceError, match="variable"):
        MERGER.merge(traced([lambda x, own=own: x * own.variable for own in held]))
    compare([lambda x: x * held[0].variable * 2, lambda x: x * held[0].variable * 3], tables=1)


def test_those_that_branch_on_their_number_are_classes() -> None:
    def branching(x: Any, rate: float) -> Any:
        return drop(x, rate) if rate else x

    found, reason = classes(MERGER, traced(variants(branching, [0.5, 0.0, 0.25, 0])))
    assert found == [[0, 2], [1, 3]]
    assert "computes" in reason
