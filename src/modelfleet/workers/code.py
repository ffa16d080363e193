"""Which code a worker has loaded, and whether that has changed since."""

import os
import sys
import sysconfig
import time
from contextlib import suppress

Files = dict[str, tuple[int, int]]
"""By path: the time of the last change, in nanoseconds, and the size."""

_CHANGED = (-1, -1)  # no file is like this


class Loaded:
    """The files of the modules of this process that are the user's own: neither Python's nor installed."""

    def __init__(self) -> None:
        self.files: Files = {}
        self._known: set[str] = set()
        self._since = 0
        paths = sysconfig.get_paths()
        self._foreign = tuple({paths[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})

    def begin(self) -> None:
        """Note that modules may be imported from now on."""
        self._since = time.time_ns()

    def look(self) -> Files:
        """Take in what was imported since the last look."""
        for name in sys.modules.keys() - self._known:
            self._known.add(name)
            path = getattr(sys.modules.get(name), "__file__", None)
            if isinstance(path, str) and name.partition(".")[0] != "modelfleet" and not self._is_foreign(path):
                stamp = _stamp(path)
                # Changed while it was, or may have been, imported: nobody knows which code that is.
                self.files[path] = stamp if stamp[0] < self._since else _CHANGED
        return self.files

    def _is_foreign(self, path: str) -> bool:
        installed = f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path
        return installed or path.startswith(self._foreign)


def changed(files: Files) -> bool:
    """Whether a file is not as it was."""
    return any(_stamp(path) != stamp for path, stamp in files.items())


def _stamp(path: str) -> tuple[int, int]:
    with suppress(OSError):
        found = os.stat(path)
        return found.st_mtime_ns, found.st_size
    return 0, 0
