"""Files at which processes of one machine find each other. Nothing has to delete them."""

import os
import secrets
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from modelfleet.workers import pickling
from modelfleet.workers.channel import above_standard


class Rendezvous:
    """Makes a new file. On Linux it has no name, and exists as long as a process has it open."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._path = f"{tempfile.gettempdir()}/modelfleet-{secrets.token_hex(8)}"
        if sys.platform == "linux":
            self._descriptor = above_standard(os.memfd_create("modelfleet-rendezvous"))

    @property
    def address(self) -> str:
        """URL of the file for `torch.distributed`, valid within this process."""
        path = self._path if self._descriptor is None else f"/proc/self/fd/{self._descriptor}"
        return f"file://{path}"

    def __reduce__(self) -> tuple[Callable[..., "Rendezvous"], tuple[str, int | None]]:
        index = None if self._descriptor is None else pickling.attach_descriptor(self._descriptor)
        return _unpickled, (self._path, index)

    def close(self) -> None:
        """Close the file, or delete it where it has a name."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        else:
            with suppress(FileNotFoundError):
                Path(self._path).unlink()

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def _unpickled(path: str, index: int | None) -> Rendezvous:
    made = Rendezvous.__new__(Rendezvous)
    made._path = path
    made._descriptor = None if index is None else above_standard(os.dup(pickling.attached_descriptor(index)))
    return made
