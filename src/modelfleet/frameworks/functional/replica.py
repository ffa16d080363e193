"""Predict with one model. Its state is not stacked, and may be memory that other processes read, too."""

from collections.abc import Callable
from typing import Any

import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.outputs import Outputs
from modelfleet.trees import map_tree
from modelfleet.types import Tensor, Tree


class Replica:
    """Answers batches with a compiled program of one model (see `adapter_protocol.Replica`).

    Args:
        predict: A pure function of the state and of a batch's inputs.
        state: A tree of tensors on the device. They are only read, never donated.
        backend: A `functional.Backend`, or an object with its `compile`, `host` and `out_of_memory`.
        place: A function that converts a NumPy array of rows to a tensor.
    """

    pads = True

    def __init__(
        self,
        predict: Callable[[Tree, Tree], Tree],
        state: Tree,
        backend: Any,
        place: Callable[[np.ndarray], Tensor],
    ) -> None:
        self._program = backend.compile(predict)
        self._state = state
        self._backend = backend
        self._place = place
        self._outputs = Outputs(self._host)

    def __call__(self, rows: Tree) -> Tree:
        """Return the model's outputs, a tree of NumPy arrays, for a tree of NumPy arrays `(row, …)`."""
        return self._outputs.of(rows, self._predict)

    def _predict(self, rows: Tree) -> Tree:
        return self.compute(self.place(rows))

    def place(self, rows: Tree) -> Tree:
        """Return arrays as tensors for `compute`."""
        return map_tree(self._place, rows)

    def compute(self, tensors: Tree) -> Tree:
        """Return the model's outputs as tensors, as the program returns them."""
        return self._program(self._state, tensors)

    def on_host(self, tensors: Tree) -> Tree:
        """Return tensors as NumPy arrays."""
        return map_tree(self._host, tensors)

    def _host(self, value: Any) -> np.ndarray | None:
        if hasattr(value, "todense"):
            raise InputError(f"a sparse {type(value).__name__}; expected a dense one, (row, …). Make it dense.")
        return np.asarray(self._backend.host(value)) if hasattr(value, "__array__") else None

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error means that the device is out of memory."""
        return self._backend.out_of_memory(error)

    def broken(self, error: BaseException) -> bool:
        """Return False: after every known error the process can still compute."""
        return False

    def close(self) -> None:
        """Release the state."""
        self._state = None
