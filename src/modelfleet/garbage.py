"""Python's garbage: its collector while very many objects are made that stay, and what an error keeps alive."""

import gc
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 2**31 - 1  # younger collections until a full one

_lock = threading.Lock()
_depth = 0
_before = (0, 0, 0)


@contextmanager
def without_full_collections() -> Iterator[None]:
    """Make no full collection within this context. Collections of young objects, which find most garbage, go on.

    A full collection visits every object of the process. Thousands of models are millions of objects, and while
    they are made, Python visits them again and again: that takes as long as to make them.
    """
    global _depth, _before
    with _lock:
        _depth += 1
        if _depth == 1:
            _before = gc.get_threshold()
            gc.set_threshold(*_before[:2], _NEVER)
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth and gc.get_threshold() == (*_before[:2], _NEVER):  # nobody has set others meanwhile
                gc.set_threshold(*_before)


def forget_frames(error: BaseException) -> None:
    """Drop the local variables of the calls that an error and its causes came from, such as a step's tensors."""
    following: BaseException | None = error
    while following is not None:
        traceback.clear_frames(following.__traceback__)
        following.__traceback__ = None
        following = following.__cause__ or following.__context__
