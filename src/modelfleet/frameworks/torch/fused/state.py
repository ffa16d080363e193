"""Stacked state of a lane: every tensor has the member as its first axis, `(member, …)`.

A state is a plain dict of dicts of tensors, so that selecting members, saving and resuming are one line each:

    params    trained parameters, in the layout that is fastest to multiply with
    optimizer the optimizer's state, in the same layout, by names such as `exp_avg/0.weight`
    frozen    parameters that take no gradient
    buffers   running statistics and the like
    member    per-member scalars: seed, step, trouble, and with float16 the loss scale
    sums      what the epoch's metrics have summed up so far

Tensors that are the same object in every member (a shared frozen trunk) are not stacked. They are kept once, apart
from the state, without a member axis.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.frameworks.torch import arrays
from modelfleet.frameworks.torch.walking import places_of, tensors_at
from modelfleet.trees import map_tree
from modelfleet.types import State, Tree


def transposed(model: nn.Module) -> frozenset[str]:
    """Return the parameters that are stored transposed.

    A stacked `x @ weight.T` runs two to three times as fast if the weights lie as `(member, in, out)`. So the
    weights of linear and recurrent layers and of attention's input projection are stored that way. The module gets
    a view.
    """
    names: set[str] = set()
    seen: dict[Tensor, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{path}.{name}" if path else name
            multiplies = isinstance(module, nn.Linear | nn.RNNBase | nn.RNNCellBase) or name == "in_proj_weight"
            seen.setdefault(parameter, []).append(full if multiplies and parameter.dim() == 2 else "")
    for uses in seen.values():
        if all(uses):  # a weight tied to an embedding keeps the embedding's layout
            names.update(uses)
    return frozenset(names)


def stack(tensors: Sequence[Tensor], device: torch.device, *, transpose: bool = False) -> Tensor:
    """Return the members' tensors as one `(member, …)`, on the device, contiguous."""
    return placed(torch.stack([tensor.detach() for tensor in tensors]), device, transpose=transpose)


def placed(tensor: Tensor, device: torch.device, *, transpose: bool = False) -> Tensor:
    """Return a tensor on the device, in the layout that it is stored in."""
    tensor = tensor.detach().to(device)
    return (tensor.transpose(-1, -2) if transpose else tensor).contiguous()


def turned(name: str, tensor: Tensor, layout: frozenset[str]) -> Tensor:
    """Return a stacked tensor that belongs to a parameter in the parameter's own layout, or back from it."""
    return tensor.transpose(1, 2) if name in layout and tensor.dim() == 3 else tensor


def exact(device: torch.device) -> torch.dtype:
    """Return the dtype for sums and counts: float64 if the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that take a gradient, each once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def kept(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that take no gradient, each once."""
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers, each once."""
    return dict(model.named_buffers())


class Rows:
    """Operations on rows of stacked tensors (see `stacked.Tensors`); rows are written in place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def rows(self, numbers: np.ndarray) -> Tensor:
        """Return row numbers on the device."""
        return torch.from_numpy(np.asarray(numbers, np.int64)).to(self._device)

    def take(self, tree: State, rows: Tensor) -> State:
        """Return a copy of some rows of every tensor."""
        return select(tree, rows)

    def put(self, tree: State, rows: Tensor, values: State) -> State:
        """Write rows into the tensors."""
        put(tree, rows, values)
        return tree

    def like(self, value: Tensor | np.ndarray, tensor: Tensor) -> Tensor:
        """Return a tensor or a host array on the device, with the dtype of another tensor."""
        if isinstance(value, np.ndarray):
            value = arrays.from_host(value, tensor)
        return value.to(tensor)

    def replace(self, tensor: Tensor, value: Tensor | np.ndarray) -> Tensor:
        """Write all rows of a tensor."""
        return tensor.copy_(arrays.from_host(value, tensor) if isinstance(value, np.ndarray) else value)


def select(state: State, rows: Tensor) -> State:
    """Return a copy of the state of some members, in the order of `rows`."""
    return map_tree(lambda t: t.index_select(0, rows), state)


def put(state: Tree, rows: Tensor, part: Tree) -> None:
    """Write the state of some members, as `select` returns it, into the state of all."""
    if isinstance(state, dict):
        for name, whole in state.items():
            put(whole, rows, part[name])
    else:
        state.index_copy_(0, rows, part)


def tensors(state: Tree) -> list[Tensor]:
    """Return all tensors of a state, in a fixed order."""
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors(value)]
    return [state]


def on_host(stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in the host's memory. Those that are parts of one buffer come in one copy."""
    copies: dict[int, torch.UntypedStorage] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in stacked.items():
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in copies:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
            copies[memory.data_ptr()] = whole.cpu().untyped_storage()
        own = torch.empty(0, dtype=tensor.dtype)
        found[name] = own.set_(copies[memory.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride())
    return found


def write_back(models: Iterable[nn.Module], state: State, layout: frozenset[str]) -> None:
    """Copy every member's row into its own module."""
    models = list(models)
    stacked = {**state["params"], **state["frozen"], **state["buffers"]}
    places = places_of(stacked)
    targets = [tensor for model in models for tensor in tensors_at(model, places)]
    if {tensor.device for tensor in targets} != {tensor.device for tensor in stacked.values()}:
        stacked = on_host(stacked)  # a copy for each member and tensor would take far longer
    rows = {
        name: list((tensor.transpose(1, 2) if name in layout else tensor).unbind(0))
        for name, tensor in stacked.items()
    }
    sources = [values[row] for row in range(len(models)) for values in rows.values()]
    # An expanded tensor has fewer numbers than elements: torch can't write to it, and no step has changed it.
    written = [pair for pair in zip(targets, sources, strict=True) if not _expanded(pair[0])]
    with torch.no_grad():
        torch._foreach_copy_([target for target, _ in written], [source for _, source in written])


def _expanded(tensor: Tensor) -> bool:
    return 0 in tensor.stride() and any(
        n > 1 and not s for n, s in zip(tensor.shape, tensor.stride(), strict=True)
    )
