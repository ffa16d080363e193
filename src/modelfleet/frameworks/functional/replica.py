"""One model as it is, to be asked only: its state is not stacked, and may be another's memory."""

from collections.abc import Callable
from typing import Any

import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.outputs import Outputs
from modelfleet.trees import map_tree


class Replica:
    """Answers batches with a compiled program of one model (see `adapter_protocol.Replica`).

    predict: a pure function of the state and of a batch's inputs.
    state: a tree of tensors on the device. They are only read, never donated: others may read them, too.
    backend: of `functional.Backend`, its `device`, `compile`, `host` and `out_of_memory`.
    place: gives a NumPy array of rows as the program takes it.
    """

    pads = True

    def __init__(
        self, predict: Callable[[Any, Any], Any], state: Any, backend: Any, place: Callable[[np.ndarray], Any]
    ) -> None:
        self._program = backend.compile(predict)
        self._state = state
        self._backend = backend
        self._place = place
        self._outputs = Outputs(self._host)

    def __call__(self, rows: Any) -> Any:
        """The model's outputs on a tree of NumPy arrays `(row, …)`, as one."""
        return self._outputs.of(rows, self._ask)

    def _ask(self, rows: Any) -> Any:
        return self._program(self._state, map_tree(self._place, rows))

    def _host(self, value: Any) -> np.ndarray | None:
        if hasattr(value, "todense"):
            raise InputError(f"a sparse {type(value).__name__}; expected a dense one, (row, …). Make it dense.")
        return np.asarray(self._backend.host(value)) if hasattr(value, "__array__") else None

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device is out of memory."""
        return self._backend.out_of_memory(error)

    def broken(self, error: BaseException) -> bool:
        """Never: no error is known after which nothing more could be computed."""
        return False

    def close(self) -> None:
        """Let go of the state."""
        self._state = None
