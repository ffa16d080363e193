"""Contexts in which Keras runs on torch: its errors as they were raised, its draws from a member's own stream."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import keras
import torch
from keras.src.backend.torch import random as keras_random
from keras.src.backend.torch.core import get_device
from keras.src.random.seed_generator import draw_seed

from modelfleet.frameworks.torch.random.operations import DrawFromStreams
from modelfleet.frameworks.torch.random.streams import Streams


class _Substitute:
    """A function of a Keras module that is replaced as long as any thread is within this context."""

    def __init__(self, module: ModuleType, name: str, value: Callable[..., object]) -> None:
        self._target = module, name
        self._value = value
        self._before = getattr(module, name)
        self._users = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            setattr(*self._target, self._value)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                setattr(*self._target, self._before)


def _advance(seed: keras.random.SeedGenerator) -> None:
    """Count a draw like Keras, but make no generator: the numbers come from the member's own stream."""
    draw_seed(seed)


# At every draw, Keras on torch makes a generator from the value of a seed, which can't be traced.
STREAM_DRAWS = _Substitute(keras_random, "torch_seed_generator", _advance)


@contextmanager
def unfiltered_errors() -> Iterator[None]:
    """Keep errors as they were raised, which shows what can't be fused. By default Keras wraps them in its own."""
    filtering = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    try:
        yield
    finally:
        if filtering:
            keras.config.enable_traceback_filtering()


@contextmanager
def drawing(seed: int, step: int) -> Iterator[None]:
    """Have a model that steps alone draw the numbers that a lane would draw for that member."""
    device = get_device()
    streams = Streams(torch.tensor(seed, device=device), torch.tensor(step, device=device))
    with STREAM_DRAWS, DrawFromStreams(streams):
        yield
