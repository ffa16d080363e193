"""What all tests have in common."""

import os
import sys
from pathlib import Path

import pytest

# No test goes by what an earlier run has measured, and none leaves its own in the user's cache.
os.environ["MODELFLEET_CACHE"] = ""

# `tests.helpers` can be imported however pytest is started.
sys.path.insert(0, str(Path(__file__).parent.parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
