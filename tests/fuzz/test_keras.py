"""Random programs on Keras models, each backend in a process of its own: in a fleet == alone."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_programs_give_what_keras_gives(backend: str) -> None:
    environment = os.environ | {
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MODELFLEET_COMPILE": "never",
        "MODELFLEET_CACHE": "",
    }
    command = [sys.executable, "-m", "tests.fuzz", "--examples", "8", "--target", f"keras-{backend}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
