"""A member's random numbers: the published generator, and each distribution by the definition in the docs.

`Reference` has that definition again, in NumPy, with the generator written in Python's own integers.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from modelfleet import shuffles
from modelfleet.errors import StrategyError
from modelfleet.frameworks.torch.random.operations import DrawFromStreams
from modelfleet.frameworks.torch.random.streams import BatchRows, Streams
from modelfleet.frameworks.torch.random.threefry import threefry

# From Random123's kat_vectors: counter, key, result of threefry2x32 with 20 rounds.
VECTORS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]
SEED, STEP = 0x7EDCBA9876543210 - 5, 1234


def by_integers(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32-20 as the paper has it, on Python's integers."""
    mask, rotations = 0xFFFFFFFF, (13, 15, 26, 6, 17, 29, 16, 24)
    keys = (*key, 0x1BD11BDA ^ key[0] ^ key[1])
    x, y = (counter[0] + keys[0]) & mask, (counter[1] + keys[1]) & mask
    for turn in range(20):
        x = (x + y) & mask
        shift = rotations[turn % 8]
        y = (((y << shift) | (y >> (32 - shift))) & mask) ^ x
        if turn % 4 == 3:
            group = turn // 4 + 1
            x = (x + keys[group % 3]) & mask
            y = (y + keys[(group + 1) % 3] + group) & mask
    return x, y


class Reference:
    """The numbers of one step of one member, by the definition in docs/how-fusing-works.md."""

    def __init__(self, seed: int, step: int) -> None:
        self.seed, self.step = seed % 2**64, step

    def _block(self, draw: int, block: int) -> tuple[int, int]:
        key = self.seed % 2**32, (self.seed // 2**32 + draw) % 2**32
        return by_integers(key, (block, self.step))

    def narrow(self, draw: int, size: int) -> np.ndarray:
        words = [word for block in range((size + 1) // 2) for word in self._block(draw, block)]
        return np.array(words[:size], dtype=np.uint32).view(np.int32)

    def wide(self, draw: int, size: int) -> np.ndarray:
        words = [left * 2**32 + right for left, right in (self._block(draw, block) for block in range(size))]
        return np.array(words, dtype=np.uint64).view(np.int64)

    def uniform(self, draw: int, size: int, digits: int = 53) -> np.ndarray:
        words = self.wide(draw, size) if digits == 53 else self.narrow(draw, size)
        return (words >> (words.itemsize * 8 - digits)) * 2.0**-digits + 0.5

    def normal(self, draw: int, size: int, digits: int = 53) -> np.ndarray:
        pairs = self.uniform(draw, size + size % 2, digits).reshape(-1, 2)
        radius, angle = np.sqrt(-2 * np.log1p(-pairs[:, 0])), 2 * np.pi * pairs[:, 1]
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)[:size]


def signed(words: Sequence[int]) -> list[Tensor]:
    return [torch.tensor([word - 2**32 if word >= 2**31 else word], dtype=torch.int32) for word in words]


def one(seed: int = SEED, step: int = STEP) -> Streams:
    return Streams(torch.tensor(seed), torch.tensor(float(step), dtype=torch.float64))


def stacked(seeds: Sequence[int], part: BatchRows | None = None) -> Streams:
    return Streams(torch.tensor(seeds), torch.full((len(seeds),), STEP, dtype=torch.float64), part)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_threefry_has_the_published_test_vectors(
    counter: tuple[int, int], key: tuple[int, int], expected: tuple[int, int]
) -> None:
    found = threefry(*signed(key), *signed(counter))
    assert tuple(int(word) % 2**32 for word in found) == expected
    assert (
        tuple(int(w[0]) for w in shuffles.threefry(*(np.array([w], np.uint32) for w in (*key, *counter))))
        == expected
    )
    assert by_integers(key, counter) == expected


def test_threefry_is_that_of_jax() -> None:
    prng = pytest.importorskip("jax.extend.random")
    random = np.random.default_rng(0)
    key, count = (random.integers(0, 2**32, size, dtype=np.uint32) for size in (2, 2000))
    expected = np.asarray(prng.threefry_2x32(key, count))
    left, right = shuffles.threefry(key[:1], key[1:], count[:1000], count[1000:])
    np.testing.assert_array_equal(np.concatenate([left, right]), expected)
    words = (torch.from_numpy(part.view(np.int32)) for part in (key[:1], key[1:], count[:1000], count[1000:]))
    found = torch.cat(threefry(*words)).numpy().view(np.uint32)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", [0, 1, 7, 8])
@pytest.mark.parametrize(("dtype", "digits"), [(torch.float64, 53), (torch.float32, 24), (torch.bfloat16, 8)])
def test_uniform_and_normal_numbers_are_those_of_the_documented_definition(
    dtype: torch.dtype, digits: int, size: int
) -> None:
    drawn, expected = one(), Reference(SEED, STEP)
    found = drawn.uniform([size], dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.double(), expected.uniform(0, size, digits))
    normal = drawn.normal([size], dtype).double()
    of = torch.from_numpy(expected.normal(1, size, 53 if dtype == torch.float64 else 24)).to(dtype).double()
    torch.testing.assert_close(normal, of, rtol=0.01 if digits == 8 else 1e-5, atol=1e-6)
    if dtype == torch.float64:
        torch.testing.assert_close(normal, of, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("p", [0.0, 2.0**-24, 0.1, 0.25, 0.5, 0.9, 1 - 2.0**-24, 1.0])
def test_a_number_below_p_is_a_uniform_one_below_p(p: float) -> None:
    found, by_tensor = one().below([1000], p), one().below([1000], torch.tensor(p, dtype=torch.float64))
    np.testing.assert_array_equal(found, Reference(SEED, STEP).uniform(0, 1000, 24) < p)
    np.testing.assert_array_equal(found, by_tensor)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0, 1),
        (0, 10),
        (-3, 4),
        (0, 2**24 + 1),
        (-(2**40), 2**41 + 7),
        (0, 2**63 - 1),
        (-(2**63), 2**63 - 1),
        (-5, 2**63 - 1),
    ],
)
def test_integers_of_any_range_are_those_of_the_documented_definition(low: int, high: int) -> None:
    found = one().integers([50], low, high)
    expected = [low + int(word) % (high - low) for word in Reference(SEED, STEP).wide(0, 50)]
    assert found.tolist() == expected
    assert all(low <= number < high for number in expected)


