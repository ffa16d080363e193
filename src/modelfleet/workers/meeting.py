"""A file at which processes of one machine meet, and which nobody has to delete."""

import os
import secrets
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from modelfleet.workers import shared
from modelfleet.workers.channel import above_standard


class Meeting:
    """A new file. On Linux it has no name, and is there as long as somebody has it open."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._path = f"{tempfile.gettempdir()}/modelfleet-{secrets.token_hex(8)}"
        if sys.platform == "linux":
            self._descriptor = above_standard(os.memfd_create("modelfleet-meeting"))

    @property
    def address(self) -> str:
        """Where `torch.distributed` finds it, within this process."""
        path = self._path if self._descriptor is None else f"/proc/self/fd/{self._descriptor}"
        return f"file://{path}"

    def __reduce__(self) -> Any:
        place = None if self._descriptor is None else shared.sent(self._descriptor)
        return _arrived, (self._path, place)

    def close(self) -> None:
        """Leave it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        else:
            with suppress(FileNotFoundError):
                Path(self._path).unlink()

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def _arrived(path: str, place: int | None) -> Meeting:
    made = Meeting.__new__(Meeting)
    made._path = path
    made._descriptor = None if place is None else above_standard(os.dup(shared.came(place)))
    return made
