"""Arrays of JAX, TensorFlow and NumPy in safetensors files, as the store needs them (`store.Files`).

`save` and `load` do the same for other libraries that safetensors knows.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from modelfleet.errors import MissingExtraError, StoreError
from modelfleet.types import Arrays, Tensor

Library = Literal["numpy", "torch"]
Get = Callable[[Any, str], Tensor]
"""Return one tensor, or a part of it, from an open safetensors file."""


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write arrays of any device and layout. Each array is stored whole."""
    packed = {name: np.ascontiguousarray(np.asarray(tensor)) for name, tensor in tensors.items()}
    # `ascontiguousarray` turns a scalar into an array of one number.
    packed = {name: array.reshape(np.shape(tensors[name])) for name, array in packed.items()}
    save(path, packed, "numpy")


def read(path: Path) -> Arrays:
    """Read all arrays of a file."""
    return load(path, "numpy", lambda file, name: np.array(file.get_tensor(name)))


def read_rows(path: Path, start: int, stop: int) -> list[Arrays]:
    """Read some rows of every array, without reading the others. Return the arrays of each row."""
    get: Get = lambda file, name: np.array(file.get_slice(name)[start:stop])  # noqa: E731
    rows, found = range(stop - start), load(path, "numpy", get)
    # With an ellipsis, a row of single numbers is an array, too.
    return by_row({name: [array[row, ...] for row in rows] for name, array in found.items()}, stop - start)


def by_row(tensors: Mapping[str, Sequence[Tensor]], count: int) -> list[dict[str, Tensor]]:
    """Return the tensors of each of `count` rows, from the rows of each tensor."""
    return [{name: rows[row] for name, rows in tensors.items()} for row in range(count)]


def save(path: Path, tensors: Mapping[str, Tensor], library: Library) -> None:
    """Write tensors of a library.

    Raises:
        OSError: The disk refused the file.
        StoreError: The file can't hold the tensors, or can't be written for another reason.
    """
    safetensors = _import_safetensors(library)
    try:
        import_module(f"safetensors.{library}").save_file(tensors, path)
    except safetensors.SafetensorError as error:
        # safetensors 0.8 reports a full disk only in its text: "I/O error: … (os error 28)".
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise StoreError(f"{path} can't be written: {error}.") from error
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
    except KeyError as error:  # how save_file refuses a dtype
        raise StoreError(f"a tensor can't be saved: safetensors does not support {error}.") from error


def load(path: Path, library: Library, get: Get) -> dict[str, Tensor]:
    """Return what `get` reads for every tensor of the file.

    Raises:
        StoreError: The file can't be read.
    """
    safetensors = _import_safetensors(library)
    try:
        with safetensors.safe_open(path, framework=library) as file:
            return {name: get(file, name) for name in file.keys()}  # noqa: SIM118  it is no mapping
    except (safetensors.SafetensorError, OSError, RuntimeError, TypeError) as error:
        raise StoreError(f"{path} can't be read: {error}.") from error


def _import_safetensors(library: Library) -> ModuleType:
    """Return the package `safetensors`, or raise an error that names the extra to install."""
    extra = "torch" if library == "torch" else "keras"
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise MissingExtraError("safetensors", extra, "saving and loading weights") from error
    return safetensors
