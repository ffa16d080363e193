"""User's source files that a worker has loaded, to notice when they change."""

import os
import sys
import sysconfig
import time
from contextlib import suppress

FileStamps = dict[str, tuple[int, int]]
"""Time of the last change, in nanoseconds, and size; by path."""

_UNKNOWN = (-1, -1)  # equals no file's stamp


class LoadedFiles:
    """Files of this process's modules that are the user's own: neither Python's nor installed."""

    def __init__(self) -> None:
        self.stamps: FileStamps = {}
        self._seen_modules: set[str] = set()
        self._imports_since = 0
        paths = sysconfig.get_paths()
        self._installed = tuple({paths[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})

    def mark_import_start(self) -> None:
        """Note that modules may be imported from now on."""
        self._imports_since = time.time_ns()

    def update(self) -> FileStamps:
        """Add what was imported since the last update, and return the stamps of all files."""
        for name in sys.modules.keys() - self._seen_modules:
            self._seen_modules.add(name)
            path = getattr(sys.modules.get(name), "__file__", None)
            if isinstance(path, str) and name.partition(".")[0] != "modelfleet" and not self._is_installed(path):
                stamp = _stamp(path)
                # A file that changed while it may have been imported: which version was loaded is unknown.
                self.stamps[path] = stamp if stamp[0] < self._imports_since else _UNKNOWN
        return self.stamps

    def _is_installed(self, path: str) -> bool:
        in_packages = f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path
        return in_packages or path.startswith(self._installed)


def have_changed(stamps: FileStamps) -> bool:
    """Return True if a file is not as it was."""
    return any(_stamp(path) != stamp for path, stamp in stamps.items())


def _stamp(path: str) -> tuple[int, int]:
    with suppress(OSError):
        found = os.stat(path)
        return found.st_mtime_ns, found.st_size
    return 0, 0
