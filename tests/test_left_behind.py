"""A user's script runs once, and nothing outlives the process that started it."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.workers.programs import EVERYTHING, KILLED

LONG = os.environ.get("MODELFLEET_TEST_LONG")  # twenty moments instead of a few; `make killing`
MOMENTS = range(20 if LONG else 1)
LIMIT = 120.0  # seconds that something which has to happen may take


def environment(folder: Path) -> dict[str, str]:
    """For a program of its own: where it notes that it runs, and a temporary directory that nobody else has."""
    scratch = folder / "tmp"
    scratch.mkdir(exist_ok=True)
    return {
        **os.environ,
        "RUNS": str(folder / "runs"),
        "TMPDIR": str(scratch),
        "PYTHONDONTWRITEBYTECODE": "",
    }


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text(encoding="ascii").splitlines())


def left(env: Mapping[str, str]) -> list[str]:
    """The processes that have the environment of a program, which all of its descendants have."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RUNS") == env["RUNS"] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    return {name for name in names if not name.startswith(("sem.", "plasma"))}


def assert_nothing_left(env: Mapping[str, str]) -> None:
    end = time.monotonic() + LIMIT
    while (found := left(env)) and time.monotonic() < end:
        time.sleep(0.05)
    assert found == []
    scratch = Path(env["TMPDIR"])
    assert [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor_")] == []


def checked(command: list[str], folder: Path, program: str | None = None) -> None:
    """Run a program to its end: it has run once, and has left nothing."""
    env = environment(folder)
    done = subprocess.run(command, env=env, cwd=folder, input=program, capture_output=True, text=True, timeout=600)
    assert "all is well" in done.stdout, done.stderr
    assert runs(folder) == 1
    assert_nothing_left(env)


@pytest.mark.slow
def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(EVERYTHING, encoding="utf-8")
    checked([sys.executable, str(script)], tmp_path)


@pytest.mark.slow
def test_a_program_from_the_standard_input_runs_once(tmp_path: Path) -> None:
    checked([sys.executable, "-"], tmp_path, EVERYTHING)


@pytest.mark.slow
def test_a_script_runs_once_where_processes_are_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELFLEET_FORK", "never")
    script = tmp_path / "script.py"
    script.write_text(EVERYTHING, encoding="utf-8")
    checked([sys.executable, str(script)], tmp_path)


@pytest.mark.slow
def test_the_cells_of_a_notebook_run_once(tmp_path: Path) -> None:
    from jupyter_client.manager import KernelManager

    env = environment(tmp_path)
    manager = KernelManager()
    manager.connection_file = str(tmp_path / "kernel.json")
    manager.start_kernel(env=env, cwd=str(tmp_path))
    try:
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=LIMIT)
            client.execute(EVERYTHING)
            told = ""
            while "all is well" not in told:
                message = client.get_iopub_msg(timeout=600)
                told += message["content"].get("text", "")
                assert message["msg_type"] != "error", message["content"]
        finally:
            client.stop_channels()
    finally:
        manager.shutdown_kernel(now=True)
    assert runs(tmp_path) == 1
    assert_nothing_left(env)


@contextmanager
def started(program: str, env: Mapping[str, str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    script = folder / "script.py"
    script.write_text(program, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env=env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("what", KILLED)
def test_nothing_is_left_when_a_program_is_killed(what: str, moment: int, tmp_path: Path) -> None:
    before = shared_memory()
    env = environment(tmp_path)
    with started(KILLED[what], env, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "under way\n", process.communicate()[1]
        time.sleep(random.Random(moment).uniform(0, 2))
        assert len(left(env)) > 1
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert_nothing_left(env)
    assert shared_memory() - before == set()
    assert runs(tmp_path) == 1
