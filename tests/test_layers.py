"""Imports point down only, and a framework is known in its own place only."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "modelfleet"

# From the top down. A file imports from its own package and from those in lines below, never from its own line or
# above: so no two packages import each other. "modelfleet" is the package itself.
ORDER = (
    "__main__",
    "cli",
    "demo doctor inspection",
    "testing",
    "modelfleet",
    "loading",
    "ensembles graph",
    "fleet",
    "answering",
    "reading repeating",
    "fitting",
    "checkpoints live_lanes saving",
    "planning",
    "sharing",
    "remote",
    "runs",
    "lanes",
    "replicas",
    "workers",
    "exchange",
    "callbacks feeds progress store",
    "free_memory gate history",
    "schedules",
    "failures frames plotting",
    "frameworks",
    "interrupts members",
    "joining nvidia recipe",
    "each devices",
    "directions",
    "argument_checks fingerprints formatting garbage shuffles trees unknown_names user_cache",
    "errors types",
)
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names.split()}

# Where a package may be imported: in the files below these paths, and nowhere else.
PLACES: dict[str, tuple[str, ...]] = {
    "torch": ("frameworks/torch", "frameworks/keras/torch", "testing/torch.py", "testing/keras.py"),
    "jax": ("frameworks/jax", "frameworks/keras/jax.py", "frameworks/keras/nodes/jax", "testing/jax.py"),
    "flax": ("frameworks/jax", "testing/jax.py"),
    "optax": ("frameworks/jax", "testing/jax.py"),
    "keras": ("frameworks/keras", "testing/keras.py"),
    "tensorflow": ("frameworks/tensorflow", "frameworks/keras/tensorflow.py"),
    "safetensors": ("frameworks/torch/files.py", "frameworks/files.py"),
    "ray": ("workers/ray.py",),
    "starlette": (),
    "uvicorn": (),
}


def imported(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file imports, wherever in it: the line and the full name.

    What is imported for type checkers alone does not count: it never runs.
    """
    package = ["modelfleet", *path.relative_to(root).parent.parts]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            if module != "modelfleet":
                yield node.lineno, module
                continue
            for alias in node.names:  # `from modelfleet import errors` is the module; `import Fleet` the package
                is_module = (root / f"{alias.name}.py").exists() or (root / alias.name).is_dir()
                yield node.lineno, f"modelfleet.{alias.name}" if is_module else "modelfleet"


def problems(root: Path) -> list[str]:
    """What is wrong with the imports of the package at `root`, a line each."""
    found = []
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root).as_posix()
        if file == "__init__.py":
            continue
        own = path.relative_to(root).parts[0].removesuffix(".py")
        if own not in LEVEL:
            found.append(f"{file}: say where it belongs (ORDER in tests/test_layers.py)")
            continue
        for line, module in imported(path, root):
            top, *rest = module.split(".")
            if top == "modelfleet":
                target = rest[0] if rest else "modelfleet"
                if target not in LEVEL:
                    found.append(f"{file}:{line}: say where {target} belongs")
                elif target != own and LEVEL[target] <= LEVEL[own]:
                    where = "beside" if LEVEL[target] == LEVEL[own] else "above"
                    found.append(f"{file}:{line}: {own} imports {module}, which is {where} it")
            elif top in PLACES and not any(is_below(file, place) for place in PLACES[top]):
                found.append(f"{file}:{line}: imports {module} outside of its place")
    return found


def is_below(file: str, place: str) -> bool:
    return file == place or file.startswith(f"{place}/")


def test_imports_point_down_and_frameworks_stay_in_their_place() -> None:
    assert problems(SOURCE) == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        (
            "errors.py",
            "import modelfleet.fleet",
            "errors.py:1: errors imports modelfleet.fleet, which is above it",
        ),
        (
            "each.py",
            "from modelfleet import fleet",
            "each.py:1: each imports modelfleet.fleet, which is above it",
        ),
        ("each.py", "from modelfleet import Fleet", "each.py:1: each imports modelfleet, which is above it"),
        (
            "lanes.py",
            "def f():\n  from .fleet import x",
            "lanes.py:2: lanes imports modelfleet.fleet, which is above it",
        ),
        (
            "store/a.py",
            "from ..planning import x",
            "store/a.py:1: store imports modelfleet.planning, which is above it",
        ),
        (
            "store/a.py",
            "from .. import fleet",
            "store/a.py:1: store imports modelfleet.fleet, which is above it",
        ),
        (
            "store/a.py",
            "import safetensors.torch",
            "store/a.py:1: imports safetensors.torch outside of its place",
        ),
        ("fleet.py", "import numpy, torch.nn", "fleet.py:1: imports torch.nn outside of its place"),
        (
            "frameworks/torch/a.py",
            "from jax import jit",
            "frameworks/torch/a.py:1: imports jax outside of its place",
        ),
        (
            "frameworks/torch/a.py",
            "import safetensors",
            "frameworks/torch/a.py:1: imports safetensors outside of its place",
        ),
        ("misc.py", "", "misc.py: say where it belongs (ORDER in tests/test_layers.py)"),
        ("cli.py", "import modelfleet.misc", "cli.py:1: say where misc belongs"),
        ("cli.py", "import modelfleet as mf\nfrom modelfleet.testing import x", None),
        ("testing/a.py", "from modelfleet import Fleet\nfrom modelfleet.fleet import x", None),
        ("store/a.py", "from modelfleet.trees import x\nfrom . import b\nfrom ..errors import y", None),
        (
            "store/a.py",
            "from modelfleet.feeds import x",
            "store/a.py:1: store imports modelfleet.feeds, which is beside it",
        ),
        ("frameworks/torch/files.py", "import torch\nimport safetensors.torch", None),
        ("__init__.py", "from modelfleet.fleet import x", None),
        ("each.py", "if TYPE_CHECKING:\n  from modelfleet.fleet import x", None),
    ],
)
def test_the_walk_sees(tmp_path: Path, file: str, text: str, expected: str | None) -> None:
    (tmp_path / "fleet.py").touch()
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert problems(tmp_path) == ([] if expected is None else [expected])
