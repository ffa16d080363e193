"""Keras's backend is fixed per process, so these tests run in others: see `../test_keras_nodes.py`."""

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent

if "MODELFLEET_KERAS_TESTS" not in os.environ:
    collect_ignore_glob = ["test_*.py"]

# Before JAX is first used: programs here run for milliseconds and take seconds to compile.
if os.environ.get("KERAS_BACKEND") == "jax":
    quick = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}".strip()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keras and TensorFlow warn of their own use of what NumPy and torch will drop: here these are no errors."""
    for item in items:
        if item.path.parent == FOLDER:
            item.add_marker(pytest.mark.filterwarnings("default"))
