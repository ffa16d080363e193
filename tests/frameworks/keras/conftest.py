"""Keras's backend is fixed per process, so these tests run in processes of their own: see `../test_keras.py`."""

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent

if "MODELFLEET_KERAS_TESTS" not in os.environ:
    collect_ignore_glob = ["test_*.py"]

# Before JAX is first used: programs here run for milliseconds and take seconds to compile.
_QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
if os.environ.get("KERAS_BACKEND") == "jax":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK}".strip()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Replicas need new processes: they come first, so that their processes serve the tests of fleets, too."""
    items.sort(key=lambda item: item.path.name != "test_replica.py")
    for item in items:
        if item.path.parent == FOLDER:
            # Keras and TensorFlow warn of their own use of what NumPy and torch will drop (Keras 3.15 saves a
            # weight by `np.array(variable)`): here warnings are no errors.
            item.add_marker(pytest.mark.filterwarnings("default"))
