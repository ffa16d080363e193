"""The tests on the stand-in accelerator, in a process of their own: there, torch has the device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.standin import building

FOLDER = Path(__file__).parent / "standin"


@pytest.mark.slow
@pytest.mark.skipif(
    building.compiler() is None, reason="the stand-in accelerator needs a C++ compiler: install g++"
)
def test_on_the_stand_in_accelerator() -> None:
    building.build()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {
        "MODELFLEET_STANDIN_TESTS": "1",
        "PYTHONPATH": os.pathsep.join([str(FOLDER / "autoload"), *sys.path]),
    }
    plugins = ["-p", "no:xdist", "-p", "no:cacheprovider"]
    folders = [str(FOLDER), str(FOLDER.parent / "gpu")]
    command = [sys.executable, "-m", "pytest", *folders, "--timeout", "600", *plugins]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.fail(f"{' '.join(command)}:\n{result.stdout[-20000:]}\n{result.stderr[-4000:]}", pytrace=False)
