"""Tasks for workers, where every kind of worker can import them from."""

import multiprocessing
import os
import signal
import time
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


def nested(order: Any) -> Generator[Any, Any, None]:
    """What a worker of this worker gives, and a process that is forked here."""
    from modelfleet.workers.process import ProcessPlace

    worker = ProcessPlace("cpu:0", "cpu:0").hire()
    worker.start(echo, order, "an order")
    _, first = worker.receive()
    worker.close()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=theirs.send, args=(order,))
    child.start()
    second = ours.recv()
    child.join()
    yield [first, second]


def with_a_child(order: Any) -> Generator[Any, Any, None]:
    """The number of a process that does not end by itself."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(10**6,))
    child.start()
    yield child.pid


def drawn() -> float:
    """A number of this process's own."""
    return float(np.random.random())
