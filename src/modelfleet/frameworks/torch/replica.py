"""A torch model to be asked only: no state is stacked, and on the CPU its weights may be another's memory."""

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.errors import InputError
from modelfleet.frameworks.outputs import Outputs
from modelfleet.frameworks.torch import arrays, malloc
from modelfleet.frameworks.torch.devices import out_of_memory
from modelfleet.frameworks.torch.modes import in_mode
from modelfleet.frameworks.torch.task import PRECISIONS, call
from modelfleet.trees import map_tree

_REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # nobody computes in the smaller ones
_COMPLEX = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
# What Hugging Face's models give for their own next step, and for a batch as a whole.
_NOT_OF_ROWS = ("loss", "past_key_values", "encoder_last_hidden_state")


class Replica:
    """Answers batches with a model, in evaluation mode until it is closed.

    Parameters that are on its device already are not copied. All else of the model is the replica's own: what a
    forward pass keeps in a buffer, say, is no other replica's. A model that can't be copied is taken as it is.
    """

    pads = False

    def __init__(self, model: nn.Module, device: torch.device, precision: str) -> None:
        self._model = _own(model, device)
        self._dtypes = _dtypes(model)
        self._device = device
        self._precision = PRECISIONS[precision]
        self._outputs = Outputs(_host, _opened)
        self._entered = ExitStack()
        self._entered.enter_context(malloc.keeping_pages())
        malloc.keep_pages_for(device)
        self._entered.enter_context(in_mode(self._model, train=False))
        if self._model is not model:  # functions that it holds may know the one that was copied
            self._entered.enter_context(in_mode(model, train=False))

    def __call__(self, rows: Any) -> Any:
        """The model's outputs on a tree of NumPy arrays `(row, …)`, as one."""
        return self._outputs.of(rows, self._ask)

    def _ask(self, rows: Any) -> Any:
        inputs = map_tree(self._placed, rows)
        low = self._precision
        with torch.inference_mode(), torch.autocast(self._device.type, dtype=low, enabled=low is not None):
            return call(self._model, inputs)

    def _placed(self, leaf: np.ndarray) -> Tensor:
        # Copied: a model may work in place, and the rows may be asked again, or be the caller's own.
        tensor = arrays.place(leaf, self._device, copy=True, exact=True)
        return tensor.to(_taken(tensor.dtype, self._dtypes))

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device is out of memory."""
        return out_of_memory(error)

    def broken(self, error: BaseException) -> bool:
        """Whether, after an error, nothing can be computed on the device any more: an accelerator's own, as of an
        index out of range, ends all that this process has there."""
        return isinstance(error, torch.AcceleratorError) and not out_of_memory(error)

    def close(self) -> None:
        """Leave the model as it was."""
        self._entered.close()


def _own(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy on the device; with the very same parameters, if they are there."""
    there = all(tensor.device == device for tensor in (*model.parameters(), *model.buffers()))
    memo = {id(parameter): parameter for parameter in model.parameters() if parameter.device == device}
    try:
        own = copy.deepcopy(model, memo)
        return own if there else own.to(device)
    except Exception:  # a model may hold anything, a lock or an open file too
        if not there:
            raise
        return model


def _dtypes(model: nn.Module) -> list[torch.dtype]:
    """The real dtypes that a model computes in, those of its first layers first; none if it has no numbers.

    Those of its parameters; or of its buffers; or of tensors that it keeps otherwise.
    """
    modules = list(model.modules())
    plain = [tensor for module in modules for tensor in vars(module).values() if isinstance(tensor, Tensor)]
    for tensors in (model.parameters(), model.buffers(), plain):
        found = dict.fromkeys(_COMPLEX.get(tensor.dtype, tensor.dtype) for tensor in tensors)
        if any(dtype in _REAL for dtype in found):
            return [dtype for dtype in found if dtype in _REAL]
    # Its weights may be hidden in a program, or packed.
    hidden = (isinstance(one, torch.jit.ScriptModule) or hasattr(one, "_packed_params") for one in modules)
    return [torch.float32] if any(hidden) else []


def _taken(dtype: torch.dtype, own: list[torch.dtype]) -> torch.dtype:
    """The dtype that rows of a dtype are given to a model in, which computes in `own` ones.

    Whole numbers stay. A model of one dtype has all others in that. To one of several, or of none, rows go as they
    came, as if it were called by hand; but float64, which NumPy makes unasked, only if the first layers have it.
    """
    if dtype in _COMPLEX:
        real = _taken(_COMPLEX[dtype], own)
        return next((pair for pair, part in _COMPLEX.items() if part == real), torch.complex64)
    if not dtype.is_floating_point or not own:
        return dtype
    if len(own) == 1:
        return own[0]
    return torch.get_default_dtype() if dtype == torch.float64 != own[0] else dtype


def weight_bytes(model: nn.Module) -> int:
    """What a model's weights take."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def _opened(value: Any) -> Any:
    """What an output of Hugging Face's holds for the rows: a dict of it, or the logits where these are all."""
    if not isinstance(value, Mapping) or not type(value).__module__.startswith("transformers."):
        return value
    held = {key: part for key, part in value.items() if key not in _NOT_OF_ROWS}
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
    # Copied: a model may give memory that it writes again for the next batch.
    return np.array(arrays.as_numpy(value))
