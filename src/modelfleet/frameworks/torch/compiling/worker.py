"""The process that compiles one program: `python compile_worker.py FOLDER OWNER`, OWNER being who started it.

It says in the folder how that went, and then waits to be ended: so one of the two is always there to remove the
folder. When the owner is gone, its end of the pipe to our stdin closes, or we have another parent: then everything
here ends at once, whatever it is at.
"""

# The standard library alone: the owner may die while torch is imported.
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

DONE, FAILED = "done", "failed"
_LOOK = 1.0  # seconds between two looks at who our parent is
_TRIES = 100


def remove(folder: Path) -> None:
    """Remove a folder that somebody may still be writing to."""
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.01)


def main(folder: Path, owner: int) -> None:
    """Compile what `folder` holds into torch's cache on disk, and say how it went."""
    threading.Thread(target=_end_with, args=(folder, owner), daemon=True).start()
    try:
        os.nice(10)  # the training goes first
        _say(folder, DONE, _compiled(folder))
    except BaseException as error:
        _say(folder, FAILED, traceback.format_exception_only(error)[-1].strip())
    signal.pause()


def _compiled(folder: Path) -> str:
    """Compile the first form that can be; gives which it was."""
    from modelfleet.frameworks.torch.compiling.compiler import compile_first
    from modelfleet.frameworks.torch.compiling.graph_source import GraphSource

    forms = json.loads((folder / "forms.json").read_text())
    return compile_first([GraphSource.read(folder / name) for name in forms])[1]


def _say(folder: Path, name: str, text: str) -> None:
    (folder / "outcome").write_text(text)
    os.replace(folder / "outcome", folder / name)  # whole, or not there


def _end_with(folder: Path, owner: int) -> None:
    """Wait for the owner's end, and then end this process, the compilers that it has started, and the folder."""
    while os.getppid() == owner:
        ready, _, _ = select.select([0], [], [], _LOOK)
        if ready and not os.read(0, 1):
            break
    remove(folder)
    os.killpg(0, signal.SIGKILL)  # the group is our own: the owner started it with us


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
