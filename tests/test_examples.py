"""Every example runs as a script, and says what it should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

# What each prints, as a pattern.
EXPECTED = {
    "sweep": r"50 of one structure, fused(?s:.*)\d+ of 50 stopped early(?s:.*)the best is a plain Sequential",
    "per_store": r"200 stores, R² 0\.9\d in the median(?s:.*)read back alone: \['17'\]",
    "cross_validation": r"fold-7: [01]\.\d+\naccuracy over 8 folds: (0\.9\d+|1\.000) ±",
    "huggingface": r"fused: True(?s:.*)lr 0\.003: loss 0\.\d+, accuracy (0\.9\d|1\.00)",
    "mixed": r"narrow-1: its data raised OSError: the disk is gone(?s:.*)keras-fast: loss 1\.\d+ → 0\.\d+",
    "three_keras_models": r"digits: loss [12]\.\d+ → 0\.\d+ in 6 epochs, Sequential(?s:.*)price: loss",
    "many_users": (
        r"as from the model itself: True\nimap: 20,000 rows of archive\n"
        r"a replica was killed, and all answers are right: True"
    ),
    "two_devices": r"cpu:1(?s:.*)two devices: .* differ by \de[-+]0[05-9](?s:.*)both devices: .* \de-0[5-9]",
    "two_stages": r"2 stages(?s:.*)accuracy 0\.[89]\d on two devices\nthe undivided model differs by \de-0[4-9]",
    "ensemble": r"vote of eight: accuracy 0\.\d+(?s:.*)differs by \de[-+]0\d(?s:.*)missing: .*finite.*True",
    "federated": r"alone: accuracy 0\.[34]\d, .*\ntogether: accuracy 0\.[67]\d, ",
    "resume": r"went on to epoch 6\nthe same weights as the unbroken run: True",
}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_example_says_what_it_should(name: str, tmp_path: Path) -> None:
    if name == "huggingface":
        pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", "KERAS_BACKEND": "jax"},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(EXPECTED[name], done.stdout), done.stdout
    assert list(tmp_path.iterdir()) == []  # nothing is written unasked
