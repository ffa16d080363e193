"""Find the user's own lines in a traceback, so that a message can name them: `net.py:12`."""

import sysconfig
import traceback
from functools import lru_cache
from pathlib import Path
from types import FrameType

_MODELFLEET = str(Path(__file__).resolve().parents[1])
_LIBRARIES = (
    *(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    _MODELFLEET,
)


@lru_cache(maxsize=4096)
def is_user_file(path: str) -> bool:
    """Return True if a file belongs neither to Python, nor to an installed library, nor to modelfleet."""
    if not path or path.startswith("<frozen"):
        return False
    return path.startswith("<") or not str(Path(path).resolve()).startswith(_LIBRARIES)


def line_of_error(error: BaseException) -> str | None:
    """Return the innermost line of the user's code that raised, as `net.py:12`; None if there is none."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [_line(frame.f_code.co_filename, number) for frame, number in frames]
    return next((line for line in reversed(lines) if line is not None), None)


def line_of_frame(frame: FrameType | None, wrapper: str) -> str | None:
    """Return the innermost line of the user's code that modelfleet runs; None if there is none.

    Args:
        frame: Where to begin.
        wrapper: The end of the path of a file of modelfleet that user code calls without knowing it.
    """
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_MODELFLEET) and not path.endswith(wrapper):
            return None  # further out is the user's call of modelfleet
        line = _line(path, frame.f_lineno)
        if line is not None:
            return line
        frame = frame.f_back
    return None


def _line(path: str, number: int | None) -> str | None:
    # Generated code, such as torch's "<eval_with_key>.1", has no file to look into. A notebook's cells have.
    if not is_user_file(path) or (path.startswith("<") and not path.startswith(("<stdin>", "<ipython"))):
        return None
    return f"{Path(path).name}:{number}"
