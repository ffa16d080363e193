"""Draws by a loop in C are the draws by tensor operations, and nothing depends on a compiler."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from modelfleet.frameworks.torch.compiling.graph_source import ONE_WIDTH, GraphSource
from modelfleet.frameworks.torch.cpu import c_library
from modelfleet.frameworks.torch.random import native
from modelfleet.frameworks.torch.random.streams import Streams
from modelfleet.frameworks.torch.random.threefry import (
    NOISE,
    WORDS,
    noise,
    noise_by_operations,
    words_by_operations,
)
from modelfleet.frameworks.torch.tracing.trace import TensorSpec

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="there is no C compiler"
)
SHAPES = {
    "stacked members": ((5, 1), (5, 1), (77,), (5, 1)),
    "one member": ((), (), (9,), ()),
    "several steps of one member": ((), (), (4, 33), (4, 1)),
    "positions of their own": ((3, 1), (3, 1), (3, 40), (3, 1)),
    "two threads": ((6, 1), (6, 1), (40_000,), (6, 1)),
    "nothing": ((2, 1), (2, 1), (0,), (2, 1)),
}


DTYPES = (torch.float32, torch.float64, torch.float16)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODELFLEET_CACHE", str(tmp_path))
    return tmp_path


def _random(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


@needs_compiler
@pytest.mark.parametrize("kind", SHAPES)
def test_the_loop_draws_the_same_words(cache: Path, kind: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        given = [_random(*shape) for shape in SHAPES[kind]]
        found = native.words(native.prepare(), *given)
    finally:
        torch.set_num_threads(before)
    assert found is not None
    assert torch.equal(found, words_by_operations(*given))


@needs_compiler
@pytest.mark.parametrize("size", [1, 6, 7, 60_000])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("own_positions", [False, True])
def test_the_loop_draws_the_same_noise(cache: Path, own_positions: bool, dtype: torch.dtype, size: int) -> None:
    columns = [_random(5, 1) for _ in range(3)]
    rates = torch.tensor([0.0, 1e-9, 0.3, 0.999, 1.0], dtype=torch.float64)
    positions = torch.randint(0, 2**31, (5, size)).to(torch.int32) if own_positions else None
    given: Any = (*columns, positions, rates, size, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = native.noise(native.prepare(), *given)
    finally:
        torch.set_num_threads(before)
    assert found is not None
    assert torch.equal(found, noise_by_operations(*given))


def test_noise_scales_what_is_kept() -> None:
    def streams() -> Streams:
        return Streams(torch.tensor([3, 2**40, -1]), torch.tensor([0, 7, 9]))

    rates, scale = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64), torch.tensor([1.0, 1 / 0.7, 0.0])
    one, other = streams(), streams()
    for _ in range(2):  # the second draw of the first and the last member has the number of their first
        expected = one.kept([3, 4, 7], rates) * scale.view(-1, 1, 1)
        assert torch.equal(other.noise([3, 4, 7], rates, torch.float32), expected)


@pytest.mark.parametrize("own_positions", [False, True])
def test_a_compiler_gets_the_operations_of_the_noise(own_positions: bool) -> None:
    given = [*(_random(2, 1) for _ in range(3)), torch.tensor([0.25, 1.0], dtype=torch.float64)]
    positions = torch.tensor([[0, 5, 3], [7, 1, 2]], dtype=torch.int32) if own_positions else None

    def step(first: Tensor, second: Tensor, right: Tensor, rates: Tensor) -> list[Tensor]:
        return [noise(first, second, right, positions, rates, 3, torch.float32)]

    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    source = GraphSource.of(graph, [TensorSpec.of(tensor, True) for tensor in given], ONE_WIDTH)
    assert str(NOISE) in source.text
    operations = make_fx(source.function(), tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    assert NOISE not in {node.target for node in operations.graph.nodes}
    assert torch.equal(operations(*given)[0], step(*given)[0])


@needs_compiler
def test_every_draw_is_the_same_before_and_after_the_loop_is_there(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn() -> list[Tensor]:
        streams = Streams(torch.tensor([3, 2**40, -1]), torch.tensor([0, 7, 9]))
        rates = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
        return [
            streams.uniform([3, 5], torch.float32),
            streams.uniform([3, 5], torch.float64),
            streams.kept([3, 4, 7], rates),
            *(streams.noise([3, 5, 3], rates, dtype) for dtype in DTYPES),
            streams.normal([3, 7], torch.float32),
            streams.normal([3, 7], torch.float64),
            streams.permutation([3, 11]),
        ]

    monkeypatch.setattr(native.LOOPS, "kernels", None)
    expected = drawn()
    monkeypatch.setattr(native.LOOPS, "kernels", native.prepare())
    assert all(torch.equal(one, other) for one, other in zip(drawn(), expected, strict=True))


@needs_compiler
def test_a_damaged_library_is_compiled_again(cache: Path) -> None:
    native.prepare()
    (library,) = (cache / "draws").iterdir()
    whole = library.read_bytes()
    copy = library.with_name("damaged")  # the file that this process has loaded stays as it is
    copy.write_bytes(whole[: len(whole) // 2])
    copy.replace(library)
    native.prepare()
    assert c_library.whole(library)
    assert [path.name for path in (cache / "draws").iterdir()] == [library.name]


def test_without_a_compiler_draws_stay_operations(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "")
    with pytest.raises(FileNotFoundError, match="no C compiler"):
        native.prepare()
    loop = native._Loops()
    loop._prepare()
    assert loop.kernels is None
    given = [_random(*shape) for shape in SHAPES["stacked members"]]
    assert torch.equal(WORDS(*given), words_by_operations(*given))


@needs_compiler
def test_a_cache_that_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELFLEET_CACHE", "")
    given = [_random(*shape) for shape in SHAPES["one member"]]
    found = native.words(native.prepare(), *given)
    assert found is not None
    assert torch.equal(found, words_by_operations(*given))
