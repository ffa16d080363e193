"""What all tests have in common."""

import sys
from pathlib import Path

# `tests.helpers` can be imported however pytest is started.
sys.path.insert(0, str(Path(__file__).parent.parent))
