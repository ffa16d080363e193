"""The stand-in belongs to a whole process, so these tests have one of their own: see `../test_standin.py`."""

import os

if "MODELFLEET_STANDIN_TESTS" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
