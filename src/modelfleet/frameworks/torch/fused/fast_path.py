"""torch's fast path for transformer layers in evaluation, where it has other numbers than the layers' operations.

`nn.TransformerEncoder` and its parts take it without gradients, and with a mask it is no rounding apart: padded
positions become zero, and masks of other numbers than 0 and -inf are read as true and false. A program is traced
from the operations. So members that take the fast path with such a mask are evaluated one by one, as alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_LAYERS = nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention
_FAST = {
    torch.ops.aten._transformer_encoder_layer_fwd.default,
    torch.ops.aten._native_multi_head_attention.default,
}
_OF_PADDING = 1  # kind of a mask that hides keys of each row


def has_other_numbers(model: nn.Module, run: Callable[[], object]) -> bool:
    """Return True if a call of a model in evaluation takes the fast path with a mask that changes the numbers."""
    if not torch.backends.mha.get_fastpath_enabled() or not any(isinstance(m, _LAYERS) for m in model.modules()):
        return False
    with torch.no_grad(), _Watch() as watch, suppress(Exception):  # the trial after this says what is wrong
        run()
    return watch.found


class _Watch(TorchDispatchMode):
    """Sees the operations of the fast path."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _FAST and not self.found:
            names = [argument.name for argument in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            mask, source = given.get("mask"), args[0]
            self.found = source.is_nested or (mask is not None and not _is_plain(mask, given.get("mask_type")))
        return func(*args, **(kwargs or {}))


def _is_plain(mask: Tensor, kind: int | None) -> bool:
    """Return True for a mask that both ways read alike: one for all rows, that allows some keys to each query."""
    if kind == _OF_PADDING or (mask.dim() > 2 and not bool((mask == mask[:1]).all())):
        return False
    if mask.dtype != torch.bool:
        if not bool(((mask == 0) | (mask == -math.inf)).all()):
            return False
        mask = mask != 0
    return not bool(mask.all(-1).any())
