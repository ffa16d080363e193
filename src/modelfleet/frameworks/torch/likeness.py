"""Structures of many models, most of which are alike."""

from collections.abc import Hashable, Sequence
from itertools import pairwise
from types import NoneType

import torch
from torch import Tensor, nn

from modelfleet.frameworks.structure import Signature
from modelfleet.frameworks.torch.structure import BOOKKEEPING, HOOKS, signature

# Equal values of one of these types are the same to any forward.
_SIMPLE = frozenset({int, bool, str, NoneType, torch.dtype})


class _UnclearError(Exception):
    """Raised for a model whose structure takes a closer look."""


def signatures(models: Sequence[nn.Module]) -> list[Signature]:
    """Return the structure of each model, as `signature` does.

    Most models of a large fleet are plainly alike: their modules have the same classes, shapes and simple
    attributes, in the same order. Such models get one signature, which is made once.
    """
    known: dict[Hashable, Signature] = {}
    found = []
    for model in models:
        try:
            key = _likeness(model)
        except (_UnclearError, KeyError):  # a TorchScript module has no tables
            found.append(signature(model))
            continue
        if key not in known:
            known[key] = signature(model)
        found.append(known[key])
    return found


def _likeness(model: nn.Module) -> Hashable:
    """Return a key. Models with equal keys have equal signatures, but not the other way round.

    Raises:
        _UnclearError: The model has something that the key does not describe, such as hooks or tied weights.
    """
    key: list[Hashable] = []
    spans: list[tuple[int, int]] = []
    _describe(model, key, spans, set())
    spans.sort()
    for (_, end), (start, _) in pairwise(spans):
        if start < end:
            raise _UnclearError  # tied, or one is a view of the other
    return tuple(key)


def _describe(module: nn.Module, key: list[Hashable], spans: list[tuple[int, int]], seen: set[int]) -> None:
    if id(module) in seen:
        raise _UnclearError
    seen.add(id(module))
    attributes = vars(module)
    for table in HOOKS:
        if attributes[table]:
            raise _UnclearError
    temporary = attributes["_non_persistent_buffers_set"]
    key += (type(module), attributes["training"], frozenset(temporary) if temporary else None)
    for role in ("_parameters", "_buffers"):
        tensors = attributes[role]
        key.append(len(tensors))
        for name, tensor in tensors.items():
            key.append(name)
            if tensor is not None:
                _describe_tensor(tensor, key, spans)
    for name, value in attributes.items():
        if name not in BOOKKEEPING:
            key.append(name)
            _describe_value(value, key)
    children = attributes["_modules"]
    key.append(len(children))
    for name, child in children.items():
        key.append(name)
        if child is not None:
            _describe(child, key, spans, seen)


def _describe_tensor(tensor: Tensor, key: list[Hashable], spans: list[tuple[int, int]]) -> None:
    plain = type(tensor) is nn.Parameter or type(tensor) is Tensor
    if not plain or tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise _UnclearError
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.is_contiguous():
        raise _UnclearError
    key += (tensor.shape, tensor.dtype, tensor.requires_grad)
    if tensor.nbytes:
        start = tensor.data_ptr()
        spans.append((start, start + tensor.nbytes))


def _describe_value(value: object, key: list[Hashable]) -> None:
    kind = type(value)
    if kind in _SIMPLE:
        key += (kind, value)
    elif kind is float:
        key += (kind, repr(value))  # nan is equal to itself, and -0.0 differs from 0.0
    elif isinstance(value, tuple) and kind is tuple:
        key.append(len(value))
        for part in value:
            _describe_value(part, key)
    else:
        raise _UnclearError
