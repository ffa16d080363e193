"""Torch tensors in safetensors files, as the store needs them (`store.Files`)."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from modelfleet.errors import StoreError
from modelfleet.frameworks.files import Get, by_row, load, save


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


def read_rows(path: Path, start: int, stop: int) -> list[dict[str, Tensor]]:
    """Read some rows of every tensor, without reading the others. Return the tensors of each row."""
    get: Get = lambda file, name: file.get_slice(name)[start:stop].clone()  # noqa: E731
    return by_row({name: tensor.unbind() for name, tensor in load(path, "torch", get).items()}, stop - start)
