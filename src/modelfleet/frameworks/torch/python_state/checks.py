"""Refuse to fuse members, or to keep them fused, if a model's own state prevents it."""

from torch import nn

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch.structure import hooked, overlapping


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
