"""The stand-in accelerator is registered for a whole process, so these tests have one: see `../test_standin.py`."""

import os

if "MODELFLEET_STANDIN_TESTS" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
