"""A plain function of rows, or a model with a `predict`, to be asked."""

import inspect
from typing import Any

import numpy as np

from modelfleet import frameworks
from modelfleet.errors import InputError
from modelfleet.frameworks.outputs import Outputs
from modelfleet.trees import map_tree


def is_model(value: Any) -> bool:
    """Whether it can be asked for rows: it has a `predict`, or is a function that needs one argument."""
    return not isinstance(value, type) and (_predicts(value) or (callable(value) and needed(value) in (None, 1)))


def needed(function: Any) -> int | None:
    """How many arguments a function needs; None if it does not tell, as some that are written in C."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    spread = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [one for one in parameters if one.default is one.empty and one.kind not in spread]
    by_name = any(one.kind is one.KEYWORD_ONLY for one in required)
    return max(2, len(required)) if by_name else len(required)  # an array alone can't be given by name


class Replica:
    """Answers batches with a function of NumPy arrays (see `protocol.Replica`)."""

    pads = False

    def __init__(self, model: Any, device: Any, precision: str) -> None:
        self._call = model.predict if _predicts(model) else model
        self._outputs = Outputs(_host)

    def __call__(self, rows: Any) -> Any:
        """The outputs on a tree of NumPy arrays `(row, …)`, as one."""
        return self._outputs.of(rows, self._ask)

    def _ask(self, rows: Any) -> Any:
        # Copied: a function may work in place, and the rows may be asked again, or be the caller's own.
        return self._call(map_tree(np.array, rows))

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that there is no more memory."""
        return isinstance(error, MemoryError)

    def broken(self, error: BaseException) -> bool:
        """Never: no error is known after which nothing more could be computed."""
        return False

    def close(self) -> None:
        """Nothing is to be undone."""


def weight_bytes(model: Any) -> int:
    """What a model's weights take: nobody knows."""
    return 0


def _predicts(model: Any) -> bool:
    return callable(getattr(model, "predict", None))


def _host(value: Any) -> np.ndarray | None:
    if hasattr(value, "todense"):
        raise InputError(
            f"a sparse {type(value).__name__}; expected an array (row, …). Give a function that makes it dense, "
            f"as in lambda rows: model.predict(rows).toarray()."
        )
    if not hasattr(value, "__array__"):
        return None
    return np.array(frameworks.as_numpy(value))  # copied: the memory may be written again for the next batch
