"""Replicas of a plain function of rows, or of an object with a `predict`."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from modelfleet.devices import Device
from modelfleet.errors import InputError
from modelfleet.frameworks.conversions import as_numpy
from modelfleet.frameworks.outputs import Outputs
from modelfleet.trees import map_tree
from modelfleet.types import Model, Tree


def is_model(value: Any) -> bool:
    """Return True for an object with a `predict`, or a function that can be called with one argument."""
    return not isinstance(value, type) and (_predicts(value) or (callable(value) and needed(value) in (None, 1)))


def needed(function: Callable[..., Any]) -> int | None:
    """Return how many arguments a function needs; None if unknown, as for some functions written in C."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [one for one in parameters if one.default is one.empty and one.kind not in variadic]
    by_name = any(one.kind is one.KEYWORD_ONLY for one in required)
    return max(2, len(required)) if by_name else len(required)  # a single array is not passed by name


class Replica:
    """Answers batches with a function of NumPy arrays (see `adapter_protocol.Replica`)."""

    pads = False

    def __init__(self, model: Model, device: Device, precision: str) -> None:
        self._call = model.predict if _predicts(model) else model
        self._outputs = Outputs(_host)

    def __call__(self, rows: Tree) -> Tree:
        """Return the outputs for a tree of NumPy arrays `(row, …)`, as such a tree."""
        return self._outputs.of(rows, self._ask)

    def _ask(self, rows: Tree) -> Tree:
        # Copied: a function may write to its input, and the rows may be the caller's own, or be tried again.
        return self._call(map_tree(np.array, rows))

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error means that memory ran out."""
        return isinstance(error, MemoryError)

    def broken(self, error: BaseException) -> bool:
        """Return False: no error is known that would leave the process unusable."""
        return False

    def close(self) -> None:
        """Do nothing."""


def weight_bytes(model: Model) -> int:
    """Return 0: the size of the weights is unknown."""
    return 0


def _predicts(model: Model) -> bool:
    return callable(getattr(model, "predict", None))


def _host(value: Any) -> np.ndarray | None:
    if hasattr(value, "todense"):
        raise InputError(
            f"a sparse {type(value).__name__}; expected an array (row, …). Give a function that makes it dense, "
            f"as in lambda rows: model.predict(rows).toarray()."
        )
    if not hasattr(value, "__array__"):
        return None
    return np.array(as_numpy(value))  # copied: the next batch may overwrite this memory
