"""Arrays of JAX, TensorFlow and NumPy in safetensors files: what the store needs (`store.Files`)."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modelfleet.errors import MissingExtraError, StoreError


def write(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write arrays of any device and layout; each is stored whole."""
    safetensors = _safetensors()
    from safetensors.numpy import save_file

    packed = {name: np.ascontiguousarray(np.asarray(tensor)) for name, tensor in tensors.items()}
    # `ascontiguousarray` makes a scalar an array of one number.
    packed = {name: array.reshape(np.shape(tensors[name])) for name, array in packed.items()}
    try:
        save_file(packed, path)
    except safetensors.SafetensorError as error:
        # safetensors 0.8 tells a full disk only in words: "I/O error: … (os error 28)".
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise StoreError(f"{path} can't be written: {error}.") from error
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
    except KeyError as error:  # how save_file refuses a dtype
        raise StoreError(f"an array can't be saved: safetensors does not hold {error}.") from error


def read(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a file."""
    return _read(path, lambda file, name: file.get_tensor(name))


def read_row(path: Path, row: int, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """One row of every array, or of those in `names`, without reading the others."""
    return _read(path, lambda file, name: file.get_slice(name)[row], names)


def _read(
    path: Path, get: Callable[[Any, str], np.ndarray], names: Sequence[str] | None = None
) -> dict[str, np.ndarray]:
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return {name: np.array(get(file, name)) for name in (file.keys() if names is None else names)}
    except (safetensors.SafetensorError, OSError, RuntimeError, TypeError) as error:
        raise StoreError(f"{path} can't be read: {error}.") from error


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise MissingExtraError("safetensors", "keras", "saving and loading weights") from error
    return safetensors
