"""Modules as functions of their parameters and buffers."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.func import functional_call

from modelfleet.types import Tree


def call_with(
    model: nn.Module, weights: dict[str, Tensor], buffers: dict[str, Tensor], run: Callable[..., Tree], *args: Tree
) -> Tree:
    """Return `run(model, *args)` with these tensors in the model. Buffers that the model reassigns are put back.

    Args:
        model: The module. Its own tensors are neither read nor written.
        weights: All parameters by name, and buffers that are only read.
        buffers: The other buffers by name. The dict holds the new ones afterwards.
        run: The function to call.
        *args: More arguments of the function.
    """
    tensors = {f"model.{name}": t for name, t in {**weights, **buffers}.items()}
    tensors |= {f"model.{name}": tensors[f"model.{first}"] for name, first in _tied(model).items()}
    result = functional_call(_Runner(model, run), tensors, args, tie_weights=False)
    # functional_call leaves the buffers that the model reassigned in the dict that it was given.
    for name in buffers:
        buffers[name] = tensors[f"model.{name}"]
    return result


class _Runner(nn.Module):
    """Module of a model and a function that runs it, so that `functional_call` reaches both."""

    def __init__(self, model: nn.Module, run: Callable[..., Tree]) -> None:
        super().__init__()
        self.model = model
        self._run = run

    def forward(self, *args: Tree) -> Tree:
        return self._run(self.model, *args)


def _tied(model: nn.Module) -> dict[str, str]:
    """Return the further names of tensors that several modules hold, with the first name of each.

    A module that has two paths is left out: torch 2.13's `functional_call`, if it ties weights, swaps such a
    module's tensors twice, and leaves the given ones in the model.
    """
    first: dict[int, str] = {}
    seen: set[tuple[int, str]] = set()
    found: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for part, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or (id(module), part) in seen:
                continue
            seen.add((id(module), part))
            name = f"{prefix}.{part}" if prefix else part
            if first.setdefault(id(tensor), name) != name:
                found[name] = first[id(tensor)]
    return found
