"""Refuse to fuse members, or to keep them fused, if a model's own state prevents it."""

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch.likeness import signatures
from modelfleet.frameworks.torch.structure import difference, hooked, overlapping, without_modes
from modelfleet.frameworks.torch.walking import modules_of


class StatefulError(CannotFuseError):
    """Raised if Python state keeps a model from being fused. No other member may run its Python either."""


def refuse_unstackable(model: nn.Module) -> None:
    """Raise `StatefulError` for hooks that only autograd's backward runs, and for tensors that share memory."""
    for name, parameter in model.named_parameters():
        if hooked(parameter):
            raise StatefulError(f"its parameter {name} has a hook on its gradient")
    for name, other in overlapping(model).items():
        raise StatefulError(f"its {name} shares memory with its {other}")
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise StatefulError(f"{name or 'the model'} has a backward hook")


class DivergenceCheck:
    """Checks that the members of a lane still have the structure they had when they were fused.

    A step runs one member's Python for all of them, in the modes that all had when the lane was made. The current
    mode of a model does not count: users switch it to look at a model.
    """

    def __init__(self, models: Sequence[tuple[str, nn.Module]]) -> None:
        self._models = models
        self._remember()

    def check(self) -> None:
        """Raise `StatefulError` if a member's structure no longer equals the first member's."""
        same = all(
            len(table) == len(values) and all(map(is_, table.values(), values))
            for table, values in zip(self._tables, self._values, strict=True)
        )
        if same and self._versions == [tensor._version for tensor in self._tensors]:
            return
        (first, model), *others = self._models
        own, *theirs = signatures([model, *(other for _, other in others)])
        expected = without_modes(own)
        for (name, _), other in zip(others, theirs, strict=True):
            found = None if other == own else difference(without_modes(other), expected)
            if found is not None:
                raise StatefulError(f"{name!r} no longer has the structure of {first!r}: {found}")
        self._remember()

    def _remember(self) -> None:
        self._tables: list[dict[str, Any]] = []
        for _, model in self._models:
            for module in modules_of(model):
                self._tables += (vars(module), module._modules) if module._modules else (vars(module),)
        self._values = [tuple(table.values()) for table in self._tables]
        self._tensors = [value for values in self._values for value in values if isinstance(value, Tensor)]
        self._versions = [tensor._version for tensor in self._tensors]
