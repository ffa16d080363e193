"""Common base of the torch engines: rows, outputs, targets, and errors in a user's terms."""

from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.frameworks import batches
from modelfleet.frameworks.batch_errors import batch_error
from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.torch.devices import out_of_memory
from modelfleet.frameworks.torch.losses import check_range, check_targets
from modelfleet.joining import joined
from modelfleet.trees import leaves, map_tree
from modelfleet.types import State, Tree


class Batch(Protocol):
    """A batch as feeds make it (see `feeds.Batch`)."""

    @property
    def data(self) -> Tree:
        """Return a tree of tensors `(slot, row, …)`, or `(row, …)` if shared."""
        ...

    @property
    def shared(self) -> bool:
        """Return True if all members see the same rows."""
        ...

    @property
    def counts(self) -> np.ndarray:
        """Return `(slot,)`: the number of real rows."""
        ...

    @property
    def size(self) -> int:
        """Return the number of rows, with padding."""
        ...


class TorchEngine(Engine, ABC):
    """Torch engine, as far as it does not depend on how its steps are run."""

    @property
    def checks_targets(self) -> bool:  # pyrefly: ignore
        """Return False for an objective, because it may call the model on something else than x."""
        return getattr(self.task, "objective", None) is None

    @staticmethod
    def inputs(data: Tree) -> Tree:
        """Return the inputs of a batch: the x of (x, y), or the batch itself."""
        return batches.inputs(data)

    def rows(self, outputs: Tree, slot: int, count: int) -> Tree:
        """Return one member's real rows of a batch of outputs, on the host."""
        return map_tree(lambda t: on_host(t[slot, :count]), outputs)

    def concatenate(self, parts: Sequence[Tree]) -> Tree:
        """Return batches of rows as one array."""
        return joined(parts)

    def row_weights(self, counts: np.ndarray, size: int) -> Tensor:
        """Return `(slot, row)`: 1 for a real row, 0 for padding."""
        return self.tensor((np.arange(size) < counts[:, None]).astype(np.float32))

    def cut(self, data: Tree, slots: np.ndarray, count: int, *, shared: bool) -> Tree:
        """Return the first `count` rows of the members in some slots."""
        if shared:
            return map_tree(lambda leaf: leaf[:count], data)
        rows = self.tensor(slots)
        return map_tree(lambda leaf: leaf.index_select(0, rows)[:, :count].contiguous(), data)

    def tensor(self, array: np.ndarray) -> Tensor:
        """Return a host array on the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

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
            if batches.has_target(batch) and isinstance(batch[1], Tensor):
                check_range(loss, output_shape, batch[1])
            if batches.has_target(batch) and len(batch) == 3:
                weights = batch[2]
                batches.check_weights(on_host(weights) if isinstance(weights, Tensor) else np.asarray(weights))

        return check

    def stream(self) -> AbstractContextManager[object]:
        """Return the context in which the lane's own thread steps it: a stream on an accelerator."""
        return nullcontext() if self.device.type == "cpu" else torch.Stream(self.device)

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error says that the device is out of memory."""
        return out_of_memory(error)

    def carried(self, position: int) -> State:
        """Return a member's optimizer state and step count for another engine to adopt."""
        raise NotImplementedError

    def _to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Return device tensors as host arrays, in one transfer."""
        if not tensors:
            return {}
        table = torch.stack([tensor.double() for tensor in tensors.values()]).cpu().numpy()
        return dict(zip(tensors, table, strict=True))


def on_host(tensor: Tensor) -> np.ndarray:
    """Return a tensor as a NumPy array. NumPy has no bfloat16, so that becomes float32."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


@contextmanager
def explained(name: str, model: nn.Module, data: Tree) -> Iterator[None]:
    """Add the batch's shapes to whatever a forward, a loss or a metric raises."""
    try:
        yield
    except Exception as error:
        memory = out_of_memory(error)
        raise batch_error(name, type(model).__name__, _shapes(data), error, memory=memory) from error


def _shapes(data: Tree) -> str:
    return ", ".join(f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}" for leaf in leaves(data))
