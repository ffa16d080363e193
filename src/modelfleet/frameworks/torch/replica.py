"""A torch model to be asked only: no state is stacked, and on the CPU its weights may be another's memory."""

import copy
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.frameworks.torch import arrays, pages
from modelfleet.frameworks.torch.devices import out_of_memory
from modelfleet.frameworks.torch.programs import mode
from modelfleet.frameworks.torch.task import PRECISIONS, call, logits
from modelfleet.trees import map_tree


class Replica:
    """Answers batches with a model, in evaluation mode until it is closed.

    Parameters that are on its device already are not copied. All else of the model is the replica's own: what a
    forward pass keeps in a buffer, say, is no other replica's. A model that can't be copied is taken as it is.
    """

    pads = False

    def __init__(self, model: nn.Module, device: torch.device, precision: str) -> None:
        pages.keep_freed_pages(device)
        self._model = _own(model, device)
        self._dtype = _low(model)
        self._device = device
        self._precision = PRECISIONS[precision]
        self._modes = ExitStack()
        self._modes.enter_context(mode(self._model, train=False))
        if self._model is not model:  # functions that it holds may know the one that was copied
            self._modes.enter_context(mode(model, train=False))

    def __call__(self, rows: Any) -> Any:
        """The model's outputs on a tree of NumPy arrays `(row, …)`, as one."""
        inputs = map_tree(self._placed, rows)
        low = self._precision
        with torch.inference_mode(), torch.autocast(self._device.type, dtype=low, enabled=low is not None):
            outputs = logits(call(self._model, inputs))
        return map_tree(_host, outputs)

    def _placed(self, leaf: np.ndarray) -> Tensor:
        # Copied: a model may work in place, and the rows may be asked again, or be the caller's own.
        tensor = arrays.place(leaf, self._device, copy=True)
        return tensor if self._dtype is None or not tensor.is_floating_point() else tensor.to(self._dtype)

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device is out of memory."""
        return out_of_memory(error)

    def broken(self, error: BaseException) -> bool:
        """Whether, after an error, nothing can be computed on the device any more: an accelerator's own, as of an
        index out of range, ends all that this process has there."""
        return isinstance(error, torch.AcceleratorError) and not out_of_memory(error)

    def close(self) -> None:
        """Leave the model as it was."""
        self._modes.close()


def _own(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy on the device; with the very same parameters, if they are there."""
    there = all(parameter.device == device for parameter in model.parameters())
    memo = {id(parameter): parameter for parameter in model.parameters()} if there else {}
    try:
        return copy.deepcopy(model, memo).to(device)
    except Exception:  # a model may hold anything, a lock or an open file too
        if not there:
            raise
        return model


def _low(model: nn.Module) -> torch.dtype | None:
    """The dtype that rows are to have, where all of a model is in one that NumPy does not have or models rarely
    convert to by themselves."""
    found = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return found.pop() if len(found) == 1 and found <= {torch.bfloat16, torch.float16} else None


def weight_bytes(model: nn.Module) -> int:
    """What a model's weights take."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def _host(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return np.asarray(leaf)
    # Copied: a model may give memory that it writes again for the next batch.
    return np.array(arrays.as_numpy(leaf))
