"""docs/architecture.md names files that exist, and its ways through the files are those of real calls."""

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from torch import nn

import modelfleet as mf

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "modelfleet"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATH = re.compile(r"`((?:\w+/)*(?:\w+\.py|\w+/))`")
WAY = re.compile(r"<!-- way: (?P<verb>\w+) -->\n\| file .*\n\|[-|]+\n(?P<rows>(?:\|.*\n)+)")
WAYS = [(match["verb"], re.findall(r"^\| `([^`]+)`", match["rows"], re.MULTILINE)) for match in WAY.finditer(TEXT)]
FILES_OF_FRAMEWORKS = ("torch", "jax", "keras", "tensorflow")

X = np.random.default_rng(0).standard_normal((64, 4), dtype=np.float32)
Y = (X[:, 0] > 0).astype(int)


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def trained() -> mf.Fleet:
    fleet = mf.Fleet.build(make_net, 3)
    fleet.compile("adam", "cross_entropy", lr=1e-2)
    fleet.fit((X, Y), epochs=2, batch_size=16, progress=False)
    return fleet


VERBS: dict[str, Callable[[], object]] = {
    "fit": trained,
    "predict": lambda: trained().predict(X, batch_size=16),
    "map": lambda: mf.map(make_net(), {"ada": X}, devices="cpu", progress=False),
}


@contextmanager
def recording() -> Iterator[set[tuple[str, ...]]]:
    """Record the files of every call stack, from the outermost call to the innermost, in all new threads."""
    found: set[tuple[str, ...]] = set()
    prefix = f"{SOURCE}/"

    def record(frame: FrameType | None, event: str, argument: Any) -> None:
        if frame is None or event != "call" or not frame.f_code.co_filename.startswith(prefix):
            return
        files: list[str] = []
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(prefix) and (not files or files[-1] != name):
                files.append(name)
            frame = frame.f_back
        found.add(tuple(name.removeprefix(prefix) for name in reversed(files)))

    before = sys.getprofile()
    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield found
    finally:
        sys.setprofile(before)
        threading.setprofile(before)


def follows(stack: tuple[str, ...], way: list[str]) -> bool:
    """Return True if a call stack goes through the files of a way in their order, and through no file twice."""
    if way[0] not in stack or way[-1] not in stack:
        return False
    part = stack[stack.index(way[0]) : stack.index(way[-1]) + 1]
    rest = iter(part)
    return all(file in rest for file in way) and len(set(part)) == len(part)


@pytest.mark.parametrize("verb", VERBS)
def test_the_ways_of_the_page_are_those_of_real_calls(verb: str) -> None:
    ways = [files for name, files in WAYS if name == verb]
    with recording() as stacks:
        VERBS[verb]()
    assert ways
    for files in ways:
        assert any(follows(stack, files) for stack in stacks), files


def test_files_that_the_page_names_exist() -> None:
    text = re.sub(r"^## Before and after\n.*?(?=^## |\Z)", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    folders = ["", *(f"frameworks/{name}/" for name in FILES_OF_FRAMEWORKS)]
    folders += [
        f"frameworks/torch/{path.name}/" for path in (SOURCE / "frameworks" / "torch").iterdir() if path.is_dir()
    ]
    named = {name for name in PATH.findall(text) if not name.startswith(("tests/", "src/"))}
    assert len(named) > 100
    assert [
        name for name in sorted(named) if not any((SOURCE / f"{folder}{name}").exists() for folder in folders)
    ] == []


def test_the_page_lists_every_package_of_the_tree() -> None:
    named = {name.rstrip("/") for name in PATH.findall(TEXT)}
    tops = {path.name for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert tops - named == set()
