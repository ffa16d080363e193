"""Modules that can't be pickled, on their way to another process: scripted, quantized and parametrized ones.

Torch itself writes all of these to files. Here its own writers write to memory.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize


def reduce(value: Any) -> Any:
    """How to pickle a module or an object of torch's; NotImplemented for what can be pickled anyway."""
    if isinstance(value, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return _scripted, (_written(value),)
    if type(value) is torch.ScriptObject:
        return _held, (_written(_Holder(value)),)
    # A class that torch has made, whose only purpose is to have the weights computed when they are read.
    if type(value).__module__ == parametrize.__name__ and parametrize.is_parametrized(value):
        own: Any = type(value).__bases__[0]
        names = tuple(value.parametrizations)
        return _parametrized, (own, names), own.__getstate__(value), None, None, own.__setstate__
    return NotImplemented


class _Holder(nn.Module):
    """Holds an object of C++, such as packed weights, which torch writes as part of a module only."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self) -> int:
        return 0


def _written(value: Any) -> np.ndarray:
    stream = io.BytesIO()
    with _no_warnings():
        torch.jit.save(torch.jit.script(value) if isinstance(value, _Holder) else value, stream)
    return np.frombuffer(stream.getvalue(), np.uint8)


def _scripted(written: np.ndarray) -> Any:
    with _no_warnings():
        return torch.jit.load(io.BytesIO(written.tobytes()), map_location="cpu")


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Torch says that scripting is deprecated; whoever has scripted a model has been told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _held(written: np.ndarray) -> Any:
    return _scripted(written).held


def _parametrized(own: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """A module without its state, of the class that `register_parametrization` had made for it."""
    module = own.__new__(own)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module
