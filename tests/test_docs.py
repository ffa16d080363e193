"""The code blocks of the README and of docs/ run, and their links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?P<skip><!-- not run -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#]+)")


def blocks(text: str) -> list[str]:
    """The blocks to run, each behind as many empty lines as come before it, so that errors name its lines."""
    return [
        "\n" * text.count("\n", 0, match.start("code")) + match["code"]
        for match in BLOCK.finditer(text)
        if not match["skip"]
    ]


RUNNABLE = [page for page in PAGES if blocks(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_the_code_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(page.read_text(encoding="utf-8"))
    # Keras's backend is fixed for a process, and a process is in one cluster: not this one.
    if any(word in block for block in found for word in ("import keras", "mf.connect")):
        backend = "tensorflow" if page.stem == "tensorflow" else "jax"
        script = tmp_path / f"page_of_{page.stem}.py"
        script.write_text("\n".join(block.lstrip("\n") for block in found), encoding="utf-8")
        environment = {**os.environ, "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}
        # A cluster of its own, never one that happens to run here; nothing of it in the home folder or in Ray's
        # common one. (Not in tmp_path: Ray's sockets need a short path.)
        with TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
            environment |= {"RAY_ADDRESS": "local", "RAY_TMPDIR": folder, "RAY_AUTH_TOKEN": token_hex()}
            done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return
    namespace = {"__name__": page.stem}
    for block in found:
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_the_page_lead_somewhere(page: Path) -> None:
    targets = [match["path"] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_blocks_are_found_with_their_lines_and_some_are_skipped() -> None:
    text = "# Page\n```python\nx = 1\n```\n<!-- not run -->\n```python\nnonsense(\n```\n```\nmake test\n```\n"
    assert blocks(text) == ["\n\nx = 1\n"]
    assert len(RUNNABLE) >= 5
