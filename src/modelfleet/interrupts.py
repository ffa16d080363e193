"""Ctrl-C: it stops a fit after the current step, and is not lost while a fit is prepared."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Remembers that Ctrl-C was pressed. Pressed again, it raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.pressed = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle Ctrl-C here, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            if self.pressed:
                raise KeyboardInterrupt
            self.pressed = True

        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def noticing() -> Iterator[Callable[[], None]]:
    """Notice Ctrl-C while a fit is prepared. Yields a function that raises KeyboardInterrupt if it was pressed.

    The exception of Ctrl-C alone may be lost: Python drops exceptions within a weak reference's callback or a
    `__del__`, and every import has such callbacks.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    pressed = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        before(number, frame)

    def check() -> None:
        if pressed and before is signal.default_int_handler:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
