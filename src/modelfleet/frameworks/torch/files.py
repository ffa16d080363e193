"""Torch tensors in safetensors files: what the store needs of a framework (`store.Files`)."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from modelfleet.errors import MissingExtraError, StoreError


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors of any device, layout and overlap; each is stored whole."""
    safetensors = _safetensors()
    from safetensors.torch import save_file

    seen: set[int] = set()
    packed = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise StoreError(f"tensor {name!r} is {tensor.layout}. Only dense tensors can be saved.")
        packed[name] = tensor.detach().cpu().contiguous()
        storage = packed[name].untyped_storage().data_ptr()
        if storage in seen:  # save_file refuses tensors that share memory
            packed[name] = packed[name].clone()
        seen.add(storage)
    try:
        save_file(packed, path)
    except safetensors.SafetensorError as error:
        # safetensors 0.8 tells a full disk only in words: "I/O error: … (os error 28)".
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise StoreError(f"{path} can't be written: {error}.") from error
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
    except KeyError as error:  # how save_file refuses a dtype
        raise StoreError(f"a tensor can't be saved: safetensors does not hold {error}.") from error


def read(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file, on the CPU."""
    return _read(path, lambda file, name: file.get_tensor(name))


def read_row(path: Path, row: int, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """One row of every tensor, or of those in `names`, without reading the others."""
    return _read(path, lambda file, name: file.get_slice(name)[row], names)


def _read(
    path: Path, get: Callable[[Any, str], torch.Tensor], names: Sequence[str] | None = None
) -> dict[str, torch.Tensor]:
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            # Copies: safetensors' own are windows on the mapped file, and would keep the whole of it.
            return {name: get(file, name).clone() for name in (file.keys() if names is None else names)}
    except (safetensors.SafetensorError, OSError, RuntimeError) as error:
        raise StoreError(f"{path} can't be read: {error}.") from error


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise MissingExtraError("safetensors", "torch", "saving and loading weights") from error
    return safetensors
