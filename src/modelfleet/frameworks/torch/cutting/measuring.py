"""Measure stages: their time forward and backward, and what they keep in between."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from modelfleet.frameworks.pieces import Timing
from modelfleet.frameworks.rounds import shortest_times
from modelfleet.frameworks.torch.cutting.recording import synchronize

Part = tuple[nn.Module, Sequence[Tensor]]
"""A stage with its inputs."""


def measure(parts: Sequence[Part], *, train: bool) -> list[Timing]:
    """Return the shortest times of stages, measured in turns."""
    programs = [partial(_once, stage, _leaves(inputs, train), train) for stage, inputs in parts]
    return [Timing(*found) for found in shortest_times(programs)]


def kept_bytes(stage: nn.Module, inputs: Sequence[Tensor], *, train: bool) -> int:
    """Return the bytes that a stage keeps for the backward pass beside its weights; else those of its outputs."""
    if train:
        return _saved_bytes(stage, _leaves(inputs, train))
    with torch.no_grad():
        return sum(own.nbytes for own in _tensors(stage(*inputs)))


def _leaves(inputs: Sequence[Tensor], train: bool) -> list[Tensor]:
    return [own.detach().requires_grad_(train and own.requires_grad) for own in inputs]


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


def _once(stage: nn.Module, inputs: Sequence[Tensor], train: bool) -> tuple[float, float]:
    synchronize(stage)
    start = time.perf_counter()
    with torch.set_grad_enabled(train):
        outputs = _tensors(stage(*inputs))
    synchronize(stage)
    forward = time.perf_counter() - start
    if not train:
        return forward, 0.0
    compute = gradients(outputs, trained_tensors(stage, inputs))
    synchronize(stage)
    start = time.perf_counter()
    compute()
    synchronize(stage)
    return forward, time.perf_counter() - start


def _saved_bytes(stage: nn.Module, inputs: Sequence[Tensor]) -> int:
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
