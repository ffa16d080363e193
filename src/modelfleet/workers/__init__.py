"""Where steps run when not in this process: worker processes, and what crosses to them."""

from modelfleet.workers.process import Worker, WorkerDiedError, hire, release
from modelfleet.workers.shared import Block, CannotSendError

__all__ = ["Block", "CannotSendError", "Worker", "WorkerDiedError", "hire", "release"]
