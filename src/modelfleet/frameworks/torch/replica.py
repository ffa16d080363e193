"""Torch models that only predict. No state is stacked, and on the CPU weights may be shared memory."""

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.errors import InputError
from modelfleet.frameworks.outputs import Outputs
from modelfleet.frameworks.torch import arrays
from modelfleet.frameworks.torch.cpu import malloc, openmp
from modelfleet.frameworks.torch.devices import out_of_memory
from modelfleet.frameworks.torch.modes import in_mode
from modelfleet.frameworks.torch.task import PRECISIONS, call
from modelfleet.trees import map_tree
from modelfleet.types import Tree

_REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # models do not compute in smaller ones
_COMPLEX = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
# Outputs of Hugging Face's models without rows: for their own next step, or for the whole batch.
_WITHOUT_ROWS = ("loss", "past_key_values", "encoder_last_hidden_state")


class Replica:
    """Replica of a torch model, in evaluation mode until it is closed (see `adapter_protocol.Replica`).

    Parameters that are already on the device are not copied. Everything else is, so that replicas do not share the
    buffers that a forward pass writes. A model that can't be copied is used itself.

    On an accelerator batches have few sizes: torch keeps memory and chooses kernels for each.
    """

    def __init__(self, model: nn.Module, device: torch.device, precision: str) -> None:
        self._model = _copy(model, device)
        self._dtypes = _dtypes(model)
        self._device = device
        self.pads = device.type != "cpu"
        self._precision = PRECISIONS[precision]
        self._outputs = Outputs(_host, _opened)
        self._entered = ExitStack()
        self._entered.enter_context(malloc.keeping_pages())
        malloc.keep_pages_for(device)
        self._entered.enter_context(openmp.sharing_cores())
        self._entered.enter_context(in_mode(self._model, train=False))
        if self._model is not model:  # functions in the copy may refer to the original
            self._entered.enter_context(in_mode(model, train=False))

    def __call__(self, rows: Tree) -> Tree:
        """Return the model's outputs for a tree of NumPy arrays `(row, …)`, as such a tree."""
        return self._outputs.of(rows, self._ask)

    def _ask(self, rows: Tree) -> Any:
        inputs = map_tree(self._placed, rows)
        low = self._precision
        with torch.inference_mode(), torch.autocast(self._device.type, dtype=low, enabled=low is not None):
            return call(self._model, inputs)

    def _placed(self, leaf: np.ndarray) -> Tensor:
        # Copied: a model may write to its input, and the rows may be the caller's own, or be tried again.
        tensor = arrays.place(leaf, self._device, copy=True, exact=True)
        return tensor.to(_input_dtype(tensor.dtype, self._dtypes))

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error means that the device is out of memory."""
        return out_of_memory(error)

    def broken(self, error: BaseException) -> bool:
        """Return True if the device is unusable for this process after an error.

        An accelerator's own error, such as an index out of range in a kernel, ends everything on that device.
        """
        return isinstance(error, torch.AcceleratorError) and not out_of_memory(error)

    def close(self) -> None:
        """Restore the model's training mode."""
        self._entered.close()


def _copy(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy on the device that shares the parameters which are already there."""
    there = all(tensor.device == device for tensor in (*model.parameters(), *model.buffers()))
    memo = {id(parameter): parameter for parameter in model.parameters() if parameter.device == device}
    try:
        own = copy.deepcopy(model, memo)
        return own if there else own.to(device)
    except Exception:  # a model may hold anything, such as a lock or an open file
        if not there:
            raise
        return model


def _dtypes(model: nn.Module) -> list[torch.dtype]:
    """Return the real dtypes in which a model computes, in the order of its layers; none if it has no tensors.

    These are the dtypes of its parameters; without parameters, of its buffers; without buffers, of other tensors.
    """
    modules = list(model.modules())
    plain = [tensor for module in modules for tensor in vars(module).values() if isinstance(tensor, Tensor)]
    for tensors in (model.parameters(), model.buffers(), plain):
        found = dict.fromkeys(_COMPLEX.get(tensor.dtype, tensor.dtype) for tensor in tensors)
        if any(dtype in _REAL for dtype in found):
            return [dtype for dtype in found if dtype in _REAL]
    # Weights may be inside a compiled program, or packed.
    hidden = (isinstance(one, torch.jit.ScriptModule) or hasattr(one, "_packed_params") for one in modules)
    return [torch.float32] if any(hidden) else []


def _input_dtype(dtype: torch.dtype, own: list[torch.dtype]) -> torch.dtype:
    """Return the dtype to which rows are cast for a model that computes in the dtypes `own`.

    Integers stay as they are. A model of one dtype gets all rows in it. A model of several dtypes, or of none,
    gets rows as they are; but float64, NumPy's default, only if its first layers have that dtype.
    """
    if dtype in _COMPLEX:
        real = _input_dtype(_COMPLEX[dtype], own)
        return next((pair for pair, part in _COMPLEX.items() if part == real), torch.complex64)
    if not dtype.is_floating_point or not own:
        return dtype
    if len(own) == 1:
        return own[0]
    return torch.get_default_dtype() if dtype == torch.float64 != own[0] else dtype


def weight_bytes(model: nn.Module) -> int:
    """Return the size of a model's weights in bytes."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def _opened(value: Any) -> Any:
    """Return the outputs with rows of a Hugging Face output: a dict, or the logits if there is nothing else."""
    if not isinstance(value, Mapping) or not type(value).__module__.startswith("transformers."):
        return value
    held = {key: part for key, part in value.items() if key not in _WITHOUT_ROWS}
    return held["logits"] if set(held) == {"logits"} else held


def _host(value: Any) -> np.ndarray | list[np.ndarray] | None:
    if not isinstance(value, Tensor):
        return np.array(value) if isinstance(value, np.ndarray | np.generic) else None
    if value.is_nested:
        return [np.array(arrays.as_numpy(row)) for row in value.unbind()]
    if value.layout != torch.strided:
        raise InputError(
            f"a sparse tensor ({value.layout}); expected a dense one, (row, …). Have the model return "
            f"its .to_dense()."
        )
    value = value.dequantize() if value.is_quantized else value.resolve_conj().resolve_neg()
    # Copied: the model may write to this memory again for the next batch.
    return np.array(arrays.as_numpy(value))
