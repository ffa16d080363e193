"""The tests on the stand-in accelerator, in processes of their own: there, torch has the device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.standin import building

FOLDER = Path(__file__).parent / "standin"
FILES = [path for folder in (FOLDER, FOLDER.parent / "gpu") for path in sorted(folder.glob("test_*.py"))]


@pytest.mark.slow
@pytest.mark.skipif(
    building.compiler() is None, reason="the stand-in accelerator needs a C++ compiler: install g++"
)
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_on_the_stand_in_accelerator(path: Path) -> None:
    building.build()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {
        "MODELFLEET_STANDIN_TESTS": "1",
        "OMP_NUM_THREADS": "1",  # a sum in two threads is rounded differently from one in one thread
        "PYTHONPATH": os.pathsep.join([str(FOLDER / "autoload"), *sys.path]),
    }
    plugins = ["-p", "no:xdist", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", str(path), "--timeout", "600", *plugins]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.fail(f"{' '.join(command)}:\n{result.stdout[-20000:]}\n{result.stderr[-4000:]}", pytrace=False)
