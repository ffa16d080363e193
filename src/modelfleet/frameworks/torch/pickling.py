"""Pickle modules that can't be pickled: scripted, quantized and parametrized ones.

torch can write all of these to files. Here its own writers write to memory.
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


def reduce(value: object) -> Any:  # a tuple as `object.__reduce__` returns it, or NotImplemented
    """Return how to pickle a module or an object of torch; NotImplemented if pickle needs no help."""
    if isinstance(value, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return _load_script, (_save_script(value),)
    if type(value) is torch.ScriptObject:
        return _load_script_object, (_save_script(_Holder(value)),)
    # `register_parametrization` has given the module a class of its own, which computes the weights when they are
    # read.
    if (
        isinstance(value, nn.Module)
        and type(value).__module__ == parametrize.__name__
        and parametrize.is_parametrized(value)
    ):
        own: Any = type(value).__bases__[0]
        parametrizations: Any = value.parametrizations
        names = tuple(parametrizations)
        return _new_parametrized, (own, names), own.__getstate__(value), None, None, own.__setstate__
    return NotImplemented


class _Holder(nn.Module):
    """Holds a C++ object, such as packed weights. torch writes such an object only as part of a module."""

    def __init__(self, held: torch.ScriptObject) -> None:
        super().__init__()
        self.held = held

    def forward(self) -> int:
        return 0


def _save_script(value: torch.jit.ScriptModule | torch.jit.ScriptFunction | _Holder) -> np.ndarray:
    stream = io.BytesIO()
    with _no_deprecation_warnings():
        torch.jit.save(torch.jit.script(value) if isinstance(value, _Holder) else value, stream)
    return np.frombuffer(stream.getvalue(), np.uint8)


def _load_script(written: np.ndarray) -> Any:
    with _no_deprecation_warnings():
        return torch.jit.load(io.BytesIO(written.tobytes()), map_location="cpu")


def _load_script_object(written: np.ndarray) -> torch.ScriptObject:
    return _load_script(written).held


@contextmanager
def _no_deprecation_warnings() -> Iterator[None]:
    # torch warns that scripting is deprecated. The user was warned when the model was scripted.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _new_parametrized(own: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """Return a module without its state, of a class as `register_parametrization` makes it."""
    module = own.__new__(own)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module
