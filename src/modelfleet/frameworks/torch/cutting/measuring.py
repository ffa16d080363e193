"""Measure a stage: its time forward and backward, and what it keeps in between."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from modelfleet.frameworks.pieces import Timing
from modelfleet.frameworks.torch.cutting.recording import synchronize

_REPEATS = 4
_SHORT = 1e-3  # seconds: what is shorter is measured more often
_MORE_REPEATS = 12


def measure(stage: nn.Module, inputs: Sequence[Tensor], *, train: bool) -> tuple[Timing, int]:
    """Return the shortest times of a stage, and the bytes that it keeps for the backward pass.

    Without `train` the bytes are those of its outputs.
    """
    arguments = [own.detach().requires_grad_(train and own.requires_grad) for own in inputs]
    kept = _kept_bytes(stage, arguments) if train else 0
    found: list[Timing] = []
    repeats = _REPEATS
    while len(found) < repeats:
        found.append(_once(stage, arguments, train))
        if len(found) == 2 and found[1].total < _SHORT:
            repeats = _MORE_REPEATS
    forward, backward = (
        min(values) for values in zip(*((one.forward, one.backward) for one in found), strict=True)
    )
    if not train:
        with torch.no_grad():
            kept = sum(own.nbytes for own in _tensors(stage(*arguments)))
    return Timing(forward, backward), kept


def trained_tensors(stage: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs and the parameters that get gradients."""
    return [own for own in (*inputs, *stage.parameters()) if own.requires_grad]


def gradients(outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], Sequence[Tensor | None]]:
    """Return a function that computes gradients of outputs, whose own gradients are random and drawn before."""
    ends = [own for own in outputs if own.requires_grad]
    seeds = [torch.randn_like(own) for own in ends]
    if not ends or not sources:
        return tuple
    return lambda: torch.autograd.grad(ends, sources, seeds, allow_unused=True)


def _once(stage: nn.Module, inputs: Sequence[Tensor], train: bool) -> Timing:
    synchronize(stage)
    start = time.perf_counter()
    with torch.set_grad_enabled(train):
        outputs = _tensors(stage(*inputs))
    synchronize(stage)
    forward = time.perf_counter() - start
    if not train:
        return Timing(forward, 0.0)
    compute = gradients(outputs, trained_tensors(stage, inputs))
    synchronize(stage)
    start = time.perf_counter()
    compute()
    synchronize(stage)
    return Timing(forward, time.perf_counter() - start)


def _kept_bytes(stage: nn.Module, inputs: Sequence[Tensor]) -> int:
    """Return the bytes of the tensors that autograd keeps, without the weights."""
    weights = {own.untyped_storage().data_ptr() for own in (*stage.parameters(), *stage.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = stage(*inputs)  # so that no memory is used twice
    del held
    return sum(kept.values())


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
