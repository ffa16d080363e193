"""Tasks for workers, where every kind of worker can import them from."""

import os
import signal
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from modelfleet.workers import interrupted


def echo(order: Any) -> Generator[Any, Any, None]:
    """Gives the order, then whatever it is answered, until that is None."""
    answer = yield order
    while answer is not None:
        answer = yield answer


def fail(order: str) -> Generator[Any, Any, None]:
    yield "begun"
    raise KeyError(order)


class UnloadableError(Exception):
    """Can be pickled, and not be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def fail_strangely(order: str) -> Generator[Any, Any, None]:
    yield "begun"
    raise UnloadableError("un", order)


def die(order: int) -> Generator[Any, Any, None]:
    yield os.getpid()
    os.kill(os.getpid(), order or signal.SIGKILL)


def until_interrupted(order: Any) -> Generator[Any, Any, None]:
    yield "begun"
    while not interrupted():
        pass
    yield "interrupted"


def grow(order: Any) -> Generator[Any, Any, None]:
    """Arrays of ever larger sizes, filled with what is asked for."""
    size = 1
    value = yield None
    while value is not None:
        value = yield np.full(size, value)
        size *= 40


def environment(order: list[str]) -> Generator[Any, Any, None]:
    yield {name: os.environ.get(name) for name in order}


def total(order: Any) -> Generator[Any, Any, None]:
    """The sum of a shared value, and whether its memory is its own."""
    value = order.get()
    yield float(value.sum()), bool(value.flags.owndata)


def called(function: Callable[[], Any]) -> Generator[Any, Any, None]:
    """What a function gives."""
    yield function()
