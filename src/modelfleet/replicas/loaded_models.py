"""Models that one replica's worker holds, kept up to date with those of the pool."""

from collections.abc import Callable

from modelfleet.replicas.replica_task import Load, Switch
from modelfleet.replicas.state import ModelVersion, PoolState
from modelfleet.workers import CannotSendError
from modelfleet.workers.supervisor import WorkerEnd

Ask = Callable[[Load | Switch], Exception | None]
"""Asks the worker to load or switch models, and returns the error that it had."""


class LoadedModels:
    """Model that a replica answers with, and the one that is loaded to replace it."""

    def __init__(self, state: PoolState, replica: str) -> None:
        self._state, self._replica = state, replica
        self.current: ModelVersion | None = None
        self.spare: ModelVersion | None = None

    def reset(self, version: ModelVersion | None) -> None:
        """Note that a new worker has this model alone; None if there is no worker."""
        self.current, self.spare = version, None

    def is_behind(self) -> bool:
        """Return True if `catch_up` has something to do."""
        coming = self._state.next_version
        if self.current is not self._state.version or (self.spare is not None and self.spare is not coming):
            return True
        return coming is not None and coming is not self.spare and coming.refused is None

    def catch_up(self, ask: Ask, stop: Callable[[], bool]) -> None:
        """Have models loaded, switched or forgotten, until the worker has those that the pool wants.

        Raises:
            WorkerDiedError: If the worker dies meanwhile.
            Exception: If the current model can't be loaded.
        """
        while self.is_behind() and not stop():
            wanted, coming = self._state.version, self._state.next_version
            if self.current is not wanted:
                if self.spare is not wanted:
                    error = ask(Load(wanted.specs[self._replica]))
                    if error is not None:
                        raise error
                ask(Switch())
                self.current, self.spare = wanted, None
            elif coming is not None and coming is not self.spare:
                self._load(coming, ask)
            else:
                ask(Switch(forget=True))
                self.spare = None
            self._state.wake()

    def _load(self, coming: ModelVersion, ask: Ask) -> None:
        try:
            error = ask(Load(coming.specs[self._replica]))
        except CannotSendError as unsent:
            error = unsent
        except Exception as died:
            coming.budget.charge(WorkerEnd(died, started=True))
            if coming.budget.is_spent:
                coming.refused = died
            raise
        if error is None:
            self.spare = coming
        else:
            coming.refused = error
