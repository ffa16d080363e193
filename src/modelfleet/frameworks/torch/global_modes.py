"""Modes of torch that hold for the whole thread or process, kept from what a member's code does to them."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import get_default_dtype, get_num_threads, is_autocast_enabled, is_grad_enabled
from torch._C import _get_deterministic_algorithms as get_deterministic
from torch.nn.attention import SDPBackend, sdpa_kernel

# The functions have names of their own here because a step calls each twice: finding them in torch takes longer.


_lock = threading.Lock()
_depth = 0  # threads and levels that are within `plain_attention`
_kernels = ExitStack()


@contextmanager
def plain_attention() -> Iterator[None]:
    """Context in which attention has its plain form, without fused kernels.

    torch keeps the choice for the whole process. Several threads may enter and leave in any order: the last one
    to leave puts back what was chosen before the first one entered.
    """
    global _depth
    with _lock:
        if _depth == 0:
            _kernels.enter_context(sdpa_kernel(SDPBackend.MATH))
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _kernels.close()


class KeepingModes:
    """Context that puts back torch's modes after a member's code has run, so that no other member sees a change.

    It holds for the gradient mode, autocast, the default dtype, deterministic algorithms and the number of
    threads. Every step enters it, so it must be quick: it reads five values, and sets them only after a change.
    """

    __slots__ = ("_before", "_kind")

    def __init__(self, kind: str) -> None:
        """Make the context for code that runs on a kind of device, such as "cpu"."""
        self._kind = kind

    def __enter__(self) -> None:
        self._before = _modes(self._kind)

    def unchanged(self) -> bool:
        """Return True if the modes are those from before."""
        return _modes(self._kind) == self._before

    def __exit__(self, *error: object) -> None:
        if _modes(self._kind) == self._before:
            return
        grad, autocast, dtype, deterministic, threads = self._before
        torch._C._set_grad_enabled(grad)
        torch.set_autocast_enabled(self._kind, autocast)
        torch.set_default_dtype(dtype)
        if deterministic != get_deterministic():
            torch.use_deterministic_algorithms(deterministic)
        if threads != get_num_threads():
            torch.set_num_threads(threads)


def _modes(kind: str) -> tuple[bool, bool, torch.dtype, bool, int]:
    modes = is_grad_enabled(), is_autocast_enabled(kind), get_default_dtype()
    return *modes, get_deterministic(), get_num_threads()
