"""Where steps run: in this process, in processes of their own, or on a Ray cluster. One protocol for all."""

from modelfleet.workers._base import (
    CannotSendError,
    NoRoomError,
    Place,
    Shared,
    Worker,
    WorkerDiedError,
    interrupted,
)

__all__ = ["CannotSendError", "NoRoomError", "Place", "Shared", "Worker", "WorkerDiedError", "interrupted"]
