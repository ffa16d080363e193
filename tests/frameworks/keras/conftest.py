"""Keras's backend is fixed per process, so these tests run in processes of their own: see `../test_keras.py`."""

import os

if "MODELFLEET_KERAS_TESTS" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
