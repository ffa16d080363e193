"""Functions that differ in numbers, merged into one: each variant computes what it computes alone."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from modelfleet.frameworks.functional.merged_definition import DifferenceError, classes
from modelfleet.frameworks.jax.merging import JaxMerger, MergedFunction

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


X = np.random.default_rng(0).normal(size=(5, 4))
KEY = np.array([1, 2], np.uint32)


def drop(x: Any, rate: float) -> Any:
    keep = jax.random.bernoulli(jax.random.wrap_key_data(jnp.asarray(KEY)), 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0.0)


def normalized(x: Any, epsilon: float) -> Any:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + epsilon)


def scanned(x: Any, slope: float) -> Any:
    carried, ys = lax.scan(lambda c, row: (jnp.tanh(c * slope + row), c - slope), jnp.zeros(x.shape[1]), x)
    return carried.sum() + (ys**3).sum(0)


def scanned_back(x: Any, slope: float) -> Any:
    return lax.scan(lambda c, row: (c + row, jax.nn.leaky_relu(c, slope)), x[0], x, reverse=True, unroll=2)


def looped(x: Any, most: float) -> Any:
    return lax.while_loop(lambda c: c.sum() < most, lambda c: c * 1.5, jnp.abs(x) + 0.1)


def looped_body(x: Any, factor: float) -> Any:
    return lax.fori_loop(0, 3, lambda i, c: c * factor + i, x)


def branched(x: Any, factor: float) -> Any:
    return lax.cond(x.sum() > 0, lambda x: x * factor, lambda x: x - factor, x) + lax.switch(
        1, [lambda x: x, lambda x: jnp.sin(x) * factor, lambda x: -x], x
    )


def checkpointed(x: Any, factor: float) -> Any:
    return jax.checkpoint(lambda x: jnp.sin(jnp.exp(x * factor)) * factor)(x)


@jax.custom_jvp
def softened(x: Any) -> Any:
    return jnp.tanh(x)


softened.defjvp(lambda primals, tangents: (softened(*primals), tangents[0] * 0.5))


def custom_jvp(x: Any, factor: float) -> Any:
    @jax.custom_jvp
    def own(x: Any) -> Any:
        return jnp.tanh(x) * factor

    own.defjvp(lambda primals, tangents: (own(*primals), tangents[0] * factor * 3))
    return own(x) + softened(x * factor) + jax.nn.silu(x) + jax.nn.relu(x * factor)


def custom_vjp(x: Any, factor: float) -> Any:
    @jax.custom_vjp
    def own(x: Any) -> Any:
        return x * factor

    own.defvjp(lambda x: (own(x), jnp.cos(x)), lambda saved, g: (g * saved * factor,))
    return own(x)


def weighted(x: Any, weight: float) -> Any:
    return x * jnp.asarray([weight, 1.0, 2 * weight, 0.5]) + np.full((4,), weight)


def jitted(x: Any, slope: float) -> Any:
    @jax.jit
    def inner(x: Any) -> Any:
        return jnp.clip(jax.nn.elu(x, slope), -slope, slope) + jax.nn.leaky_relu(x, slope)

    return inner(x) + inner(2 * x)


def padded(x: Any, value: float) -> Any:
    return jnp.pad(x, 1, constant_values=value) + jnp.full((6 + 1, 6), value)


def constant(x: Any, value: float) -> Any:
    return x.sum(), jnp.asarray(value), value


FUNCTIONS: dict[str, Function] = {
    "arithmetic": lambda x, a: (a * x + x / a - a) ** 2 + a ** jnp.abs(x) + jnp.abs(x) ** a,
    "comparisons": lambda x, a: jnp.where(x > a, x, a) + jnp.maximum(x, a) + jnp.minimum(a, x),
    "clip": lambda x, a: jnp.clip(x, -a, a),
    "dropout": drop,
    "leaky_relu": jax.nn.leaky_relu,
    "celu": jax.nn.celu,
    "gumbel": lambda x, a: jax.nn.softmax((x + jax.random.gumbel(jax.random.key(0), x.shape)) / a),
    "normal": lambda x, a: x + a * jax.random.normal(jax.random.key(3), x.shape),
    "epsilon": normalized,
    "scan": scanned,
    "scan back": scanned_back,
    "while condition": looped,
    "while body": looped_body,
    "cond": branched,
    "checkpoint": checkpointed,
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "consts": weighted,
    "jit": jitted,
    "pad": padded,
    "sort": lambda x, a: jnp.sort(x * a) + jnp.cumsum(x + a, axis=1),
    "einsum": lambda x, a: jnp.einsum("ij,kj->ik", x * a, x) * jnp.eye(5) * a,
    "output": constant,
}


def total(function: Function) -> Function:
    def loss(x: Any, a: float) -> Any:
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(function(x, a)))

    return loss


def traced(function: Function, numbers: list[Any], x: Any = X) -> list[Any]:
    return [jax.make_jaxpr(lambda x, a=a: function(x, a))(x) for a in numbers]


NUMBERS = [0.3, 0.7, 0.3, 1 / 3]


# JAX has no gradient of a while loop.
CASES = [(name, way) for name in FUNCTIONS for way in (False, True) if (name, way) != ("while condition", True)]


@pytest.mark.parametrize(("name", "differentiated"), CASES)
def test_every_variant_computes_what_it_computes_alone(name: str, differentiated: bool) -> None:
    function = FUNCTIONS[name]
    if differentiated:
        function = jax.value_and_grad(total(function))
    merged = MergedFunction(traced(function, NUMBERS))
    assert merged.tables
    numbers = jnp.arange(len(NUMBERS))
    inputs = jnp.stack([X + 0.1 * number for number in range(len(NUMBERS))])
    mapped = jax.jit(jax.vmap(merged))(numbers, inputs)
    for number, value in enumerate(NUMBERS):
        expected = jax.tree.leaves(jax.jit(lambda x, a=value: function(x, a))(inputs[number]))
        single = merged(numbers[number], inputs[number])
        for found in (single, [leaf[number] for leaf in mapped]):
            for leaf, wanted in zip(found, expected, strict=True):
                assert jnp.asarray(leaf).dtype == wanted.dtype
                np.testing.assert_allclose(leaf, wanted, rtol=1e-12, atol=1e-12, err_msg=name)


def test_equal_numbers_need_no_table_and_equal_columns_one() -> None:
    assert not MergedFunction(traced(drop, [0.5, 0.5])).tables
    assert len(MergedFunction(traced(lambda x, a: x * a + a - jnp.sin(a * x), [0.5, 0.25])).tables) == 1


def test_zero_and_minus_zero_differ_and_nan_is_itself() -> None:
    assert len(MergedFunction(traced(lambda x, a: x * a, [0.0, -0.0])).tables) == 1
    assert not MergedFunction(traced(lambda x, a: x * a, [float("nan"), float("nan")])).tables


def test_an_integer_beside_a_float_is_a_number_too() -> None:
    (table,) = MergedFunction(traced(lambda x, a: x * a, [0, 0.5])).tables
    np.testing.assert_array_equal(table, [0, 0.5])


def early(x: Any, rate: float) -> Any:
    return x if rate == 0 else drop(x, rate)


def turned(x: Any, number: float) -> Any:
    return jnp.sin(x) if number < 1 else jnp.cos(x)


REFUSED: dict[str, tuple[Function, list[Any], str]] = {
    "a branch": (early, [0.0, 0.5], "only one computes"),
    "another operation": (turned, [0.5, 1.5], "sin where .* cos"),
    "a parameter": (lambda x, a: x.sum(axis=a), [0, 1], "results of reduce_sum|axes of reduce_sum"),
    "a power": (lambda x, a: x**a, [2, 3], "the y of integer_pow is 2 or 3"),
    "another operand": (
        lambda x, a: jnp.sin(x) - (x if a < 1 else jnp.sin(x)),
        [0.5, 1.5],
        "one computes|operand",
    ),
    "swapped": (lambda x, a: x[0] - x[1] if a < 1 else x[1] - x[0], [0.5, 1.5], "is|operand"),
    "another shape": (lambda x, a: jnp.ones(a), [3, 4], "shape|results|are"),
    "computed": (lambda x, a: x * (a if a < 1 else x.sum()), [0.5, 1.5], "computes|computed"),
    "in a scan": (lambda x, a: lax.scan(lambda c, r: (turned(c, a), r), x, x), [0.5, 1.5], "sin where .* cos"),
    "results": (lambda x, a: x if a < 1 else (x, x), [0.5, 1.5], "the results are 1 or 2 arrays"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_differ_in_more_than_numbers_are_refused(name: str) -> None:
    function, numbers, words = REFUSED[name]
    with pytest.raises(DifferenceError, match=words):
        MergedFunction(traced(function, numbers))


def test_a_random_key_that_is_a_constant_is_refused() -> None:
    keys = [jax.random.key(0), jax.random.key(1)]
    jaxprs = traced(lambda x, key: x + jax.random.normal(key, x.shape), keys)
    with pytest.raises(DifferenceError, match="a random key is another constant"):
        MergedFunction(jaxprs)


def test_those_that_can_be_merged_are_found() -> None:
    assert classes(JaxMerger(), traced(early, [0.5, 0.0, 0.25, 0, 0.75]))[0] == [[0, 2, 4], [1, 3]]


def test_large_constants_are_refused() -> None:
    large = [np.full((1 << 20,), value) for value in (1.0, 2.0)]
    jaxprs = traced(lambda x, own: x[0, 0] * own, large)
    with pytest.raises(DifferenceError, match="constants of 8 MB differ"):
        MergedFunction([*jaxprs, *jaxprs])
    assert classes(JaxMerger(), [*jaxprs, *jaxprs])[0] == [[0, 1, 2, 3]]
