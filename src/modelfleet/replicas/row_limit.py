"""Limits on the rows that a replica gets at once: fewer if memory is short, several batches if they are quick."""

MAX_BATCHES = 8  # given to a replica at once
FIRST_PATIENCE, MAX_PATIENCE = 8, 1024  # batches without trouble before more rows are tried again


class RowLimit:
    """Number of rows that a replica has memory for: half of what was too many.

    Whatever took the memory may release it: after a while, twice as many rows are tried again.
    """

    def __init__(self, unlimited_from: int) -> None:
        self.rows: int | None = None
        """Number of rows at once, at most; None for no limit."""
        self._unlimited_from = unlimited_from
        self._successes, self._patience = 0, FIRST_PATIENCE

    def record_shortage(self, rows: int) -> None:
        """Note that there was no memory for `rows` rows."""
        self.rows = max(1, rows // 2)
        self._successes, self._patience = 0, min(2 * self._patience, MAX_PATIENCE)

    def record_success(self, rows: int) -> None:
        """Note that there was memory for `rows` rows."""
        if self.rows is None or rows < self.rows:
            return
        self._successes += 1
        if self._successes >= self._patience:
            self._successes, self.rows = 0, 2 * self.rows
            if self.rows >= self._unlimited_from:
                self.rows = None


class BatchCount:
    """Number of batches that a replica is given at once: several quick ones, as each costs its owner time."""

    def __init__(self, seconds_at_once: float) -> None:
        self.batches = 1
        self.seconds_at_once = seconds_at_once

    def record(self, seconds_per_batch: float) -> None:
        """Update the number with the time that a batch took."""
        fitting = min(MAX_BATCHES, int(self.seconds_at_once / max(seconds_per_batch, 1e-6)))
        self.batches = max(1, min(fitting, 2 * self.batches))
