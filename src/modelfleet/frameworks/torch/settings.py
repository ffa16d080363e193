"""What a program sets in torch that changes a model's numbers, for worker processes to set, too."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def settings() -> dict[str, Any]:
    """The settings that are not torch's defaults."""
    found: dict[str, Any] = {}
    if torch.get_default_dtype() != torch.float32:
        found["default_dtype"] = torch.get_default_dtype()
    if torch.get_float32_matmul_precision() != "highest":
        found["matmul_precision"] = torch.get_float32_matmul_precision()
    return found


@contextmanager
def using(settings: Mapping[str, Any]) -> Iterator[None]:
    """Compute with what `settings` gave. In the process that gave it, nothing changes."""
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    wanted = settings.get("default_dtype", before[0]), settings.get("matmul_precision", before[1])
    if wanted == before:
        yield
        return
    _set(*wanted)
    try:
        yield
    finally:
        _set(*before)


def _set(dtype: torch.dtype, precision: str) -> None:
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
