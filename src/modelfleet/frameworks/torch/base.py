"""Common base of the torch engines: rows, outputs, targets, and errors in a user's terms."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.frameworks import batch_parts
from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.batch_errors import batch_error
from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.stacked import Positions
from modelfleet.frameworks.torch.devices import in_order, new_stream, out_of_memory
from modelfleet.frameworks.torch.target_checks import check_range, check_targets
from modelfleet.frameworks.torch.task import Task
from modelfleet.trees import leaves, map_tree
from modelfleet.types import State, Tree

MAX_CONSTANTS = 4096  # small arrays that an engine keeps on its device


class TorchEngine(Engine, ABC):
    """Torch engine, as far as it does not depend on how its steps are run."""

    _stream: torch.Stream | None = None  # made when the first thread steps the lane

    @cached_property
    def _constants(self) -> dict[tuple[str, bytes], Tensor]:
        return {}

    def row_weights(self, counts: np.ndarray, size: int) -> Tensor:
        """Return `(slot, row)`: 1 for a real row, 0 for padding."""
        if self.device.type == "cpu":
            return self.tensor((np.arange(size) < counts[:, None]).astype(np.float32))
        rows = torch.arange(size, device=self.device)
        return (rows < self.constant(counts).unsqueeze(1)).float()

    def first_rows(self, batch: Batch, slots: np.ndarray, count: int) -> Batch:
        """Return a batch of the first `count` rows of the members in some slots."""
        counts = np.full(len(slots), count)
        if batch.shared:
            return Batch(map_tree(lambda leaf: leaf[:count], batch.data), True, counts, slots=slots)
        rows = self.constant(slots).to(self.device)
        own = map_tree(lambda leaf: leaf.index_select(0, rows)[:, :count].contiguous(), batch.data)
        return Batch(own, False, counts, slots=slots)

    def tensor(self, array: np.ndarray) -> Tensor:
        """Return a host array on the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def constant(self, array: np.ndarray) -> Tensor:
        """Return a small host array on the device, where it is kept: most come again, in every epoch at least."""
        if self.device.type == "cpu":
            return self.tensor(array)
        key = array.dtype.str, array.tobytes()
        if key not in self._constants:
            if len(self._constants) >= MAX_CONSTANTS:
                self._constants.clear()
            self._constants[key] = self.tensor(array)
        return self._constants[key]

    def stream(self) -> AbstractContextManager[object]:
        """Return the context in which the lane's own thread steps it: the engine's stream on an accelerator."""
        if self.device.type == "cpu":
            return nullcontext()
        self._stream = self._stream or new_stream(self.device)
        return nullcontext() if self._stream is None else in_order(self._stream)

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error says that the device is out of memory."""
        return out_of_memory(error)

    def carried(self, positions: Positions) -> list[tuple[list[int], State]]:
        """Return the optimizer state and step counts of some members for another engine to adopt.

        Returns:
            States `(member, …)`, each with the rows of `positions` that it is for.
        """
        raise NotImplementedError

    def _to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Return device tensors as host arrays, in one transfer."""
        if not tensors:
            return {}
        table = torch.stack([tensor.double() for tensor in tensors.values()]).cpu().numpy()
        return dict(zip(tensors, table, strict=True))


class ModuleEngine(TorchEngine, ABC):
    """Torch engine of members whose models are plain modules, with a torch `Task`."""

    @property
    @abstractmethod
    def task(self) -> Task:
        """Return the members' task."""

    @property
    def checks_targets(self) -> bool:  # pyrefly: ignore
        """Return False for an objective, because it may call the model on something else than x."""
        return self.task.objective is None

    def inputs(self, data: Tree) -> Tree:
        """Return the inputs of a batch's data: the x of (x, y), or the data themselves."""
        return batch_parts.inputs(data)

    def check_targets(self, output_shape: tuple[int, ...] | None, target: Tree, name: str | None) -> None:
        """Check all targets of a data set against the model's output, if the loss is one that defines them."""
        if self.task.loss is not None and output_shape is not None and isinstance(target, Tensor | np.ndarray):
            check_targets(self.task.loss, output_shape, target, name)

    def label_check(self, output_shape: tuple[int, ...] | None) -> Callable[[Tree], None] | None:
        """Return a function that raises for bad targets or weights in a batch; None if nothing can be checked."""
        loss = self.task.loss
        if loss is None or output_shape is None:
            return None

        def check(batch: Tree) -> None:
            if batch_parts.has_target(batch) and isinstance(batch[1], Tensor):
                check_range(loss, output_shape, batch[1])
            if batch_parts.has_target(batch) and len(batch) == 3:
                weights = batch[2]
                batch_parts.check_weights(on_host(weights) if isinstance(weights, Tensor) else np.asarray(weights))

        return check


def on_host(tensor: Tensor) -> np.ndarray:
    """Return a tensor as a NumPy array. NumPy has no bfloat16, so that becomes float32."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


@contextmanager
def explained(name: str, model: nn.Module, data: Tree, part: str = "") -> Iterator[None]:
    """Add the batch's shapes to whatever a forward, a loss, a metric, or another part of a step raises."""
    try:
        yield
    except Exception as error:
        memory = out_of_memory(error)
        raise batch_error(name, f"{part}{type(model).__name__}", _shapes(data), error, memory=memory) from error


def _shapes(data: Tree) -> str:
    return ", ".join(f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}" for leaf in leaves(data))
