"""Refuse to fuse members, or to keep them fused, if a model's own state prevents it."""

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch.structure import difference, hooked, overlapping, signature, without_modes


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

    def __init__(self, models: Sequence[tuple[str, nn.Module]], variants: Sequence[int] | None = None) -> None:
        self._models = models
        self._variants = [0] * len(models) if variants is None else variants
        # Members of one variant are compared with each other, and each variant with what it was at first.
        self._first = {v: at for at, v in reversed(list(enumerate(self._variants)))}
        several = len(self._first) > 1
        self._expected = {v: without_modes(signature(models[at][1])) for v, at in self._first.items() if several}
        self._remember()

    def check(self) -> None:
        """Raise `StatefulError` if a member's structure no longer equals the first member's."""
        same = all(
            len(table) == len(values) and all(map(is_, table.values(), values))
            for table, values in zip(self._tables, self._values, strict=True)
        )
        if same and self._versions == [tensor._version for tensor in self._tensors]:
            return
        expected = self._expected or {0: without_modes(signature(self._models[0][1]))}
        for (name, model), variant in zip(self._models, self._variants, strict=True):
            found = difference(without_modes(signature(model)), expected[variant])
            if found is not None:
                first = self._models[self._first[variant]][0]
                then = "it had" if first == name else f"of {first!r}"
                raise StatefulError(f"{name!r} no longer has the structure {then}: {found}")
        self._remember()

    def _remember(self) -> None:
        self._tables: list[dict[str, Any]] = []
        for _, model in self._models:
            for module in model.modules():
                self._tables += (vars(module), module._modules) if module._modules else (vars(module),)
        self._values = [tuple(table.values()) for table in self._tables]
        self._tensors = [value for values in self._values for value in values if isinstance(value, Tensor)]
        self._versions = [tensor._version for tensor in self._tensors]
