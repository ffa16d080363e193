"""Torch tensors in safetensors files, as the store needs them (`store.Files`)."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from modelfleet.errors import StoreError
from modelfleet.frameworks.files import Get, load, save


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any device, layout and overlap. Each tensor is stored whole."""
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
    save(path, packed, "torch")


# Tensors are cloned: the ones that safetensors returns are views of the mapped file, and keep all of it mapped.


def read(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file, onto the CPU."""
    return load(path, "torch", lambda file, name: file.get_tensor(name).clone())


def read_row(path: Path, row: int) -> dict[str, Tensor]:
    """Read one row of every tensor, without reading the others."""
    get: Get = lambda file, name: file.get_slice(name)[row].clone()  # noqa: E731
    return load(path, "torch", get)
