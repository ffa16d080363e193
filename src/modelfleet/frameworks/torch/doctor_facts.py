"""Facts about torch for `modelfleet doctor`."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from modelfleet.frameworks.doctor_rows import Row

_TRITON = (
    "triton",
    "pytorch-triton",
    "pytorch-triton-rocm",
    "pytorch-triton-xpu",
    "triton-windows",
)  # builds of it


def cache_folder() -> Path:
    """Return the folder in which torch keeps compiled programs."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def accelerator_rows() -> list[Row]:
    """Return what decides how quick and how exact torch is on the accelerators of this machine."""
    kind = accelerator_kind()
    rows = []
    if kind in ("cuda", "xpu"):
        found = triton_version()
        advice = "" if found else "pip install triton; without it, steps are not compiled"
        rows.append(Row("triton", found, "compiled steps of torch on a GPU", advice))
    if kind == "cuda":
        products, convolutions = tf32()
        rows.append(
            Row(
                "TF32",
                f"products {_on(products)}, convolutions {_on(convolutions)}",
                "quicker float32, rounded to 10 binary digits",
                "" if products else 'torch.set_float32_matmul_precision("high") turns it on for products',
            )
        )
        rows += _peer_rows()
    return rows


def _peer_rows() -> list[Row]:
    if torch.accelerator.device_count() < 2:
        return []
    apart = ", ".join(f"cuda:{one} and cuda:{other}" for one, other in pairs_without_access())
    here = f"not between {apart}" if apart else "between all GPUs"
    return [Row("P2P", here, "copies from GPU to GPU", "copies go through the host" if apart else "")]


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def accelerator_kind() -> str | None:
    """Return the kind of accelerator that torch can use here; None if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def triton_version() -> str | None:
    """Return the version of triton; None if it is not installed."""
    for name in _TRITON:
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    return None


def tf32() -> tuple[bool, bool]:
    """Return True if float32 products on NVIDIA's GPUs are computed in TF32, and True if convolutions are."""
    convolutions: Any = torch.backends.cudnn  # as torch's types do not say
    return torch.backends.cuda.matmul.fp32_precision == "tf32", convolutions.conv.fp32_precision == "tf32"


def pairs_without_access() -> list[tuple[int, int]]:
    """Return the pairs of GPUs of which one can't read the other's memory."""
    count = torch.accelerator.device_count()
    return [
        (one, other)
        for one in range(count)
        for other in range(one + 1, count)
        if not (torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one))
    ]
