"""Stamps of models: has a model that a user holds really changed since it was read last?

To find a model's signature and to copy its weights takes as long as many forward passes of a small model. A stamp
compares identities and bytes instead. It never misses a change: what can't be compared quickly counts as changed.
The stamps of many models are compared together, in a few passes over long lists.
"""

import ctypes
import types
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from modelfleet.frameworks.structure import is_importable
from modelfleet.frameworks.torch.structure import BOOKKEEPING, HOOKS

MAX_BYTES = 1 << 20  # of a model's tensors: beyond that, comparing them costs more than it saves

_TEXTS = (str, bytes, range, type(None), torch.dtype, torch.device, torch.layout)
_NUMBERS = (
    bool,
    int,
    float,
    complex,
)  # equal numbers may be of different types, so these are compared by identity
_TABLES = ("_parameters", "_buffers")
_dtype = attrgetter("dtype")
_training_form = attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class _Watched:
    """What the structure of some models consists of, as it is now, in lists to compare."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.kinds: list[type] = []
        self.classes: dict[type, object] = {}  # with their forward
        self.tables: list[dict[str, Any]] = []  # the modules' attributes, parameters, buffers and submodules
        self.copies: list[dict[str, Any]] = []
        self.owners: list[dict[str, Any]] = []  # the tables of tensors and submodules that are not empty
        self.owned: list[Any] = []
        self.numbered: list[dict[str, Any]] = []  # for every number, the table and the name of it
        self.names: list[str] = []
        self.numbers: list[Any] = []
        self.hooks: list[Any] = []
        self.sets: list[set[str]] = []
        self.frozen_sets: list[frozenset[str]] = []
        self.lists: list[list[Any]] = []
        self.items: list[list[Any]] = []

    def add(self, others: "Iterable[_Watched]") -> "_Watched":
        """Watch what others watch, too."""
        for other in others:
            for name, value in vars(other).items():
                getattr(self, name).update(value) if isinstance(value, dict) else getattr(self, name).extend(value)
        return self

    def same(self) -> bool:
        """Return True if nothing has been replaced, added or removed."""
        try:
            return (
                not any(self.hooks)
                # Attributes that are the same objects are equal for a dict, and need no comparison of their own.
                and self.tables == self.copies
                and all(map(is_, chain.from_iterable(map(dict.values, self.owners)), self.owned))
                and all(map(is_, map(dict.__getitem__, self.numbered, self.names), self.numbers))
                and self.sets == self.frozen_sets
                and list(map(type, self.modules)) == self.kinds
                and all(getattr(kind, "forward", None) is forward for kind, forward in self.classes.items())
                and all(
                    len(a) == len(b) and all(map(is_, a, b)) for a, b in zip(self.lists, self.items, strict=True)
                )
            )
        except Exception:  # values that can't be compared, such as two tensors, are not the same object
            return False

    def watch(self, module: nn.Module) -> bool:
        """Watch a module. Return False if some of its attributes can change without being noticed here."""
        attributes, kind = vars(module), type(module)
        self.modules.append(module)
        self.kinds.append(kind)
        self.classes[kind] = getattr(kind, "forward", None)
        own = [attributes[name] for name in (*_TABLES, "_modules")]
        self.tables += (attributes, *own)
        self.copies += map(dict, (attributes, *own))
        self.owners += filter(None, own)
        self.owned += chain.from_iterable(map(dict.values, own))
        self.hooks += (attributes[name] for name in HOOKS)
        self.sets.append(module._non_persistent_buffers_set)
        self.frozen_sets.append(frozenset(module._non_persistent_buffers_set))
        if module._buffers and not kind.__module__.startswith("torch."):
            return False  # its forward may count calls in a buffer, in a lane and not in the model
        if kind.__eq__ is not object.__eq__ or not is_importable(kind):
            return False
        for name, value in attributes.items():
            if name in BOOKKEEPING:
                continue
            if isinstance(value, (*_NUMBERS, tuple)):
                self.numbered.append(attributes)
                self.names.append(name)
                self.numbers.append(value)
            if not self._is_fixed(value):
                return False
        return not any(attributes[name] for name in HOOKS)

    def _is_fixed(self, value: object) -> bool:
        """Return True if a value can't change as long as it is the same object, or is watched on its own."""
        if isinstance(value, list) and type(value) is list:
            self.lists.append(value)
            self.items.append(list(value))
            return all(map(self._is_fixed, value))
        if isinstance(value, tuple) and type(value) is tuple:
            return all(map(self._is_fixed, value))
        if isinstance(value, types.FunctionType | type):
            return is_importable(value)
        return type(value) in (*_NUMBERS, *_TEXTS) or isinstance(value, types.BuiltinFunctionType)


