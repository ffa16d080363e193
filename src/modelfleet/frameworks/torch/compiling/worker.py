"""Process that compiles one program: `python worker.py FOLDER OWNER`, where OWNER is the process that started it.

The process writes its outcome to the folder and then waits to be killed, so one of the two processes is always
there to remove the folder. When the owner ends, its end of the pipe to stdin closes, or this process gets another
parent. Then everything here ends at once.
"""

# The standard library only: the owner may die while torch is imported.
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

DONE, FAILED = "done", "failed"
_CHECK_SECONDS = 1.0  # between two checks of the parent process
_MAX_TRIES = 100  # to remove a folder


def remove(folder: Path) -> None:
    """Remove a folder that a process may still be writing to."""
    for _ in range(_MAX_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.01)


def main(folder: Path, owner: int) -> None:
    """Compile the graphs in `folder` into torch's cache on disk, and write the outcome to the folder."""
    threading.Thread(target=_end_with_owner, args=(folder, owner), daemon=True).start()
    try:
        lower_priority()
        _write_outcome(folder, DONE, _compile(folder))
    except BaseException as error:
        _write_outcome(folder, FAILED, traceback.format_exception_only(error)[-1].strip())
    signal.pause()


def lower_priority() -> None:
    """Take only what the training and other programs leave of the cores."""
    os.nice(19)
    # Linux may divide the cores between sessions first. Then a nice value counts only within the session, and this
    # process has one of its own.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")


def _compile(folder: Path) -> str:
    """Compile the first form that can be compiled, and return which one that was."""
    from modelfleet.frameworks.torch.compiling import settings
    from modelfleet.frameworks.torch.compiling.compiler import compile_first
    from modelfleet.frameworks.torch.compiling.graph_source import GraphSource

    forms = json.loads((folder / "forms.json").read_text())
    settings.apply(json.loads((folder / "settings.json").read_text()))
    return compile_first([GraphSource.read(folder / name) for name in forms], to_run=False)[1]


def _write_outcome(folder: Path, name: str, text: str) -> None:
    (folder / "outcome").write_text(text)
    os.replace(folder / "outcome", folder / name)  # atomic: a reader sees all of it or nothing


def _end_with_owner(folder: Path, owner: int) -> None:
    """Wait until the owner ends. Then remove the folder, and kill this process and the compilers it started."""
    while os.getppid() == owner:
        ready, _, _ = select.select([0], [], [], _CHECK_SECONDS)
        if ready and not os.read(0, 1):
            break
    remove(folder)
    os.killpg(0, signal.SIGKILL)  # the owner started this process in a group of its own


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
