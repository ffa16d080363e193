"""The tests of Keras models in graphs, once on each backend: a process has one from its start to its end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "keras"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
def test_keras_nodes_on(backend: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {
        "KERAS_BACKEND": backend,
        "MODELFLEET_KERAS_TESTS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    plugins = ["-p", "no:xdist", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", str(FOLDER), "--timeout", "1800", *plugins]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.fail(
            f"{' '.join(command)} on {backend}:\n{result.stdout[-20000:]}\n{result.stderr[-4000:]}", pytrace=False
        )
