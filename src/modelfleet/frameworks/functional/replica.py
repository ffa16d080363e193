"""One model as it is, to be asked only: its state is not stacked, and may be another's memory."""

from collections.abc import Callable
from typing import Any

import numpy as np

from modelfleet.trees import map_tree


class Replica:
    """Answers batches with a compiled program of one model (see `protocol.Replica`).

    predict: a pure function of the state and of a batch's inputs.
    state: a tree of tensors on the device. They are only read, never donated: others may read them, too.
    backend: of `functional.Backend`, its `device`, `compile`, `host` and `out_of_memory`.
    arrays: the adapter's.
    """

    pads = True

    def __init__(self, predict: Callable[[Any, Any], Any], state: Any, backend: Any, arrays: Any) -> None:
        self._program = backend.compile(predict)
        self._state = state
        self._backend = backend
        self._arrays = arrays

    def __call__(self, rows: Any) -> Any:
        """The model's outputs on a tree of NumPy arrays `(row, …)`, as one."""
        inputs = map_tree(lambda leaf: self._arrays.place(leaf, self._backend.device), rows)
        return map_tree(np.asarray, self._backend.host(self._program(self._state, inputs)))

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device is out of memory."""
        return self._backend.out_of_memory(error)

    def broken(self, error: BaseException) -> bool:
        """Never: no error is known after which nothing more could be computed."""
        return False

    def close(self) -> None:
        """Let go of the state."""
        self._state = None
