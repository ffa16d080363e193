"""`import modelfleet` is light: it brings NumPy and nothing else."""

import subprocess
import sys

SCRIPT = """
import sys
before = set(sys.modules)
import modelfleet
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""

HEAVY = {
    "cyclopts",
    "jax",
    "keras",
    "matplotlib",
    "pandas",
    "polars",
    "ray",
    "rich",
    "safetensors",
    "starlette",
    "tensorflow",
    "torch",
}


def test_the_import_brings_numpy_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    brought = set(done.stdout.split())
    assert brought & HEAVY == set()
    assert brought - sys.stdlib_module_names <= {"modelfleet", "numpy"}
    assert "modelfleet" in brought


def test_a_process_that_compiles_nothing_does_without_what_compiling_needs() -> None:
    script = "import sys, modelfleet.frameworks.torch; sys.exit('sympy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr or "sympy was imported, which takes a worker half a second"
