"""Nodes of graphs whose models are torch modules: their steps in micro-batches, and what they send each other."""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.frameworks.stacked import WEIGHTS, Given
from modelfleet.frameworks.torch import arrays
from modelfleet.frameworks.torch.base import on_host
from modelfleet.frameworks.torch.nodes.engine import TorchNode
from modelfleet.frameworks.torch.nodes.fleet_engine import TorchFleetNode
from modelfleet.frameworks.torch.nodes.groups import GroupTransport
from modelfleet.frameworks.torch.recipe import compile, prepare
from modelfleet.frameworks.torch.structure import address_of
from modelfleet.frameworks.torch.task import Task
from modelfleet.members import Member

__all__ = [
    "GroupTransport",
    "add",
    "buffer_addresses",
    "clip_factor",
    "compile",
    "fill",
    "frozen_names",
    "make_fleet_node",
    "make_node",
    "numbers",
    "prepare",
    "to_host",
    "trained",
]

to_host = on_host


def make_node(
    member: Member,
    task: Task,
    columns: Mapping[str, np.ndarray],
    device: torch.device,
    *,
    recompute: bool = False,
    evaluating: bool = False,
) -> TorchNode:
    """Return the engine of a node."""
    return TorchNode(member, task, columns, device, recompute=recompute, evaluating=evaluating)


def make_fleet_node(
    name: str,
    members: Sequence[Member],
    tasks: Sequence[Task],
    columns: Mapping[str, np.ndarray],
    device: torch.device,
    *,
    recompute: bool = False,
    isolates: bool = False,
) -> TorchFleetNode:
    """Return the engine of a node that is a fleet. `isolates` is True if a member may fail by itself."""
    return TorchFleetNode(name, members, tasks, columns, device, recompute=recompute, isolates=isolates)


def numbers(values: Sequence[float], device: torch.device) -> Tensor:
    """Return numbers as a tensor, in the widest type that the device has."""
    wide = torch.float32 if device.type == "mps" else torch.float64
    return torch.tensor(values, dtype=wide, device=device)


def add(total: Tensor, other: Tensor) -> None:
    """Add a tensor to another one in place, whatever device it is on."""
    total.add_(other.to(total.device))


def buffer_addresses(model: nn.Module) -> dict[str, Hashable]:
    """Return where each buffer's numbers are, by its name. Those without memory of their own are left out."""
    found = {name: address_of(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}
    return {name: address for name, address in found.items() if address is not None}


def clip_factor(norm: float, most: float) -> float:
    """Return what gradients of a norm are multiplied by, as torch's `clip_grad_norm_` does it."""
    return min(1.0, most / (norm + 1e-6))


def trained(model: nn.Module) -> bool:
    """Return True if any parameter takes a gradient."""
    return any(parameter.requires_grad for parameter in model.parameters())


def frozen_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that take no gradient."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def fill(model: nn.Module, state: Given) -> None:
    """Copy a node's weights, as its engine has read them, into a module of the same structure."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for part in WEIGHTS:
            for name, value in state.get(part, {}).items():
                tensor = arrays.from_host(value, own[name])[0]
                if own[name].shape == tensor.shape and own[name].dtype == tensor.dtype:
                    own[name].copy_(tensor)
                else:  # a buffer that the model had replaced by one of another shape or type
                    path, _, last = name.rpartition(".")
                    model.get_submodule(path)._buffers[last] = tensor.to(own[name].device)
