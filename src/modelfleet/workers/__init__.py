"""Workers: tasks that run in this process, in processes of their own, or on a Ray cluster, behind one protocol."""

from modelfleet.workers.protocol import (
    CannotSendError,
    NoRoomError,
    Place,
    SharedValue,
    Task,
    Worker,
    WorkerDiedError,
    interrupted,
)

__all__ = [
    "CannotSendError",
    "NoRoomError",
    "Place",
    "SharedValue",
    "Task",
    "Worker",
    "WorkerDiedError",
    "interrupted",
]
