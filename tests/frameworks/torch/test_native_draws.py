"""Draws by a loop in C are the draws by tensor operations, and nothing depends on a compiler."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modelfleet.frameworks.torch.random import native
from modelfleet.frameworks.torch.random.streams import Streams
from modelfleet.frameworks.torch.random.threefry import words, words_by_operations

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
            streams.normal([3, 7], torch.float32),
            streams.normal([3, 7], torch.float64),
            streams.permutation([3, 11]),
        ]

    monkeypatch.setattr(native.LOOP, "kernel", None)
    expected = drawn()
    monkeypatch.setattr(native.LOOP, "kernel", native.prepare())
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
    assert native._whole(library)
    assert [path.name for path in (cache / "draws").iterdir()] == [library.name]


def test_without_a_compiler_draws_stay_operations(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "")
    native._key.cache_clear()
    with pytest.raises(FileNotFoundError, match="no C compiler"):
        native.prepare()
    loop = native._Loop()
    loop._prepare()
    assert loop.kernel is None
    given = [_random(*shape) for shape in SHAPES["stacked members"]]
    assert torch.equal(words(*given), words_by_operations(*given))


@needs_compiler
def test_a_cache_that_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELFLEET_CACHE", "")
    given = [_random(*shape) for shape in SHAPES["one member"]]
    found = native.words(native.prepare(), *given)
    assert found is not None
    assert torch.equal(found, words_by_operations(*given))
