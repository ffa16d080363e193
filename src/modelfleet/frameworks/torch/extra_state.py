"""What modules keep beside their tensors (`get_extra_state`), as tensors in a file: JSON, and no pickle.

The state of the module at `path` is one tensor, `path._extra_state`: the bytes of a JSON text. Tensors and arrays
within it are tensors of their own, `path._extra_state.0` and so on.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.errors import StoreError

KEY = "_extra_state"  # as in a `state_dict`
BLOCK = 256  # bytes: texts of about the same length have the same shape, and share a file


def extra_states(model: nn.Module) -> dict[str, Tensor]:
    """The extra states of a model's modules, by name; StoreError for one that can't be kept."""
    found: dict[str, Tensor] = {}
    for path, module in _keepers(model):
        name, tensors = _name(path), []
        text = json.dumps(
            _encoded(module.get_extra_state(), tensors, f"{path!r} ({type(module).__name__})")
        ).encode()
        padded = text.ljust(-(-len(text) // BLOCK) * BLOCK)
        found[name] = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        found.update({f"{name}.{number}": tensor for number, tensor in enumerate(tensors)})
    return found


def is_extra(name: str) -> bool:
    """Whether a tensor of a file is (a part of) an extra state."""
    return KEY in name.split(".")


def difference(model: nn.Module, tensors: Mapping[str, Tensor]) -> str | None:
    """Why extra states of a file can't be given to a model; None if they can."""
    own = {_name(path): module for path, module in _keepers(model)}
    kept = {name for name in tensors if name.rpartition(".")[2] == KEY}
    for name in sorted(own.keys() ^ kept):
        return f"it has no {name!r}" if name in kept else f"it has a {name!r} that the folder does not"
    for name, module in own.items():
        if type(module).set_extra_state is nn.Module.set_extra_state:
            return f"its {name!r} can't be set: {type(module).__name__} has get_extra_state but no set_extra_state"
    return None


def set_extra_states(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the modules the extra states of a file."""
    for path, module in _keepers(model):
        name = _name(path)
        try:
            kept = json.loads(tensors[name].numpy().tobytes())
            state = _decoded(kept, lambda number, name=name: tensors[f"{name}.{number}"])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"its {name!r} is damaged ({error}). Load another copy.") from error
        module.set_extra_state(state)


def _keepers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield path, module


def _name(path: str) -> str:
    return f"{path}.{KEY}" if path else KEY


def _encoded(value: Any, tensors: list[Tensor], where: str) -> Any:
    """A value as JSON can hold it; what JSON has no word for is tagged, and tensors are put aside."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        tensors.append(torch.from_numpy(np.array(value)))
        return {"array": len(tensors) - 1}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encoded(item, tensors, where) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(part, tensors, where) for part in pair] for pair in value.items()]}
    raise StoreError(
        f"the get_extra_state of {where} gives a {type(value).__name__}, which can't be saved without pickle. "
        f"Let it give tensors, arrays, numbers, strings, lists, tuples and dicts."
    )


def _decoded(value: Any, tensor: Callable[[int], Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, own),) = value.items()
    if kind == "tensor":
        return tensor(own)
    if kind == "array":
        return tensor(own).numpy()
    if kind == "dict":
        return {_decoded(key, tensor): _decoded(item, tensor) for key, item in own}
    items = [_decoded(item, tensor) for item in own]
    return tuple(items) if kind == "tuple" else items
