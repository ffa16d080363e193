"""Stamps of models: has a model that a user holds really changed since it was read last?

To find a model's signature and to copy its weights takes as long as many forward passes of a small model. A stamp
compares identities and bytes instead. It never misses a change: what can't be compared quickly counts as changed.
"""

import ctypes
import types
from collections.abc import Sequence
from itertools import chain
from operator import eq, is_
from typing import Any

import torch
from torch import Tensor, nn

from modelfleet.frameworks.structure import is_importable
from modelfleet.frameworks.torch.structure import BOOKKEEPING, HOOKS

MAX_BYTES = 1 << 20  # of a model's tensors: beyond that, comparing them costs more than it saves

_FIXED = (int, float, complex, str, bytes, range, type(None), torch.dtype, torch.device, torch.layout)
_TABLES = ("_parameters", "_buffers", "_modules")


class ModelStamp:
    """Everything that a model's structure and weights consist of, as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = list(model.modules())
        self._kinds = [type(module) for module in self._modules]
        self._classes = list(dict.fromkeys(self._kinds))
        self._forwards = _forwards(self._classes)
        self._tables: list[dict[str, Any]] = []
        self._hooks: list[Any] = []
        self._temporary: list[set[str]] = []
        self._lists: list[list[Any]] = []
        self._complete = all(map(is_importable, self._classes)) and all(map(self._watch, self._modules))
        self._keys = list(chain.from_iterable(self._tables))
        self._values = list(chain.from_iterable(map(dict.values, self._tables)))
        self._sizes = list(map(len, self._tables))
        self._names = [frozenset(names) for names in self._temporary]
        self._items = [tuple(items) for items in self._lists]
        self._tensors = list({id(t): t for t in (*model.parameters(), *model.buffers())}.values())
        self._complete = self._complete and all(map(_plain, self._tensors))
        self._forms = list(map(_form, self._tensors)) if self._complete else []
        small = self._complete and sum(tensor.nbytes for tensor in self._tensors) <= MAX_BYTES
        self._bytes = list(map(_bytes, self._tensors)) if small else None

    def same(self, model: nn.Module) -> bool:
        """Return True if it is the same model, with the same structure and the same weights to the bit."""
        return (
            self._bytes is not None
            and model is self._model
            and self._same_structure()
            and all(map(_same_bytes, self._tensors, self._bytes))
        )

    def _same_structure(self) -> bool:
        return (
            not any(self._hooks)
            and all(map(is_, map(type, self._modules), self._kinds))
            and all(
                getattr(kind, "forward", None) is f for kind, f in zip(self._classes, self._forwards, strict=True)
            )
            and self._sizes == list(map(len, self._tables))
            and all(map(is_, chain.from_iterable(map(dict.values, self._tables)), self._values))
            and all(map(is_, chain.from_iterable(self._tables), self._keys))
            and all(map(eq, self._temporary, self._names))
            and all(
                len(a) == len(b) and all(map(is_, a, b)) for a, b in zip(self._lists, self._items, strict=True)
            )
            and self._forms == list(map(_form, self._tensors))
        )

    def _watch(self, module: nn.Module) -> bool:
        """Watch the attributes of a module. Return False if some can change without being noticed here."""
        attributes = vars(module)
        self._tables += (attributes, *(attributes[name] for name in _TABLES))
        self._hooks += (attributes[name] for name in HOOKS)
        self._temporary.append(module._non_persistent_buffers_set)
        if module._buffers and not type(module).__module__.startswith("torch."):
            return False  # its forward may count calls in a buffer, in a lane and not in the model
        return not any(attributes[name] for name in HOOKS) and all(
            self._is_fixed(value) for name, value in attributes.items() if name not in BOOKKEEPING
        )

    def _is_fixed(self, value: object) -> bool:
        """Return True if a value can't change as long as it is the same object, or is watched on its own."""
        if isinstance(value, list) and type(value) is list:
            self._lists.append(value)
            return all(map(self._is_fixed, value))
        if isinstance(value, tuple) and type(value) is tuple:
            return all(map(self._is_fixed, value))
        if isinstance(value, types.FunctionType | type):
            return is_importable(value)
        return type(value) in (bool, *_FIXED) or isinstance(value, types.BuiltinFunctionType)


def _forwards(classes: Sequence[type]) -> list[object]:
    return [getattr(kind, "forward", None) for kind in classes]


def _plain(tensor: Tensor) -> bool:
    """Return True if a tensor's numbers are bytes in a row in the host's memory."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        and not (tensor._backward_hooks or tensor._post_accumulate_grad_hooks)
    )


def _form(tensor: Tensor) -> tuple[object, ...]:
    # `tensor.data = other` replaces all of these in the same object.
    return (
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.requires_grad,
        tensor._backward_hooks,
        tensor._post_accumulate_grad_hooks,
    )


def _bytes(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def _same_bytes(tensor: Tensor, before: bytes) -> bool:
    # Versions do not count what is written through `tensor.data` or a NumPy array, so bytes are compared.
    return _bytes(tensor) == before
