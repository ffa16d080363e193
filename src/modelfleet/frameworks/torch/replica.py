"""A torch model as it is, to be asked only: no state is stacked, and its weights may be another's memory."""

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
    """Answers batches with a model, in evaluation mode until it is closed. On the CPU the model is not copied."""

    pads = False

    def __init__(self, model: nn.Module, device: torch.device, precision: str) -> None:
        if device.type != "cpu":
            model = copy.deepcopy(model).to(device)
        pages.keep_freed_pages(device)
        self._model = model
        self._device = device
        self._precision = PRECISIONS[precision]
        self._modes = ExitStack()
        self._modes.enter_context(mode(model, train=False))

    def __call__(self, rows: Any) -> Any:
        """The model's outputs on a tree of NumPy arrays `(row, …)`, as one."""
        inputs = map_tree(lambda leaf: arrays.place(leaf, self._device), rows)
        low = self._precision
        with torch.inference_mode(), torch.autocast(self._device.type, dtype=low, enabled=low is not None):
            outputs = logits(call(self._model, inputs))
        return map_tree(_host, outputs)

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device is out of memory."""
        return out_of_memory(error)

    def close(self) -> None:
        """Leave the model as it was."""
        self._modes.close()


def weight_bytes(model: nn.Module) -> int:
    """What a model's weights take."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def _host(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return np.asarray(leaf)
    return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).cpu().numpy()
