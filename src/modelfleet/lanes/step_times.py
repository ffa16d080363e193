"""Times of a lane's steps."""

WARM_UP_CALLS = 3  # the first calls trace, allocate and warm up
MIN_STEADY_STEPS = 50  # after the first epoch; with fewer, the time of a step is not trusted


class StepTimes:
    """Seconds per step of one lane: recently, and in a whole run."""

    def __init__(self) -> None:
        self.recent: float | None = None
        """Recent seconds per step. None until a few steps have been taken."""
        self._calls = 0
        self._steady: float | None = None
        self._steady_steps = 0

    @property
    def steady(self) -> float | None:
        """Return the seconds per step of the last run, without its first epoch. None if the run was too short."""
        return self._steady if self._steady_steps >= MIN_STEADY_STEPS else None

    def add_call(self, seconds: float) -> None:
        """Add the seconds per step of one call to the moving average."""
        self._calls += 1
        if self._calls > WARM_UP_CALLS:
            self.recent = seconds if self.recent is None else 0.9 * self.recent + 0.1 * seconds

    def add_epoch(self, steps: int, seconds: float, *, first: bool) -> None:
        """Record how long an epoch took, including everything around its steps.

        The first epoch of a fit does not count, because programs are traced, compiled and warmed up in it.
        """
        if not steps:
            return
        self.recent = seconds / steps
        if first:
            self._steady, self._steady_steps = None, 0
        else:
            self._steady = min(self.recent, self._steady or self.recent)
            self._steady_steps += steps
