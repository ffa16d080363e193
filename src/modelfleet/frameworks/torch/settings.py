"""Settings of torch that change a model's numbers, so that worker processes can apply them, too."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def settings() -> dict[str, Any]:
    """Return the settings that are not torch's defaults."""
    found: dict[str, Any] = {}
    if torch.get_default_dtype() != torch.float32:
        found["default_dtype"] = torch.get_default_dtype()
    if torch.get_float32_matmul_precision() != "highest":
        found["matmul_precision"] = torch.get_float32_matmul_precision()
    return found


@contextmanager
def using(settings: Mapping[str, Any]) -> Iterator[None]:
    """Apply settings within this context. In the process that they came from, nothing changes."""
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
