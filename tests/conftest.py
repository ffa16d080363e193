"""What all tests have in common."""

import os
import sys
from pathlib import Path

# No test goes by what an earlier run has measured, and none leaves its own in the user's cache.
os.environ["MODELFLEET_CACHE"] = ""

# `tests.helpers` can be imported however pytest is started.
sys.path.insert(0, str(Path(__file__).parent.parent))
