"""Kernels that draw random numbers inside themselves: fused attention, and recurrent layers of cuDNN.

Only accelerators have them. Such a kernel can't be given a member's own mask. So while members draw from their
streams, attention and recurrent layers on an accelerator that drop out take torch's plain form. There, dropout is
an operation of its own, as on the CPU. Those that drop nothing keep their kernels.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import _VF, Tensor
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_ATTENTION = "scaled_dot_product_attention"


class _PlainWhereDrawing:
    """Replaces functions of torch while any thread draws from streams, if there may be an accelerator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._attention: Callable[..., Tensor] | None = None

    def enter(self) -> None:
        """Replace the functions, if they are not replaced yet."""
        with self._lock:
            self._users += 1
            if self._users == 1 and _may_have_kernels():
                self._attention = getattr(F, _ATTENTION)
                setattr(F, _ATTENTION, _attention(self._attention))
                for name in _RECURRENT:
                    setattr(_VF, name, _recurrent(getattr(_VF, name)))

    def leave(self) -> None:
        """Put torch's functions back after the last user."""
        with self._lock:
            self._users -= 1
            if not self._users and self._attention is not None:
                setattr(F, _ATTENTION, self._attention)
                self._attention = None
                for name in _RECURRENT:
                    delattr(_VF, name)  # an attribute of this module hides torch's own


PLAIN_WHERE_DRAWING = _PlainWhereDrawing()


@cache
def _may_have_kernels() -> bool:
    return torch.accelerator.current_accelerator() is not None


def _attention(fused: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **o: Any,
    ) -> Tensor:
        if dropout_p == 0 or query.device.type == "cpu":
            return fused(query, key, value, attn_mask, dropout_p, *rest, **o)
        with PLAIN_ATTENTION:
            return fused(query, key, value, attn_mask, dropout_p, *rest, **o)

    return run


def _recurrent(plain: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Tensor, *args: Any) -> Any:
        # (state, weights, has biases, layers, rate, training, …). With packed sequences their sizes come first.
        first = 3 if isinstance(args[2], bool) else 4
        layers, rate, training = args[first : first + 3]
        if x.device.type == "cpu" or not rate:
            return plain(x, *args)
        if not training or layers == 1:  # the kernel would count as drawing
            return plain(x, *args[: first + 1], 0.0, *args[first + 2 :])
        with WITHOUT_CUDNN:
            return plain(x, *args)

    return run


class _Shared:
    """Context that changes a setting of the whole process. Several threads may enter and leave in any order.

    The last one to leave puts back what was set before the first one entered.
    """

    def __init__(self, change: Callable[[], AbstractContextManager[None]]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._inside = 0
        self._before = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before.enter_context(self._change())
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._before.close()


@contextmanager
def _disabled_cudnn() -> Iterator[None]:
    before = torch._C._get_cudnn_enabled()
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_enabled(before)


@contextmanager
def _no_fused_attention() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):
        yield


PLAIN_ATTENTION = _Shared(_no_fused_attention)
WITHOUT_CUDNN = _Shared(_disabled_cudnn)  # torch has no other choice of a recurrent layer's kernel


def draws_nothing(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True for a call of such a kernel that drops nothing, or that is its backward.

    torch tags them as random all the same.
    """
    found = _rate_argument(func)
    if found is None:
        return False
    name, position = found
    rate = args[position] if position < len(args) else kwargs.get(name, 0.0)
    return rate == 0 or "backward" in func._schema.name


@cache
def _rate_argument(func: OpOverload) -> tuple[str, int] | None:
    """Return the name and the position of the rate of such a kernel; None for other operations."""
    kernel = func._schema.name.partition("::")[2]
    if (
        "attention" not in kernel
        and "sdp" not in kernel
        and kernel not in ("_cudnn_rnn", "miopen_rnn", "_lstm_mps")
    ):
        return None
    names = [argument.name for argument in func._schema.arguments]
    return next(((name, names.index(name)) for name in ("dropout_p", "dropout") if name in names), None)