class ModelStamp:
    """Everything that a model's structure and weights consist of, as it is now.

    Attributes:
        complete: True if every change of the structure will be seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.watched = _Watched()
        self.tensors = list({id(t): t for t in (*model.parameters(), *model.buffers())}.values())
        seen = [self.watched.watch(module) for module in model.modules()]
        self.complete = all(seen) and all(map(_plain, self.tensors))
        self.small = self.complete and sum(tensor.nbytes for tensor in self.tensors) <= MAX_BYTES
        self._weights = _Weights([self])

    def same(self, model: nn.Module) -> bool:
        """Return True if it is the same model, with the same structure and the same weights to the bit."""
        return self.small and model is self.model and self.watched.same() and self._weights.same()

    def bytes_of(self) -> list[bytes]:
        """Return the bytes of the weights that the stamp was made for."""
        return self._weights.bytes


class ModelStamps:
    """Stamps of several models, compared together."""

    def __init__(self, stamps: Sequence[ModelStamp]) -> None:
        self._models = [stamp.model for stamp in stamps]
        self._watched = _Watched().add(stamp.watched for stamp in stamps)
        self._complete = all(stamp.complete for stamp in stamps)
        self._weights = _Weights(stamps) if all(stamp.small for stamp in stamps) else None

    def same(self, models: Sequence[nn.Module]) -> bool:
        """Return True if these are the same models, with the same structures and weights."""
        return self._weights is not None and self.same_structure(models) and self._weights.same()

    def same_weights(self) -> bool:
        """Return True if the weights have the values that they had, in models of the same structure.

        Whether a weight is trained does not count.
        """
        return self._weights is not None and self._weights.same(forward=True)

    def same_structure(self, models: Sequence[nn.Module]) -> bool:
        """Return True if these are the same models, with the same structures. Weights may have new values."""
        return (
            self._complete
            and len(models) == len(self._models)
            and all(map(is_, models, self._models))
            and self._watched.same()
        )


class _Weights:
    """The weights of some models, as they are now."""

    def __init__(self, stamps: Sequence[ModelStamp]) -> None:
        self._tensors = [tensor for stamp in stamps for tensor in stamp.tensors]
        self.bytes: list[bytes] = []
        if all(stamp.small for stamp in stamps):
            known = all(hasattr(stamp, "_weights") for stamp in stamps)
            taken = (stamp.bytes_of() for stamp in stamps) if known else [map(_bytes, self._tensors)]
            self.bytes = list(chain.from_iterable(taken))
            self._lengths = list(map(len, self.bytes))
            self._copies = [ctypes.cast(ctypes.c_char_p(own), ctypes.c_void_p).value for own in self.bytes]
            self._forms, self._training_forms = self._forms_now(), list(map(_training_form, self._tensors))

    def _forms_now(self) -> list[list[Any]]:
        # `tensor.data = other` replaces all of these in the same object, and the strides.
        return [list(map(read, self._tensors)) for read in (Tensor.data_ptr, Tensor.size, _dtype)]

    def same(self, *, forward: bool = False) -> bool:
        """Return True if the weights are the same to the bit."""
        forms = self._forms_now()
        # Versions do not count what is written through `tensor.data` or a NumPy array, so bytes are compared.
        return (
            forms == self._forms
            and all(map(Tensor.is_contiguous, self._tensors))  # they were
            and not any(map(_memcmp, forms[0], self._copies, self._lengths))
            and (forward or list(map(_training_form, self._tensors)) == self._training_forms)
        )


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


def _bytes(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
