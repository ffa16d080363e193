"""Callbacks that break a fit at a step."""

import signal
from typing import Any

import modelfleet as mf


class Press(mf.Callback):
    """Presses Ctrl-C after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step:
            signal.raise_signal(signal.SIGINT)


class Break(mf.Callback):
    """Raises after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step:
            raise ZeroDivisionError("a bug of the user's")
