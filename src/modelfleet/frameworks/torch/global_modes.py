"""Modes of torch that hold for the whole thread or process, kept from what a member's code does to them."""

import torch
from torch import get_default_dtype, get_num_threads, is_autocast_enabled, is_grad_enabled
from torch._C import _get_deterministic_algorithms as get_deterministic

# The functions have names of their own here because a step calls each twice: finding them in torch takes longer.


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