def test_a_float64_uniform_has_53_digits_and_large_integers_reach_odd_values() -> None:
    drawn = (one().uniform([1000], torch.float64) * 2.0**53).long()
    assert (drawn % 2).double().mean().item() == pytest.approx(0.5, abs=0.1)
    large = one().integers([1000], 0, 2**40)
    assert (large % 2).double().mean().item() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("draw", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stacked_members_draw_what_each_draws_alone(draw: str, dtype: torch.dtype) -> None:
    seeds = [3, -7, SEED]
    together = stacked(seeds)
    apart = [one(seed) for seed in seeds]
    for shape in [(3, 5), (4,), ()]:
        found = getattr(together, draw)([3, *shape], dtype)
        for row, own in zip(found, apart, strict=True):
            torch.testing.assert_close(row, getattr(own, draw)(list(shape), dtype), rtol=0, atol=0)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("draw", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_draw_what_they_draw_within_the_whole_batch(draw: str, dtype: torch.dtype, axis: int) -> None:
    rows, whole = (2, 5), [7, 3]
    if axis:
        whole.reverse()
    expected = getattr(stacked([1, 2]), draw)([2, *whole], dtype)
    one_row = tuple(1 if place == axis else size for place, size in enumerate(whole))
    part = BatchRows(torch.tensor(rows[0]), torch.tensor(7), 3, ((one_row, axis),))
    own = [3 if place == axis else size for place, size in enumerate(whole)]
    found = getattr(stacked([1, 2], part), draw)([2, *own], dtype)
    torch.testing.assert_close(found, expected.narrow(axis + 1, rows[0], 3), rtol=0, atol=0)


def test_rows_of_another_length_draw_what_they_draw_within_their_own_batch() -> None:
    expected = one().uniform([7, 2, 9, 9], torch.float32)
    part = BatchRows(torch.tensor(2), torch.tensor(7), 3, (((1, 2, 5, 5), 0),))  # it was shorter at first
    found = Streams(torch.tensor(SEED), torch.tensor(float(STEP)), part).uniform([3, 2, 9, 9], torch.float32)
    torch.testing.assert_close(found, expected[2:5], rtol=0, atol=0)


@pytest.mark.parametrize(("draws", "shape"), [((((1, 5), 0),), (4, 5)), ((((5,), None),), (6,)), ((), (3,))])
def test_rows_that_can_not_be_told_are_refused(draws: Any, shape: tuple[int, ...]) -> None:
    part = BatchRows(torch.tensor(0), torch.tensor(7), 3, draws)
    with pytest.raises(StrategyError, match="unknown which row each number belongs to"):
        Streams(torch.tensor(SEED), torch.tensor(float(STEP)), part).uniform(shape, torch.float32)


def test_a_rows_numbers_do_not_depend_on_how_many_rows_follow_it() -> None:
    for dtype in (torch.float32, torch.float64):
        few, many = (one().uniform([rows, 3], dtype) for rows in (5, 8))
        torch.testing.assert_close(few, many[:5], rtol=0, atol=0)


@pytest.mark.parametrize(
    "other", [{"seed": SEED + 1}, {"seed": SEED + 2**32}, {"seed": SEED - 2**62}, {"step": STEP + 1}]
)
def test_every_part_of_the_key_counts(other: dict[str, int]) -> None:
    assert (one().uniform([100], torch.float32) != one(**other).uniform([100], torch.float32)).sum() > 90


def test_the_distributions_are_what_they_are_called() -> None:
    stream = Streams(torch.arange(200), torch.zeros(200, dtype=torch.float64))
    for dtype in (torch.float32, torch.float64):
        uniform, normal = (getattr(stream, draw)([200, 501], dtype).double() for draw in ("uniform", "normal"))
        count = math.sqrt(uniform.numel())
        assert abs(uniform.mean() - 0.5) < 5 / math.sqrt(12) / count
        assert abs(uniform.var() - 1 / 12) < 5 * math.sqrt(1 / 180) / count
        assert abs(normal.mean()) < 5 / count
        assert abs((normal**2).mean() - 1) < 5 * math.sqrt(2) / count
        assert abs((normal[:, :-1] * normal[:, 1:]).mean()) < 5 / count
        assert abs((normal**4).mean() - 3) < 5 * math.sqrt(96) / count


def drawing(stream: Streams, function: Any) -> Any:
    with DrawFromStreams(stream):
        return function()


def test_random_operations_draw_from_the_stream_one_after_the_other() -> None:
    def draw() -> Any:
        return (
            torch.rand(5, dtype=torch.float64),
            torch.randn(5, dtype=torch.float64),
            torch.randint(0, 1000, (5,)),
            torch.nn.functional.dropout(torch.ones(6, dtype=torch.float64), 0.25),
        )

    expected = Reference(SEED, STEP)
    rand, randn, randint, dropped = drawing(one(), draw)
    np.testing.assert_array_equal(rand, expected.uniform(0, 5))
    np.testing.assert_allclose(randn, expected.normal(1, 5), rtol=1e-12)
    np.testing.assert_array_equal(randint, expected.wide(2, 5) % 1000)
    np.testing.assert_allclose(dropped, (expected.uniform(3, 6, 24) < 0.75) / 0.75, rtol=1e-15)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5, 0.7, 0.95])  # 1.0 multiplies whatever is kept by 0
def test_every_way_to_drop_keeps_the_same_numbers_at_the_boundary(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A uniform number u = k / 2**24 is kept if u < 1 - rate, exactly."""
    middle = int((1.0 - rate) * 2**24)
    numbers = [k for k in range(middle - 2, middle + 3) if 0 <= k < 2**24]
    words = torch.tensor([[(k - 2**23) << 8 for k in numbers]], dtype=torch.int32)
    monkeypatch.setattr(Streams, "words32", lambda self, shape: words.view(list(shape)))
    stacked = Streams(torch.zeros(1, dtype=torch.int64), torch.zeros(1))
    expected = [k / 2**24 < 1.0 - rate for k in numbers]
    assert stacked.below([1, len(numbers)], 1.0 - rate)[0].tolist() == expected
    assert stacked.kept([1, len(numbers)], torch.tensor([rate], dtype=torch.float64))[0].tolist() == expected
