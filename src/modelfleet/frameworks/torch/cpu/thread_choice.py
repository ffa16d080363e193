"""Number of threads of a lane's steps while other processes need the cores: all of them or one, by measurement.

Threads that sleep while they wait have to be woken for every operation. For small models that takes longer than
what a second thread saves: 64 compiled MLPs took 2.6 ms a step with two such threads, 1.4 with one, and 1.0 with
two on an idle machine. Wide models are quicker with all threads in either case.
"""

import time
from typing import Self

import torch

from modelfleet.frameworks.torch.cpu import openmp

TRIAL_SECONDS = 0.1  # of steps with each number of threads
HOLD_SECONDS = 10.0  # after which both are tried again


class ThreadChoice:
    """Context of a call that takes steps. It must be quick, because every step enters it."""

    def __init__(self) -> None:
        self._usual = 0  # threads outside of the context; 0 if nothing was chosen
        self._threads = 0  # the choice
        self._steps = 1
        self._begun = 0.0
        self._forget()

    def _forget(self) -> None:
        self._rates: dict[int, float] = {}  # seconds per step by number of threads, if they were tried
        self._trial = 0.0, 0  # seconds and steps so far
        self._tried_at = 0.0

    def __call__(self, steps: int) -> Self:
        """Return the context for a call of so many steps."""
        self._steps = steps
        return self

    def __enter__(self) -> None:
        if not openmp.crowded():
            self._usual = 0
            if self._rates:
                self._forget()
            return
        self._usual = self._threads = torch.get_num_threads()
        self._begun = time.perf_counter()
        if self._usual > 1:
            self._threads = self._choose()
            if self._threads != self._usual:
                torch.set_num_threads(self._threads)

    def _choose(self) -> int:
        if len(self._rates) == 2 and self._begun > self._tried_at + HOLD_SECONDS:
            self._forget()
        if len(self._rates) == 2:
            return min(self._rates, key=self._rates.__getitem__)
        return 1 if self._usual in self._rates else self._usual

    def __exit__(self, *error: object) -> None:
        if not self._usual:
            return
        if self._threads != self._usual:
            torch.set_num_threads(self._usual)
        if self._usual > 1 and len(self._rates) < 2:
            now = time.perf_counter()
            self._trial = self._trial[0] + now - self._begun, self._trial[1] + self._steps
            if self._trial[0] >= TRIAL_SECONDS:
                self._rates[self._threads] = self._trial[0] / self._trial[1]
                self._trial, self._tried_at = (0.0, 0), now
