"""Numbers that are set on torch models and losses, such as a dropout rate, for checkpoints."""

from collections.abc import Iterator, Mapping

import numpy as np
from torch import nn

from modelfleet.frameworks.torch.structure import BOOKKEEPING
from modelfleet.frameworks.torch.task import Task

_NUMBERS = (float, int, np.float64, np.float32)  # exact types: no booleans


def numbers_of(model: nn.Module, task: Task) -> dict[str, float]:
    """Return the numbers that are attributes of the modules of a model, its loss or its objective, by path."""
    return {
        f"{path}.{name}": value if type(value) is int else float(value)
        for path, module in _modules(model, task)
        for name, value in vars(module).items()
        if type(value) in _NUMBERS and name not in BOOKKEEPING
    }


def restore_numbers(model: nn.Module, task: Task, numbers: Mapping[str, float]) -> None:
    """Set numbers that `numbers_of` returned. Those of modules that are not there any more are left out."""
    modules = dict(_modules(model, task))
    for path, value in numbers.items():
        owner, _, name = path.rpartition(".")
        attributes = vars(modules[owner]) if owner in modules else {}
        if type(attributes.get(name)) in _NUMBERS:
            attributes[name] = value


def _modules(model: nn.Module, task: Task) -> Iterator[tuple[str, nn.Module]]:
    loss = None if task.loss is None else task.loss.plain
    for root, owner in (("model", model), ("loss", loss), ("objective", task.objective)):
        for path, module in owner.named_modules() if isinstance(owner, nn.Module) else ():
            yield f"{root}.{path}" if path else root, module
