"""Save what modules keep besides their tensors (`get_extra_state`) as tensors in a file: as JSON, without pickle.

The state of the module at `path` is one tensor, `path._extra_state`: the bytes of a JSON text. Tensors and arrays
in it are tensors of their own, `path._extra_state.0` and so on.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.errors import StoreError
from modelfleet.frameworks.torch.walking import modules_of
from modelfleet.types import Json

KEY = "_extra_state"  # as in a `state_dict`
BLOCK = 256  # bytes to which texts are padded, so that similar ones have one shape and share a file


def extra_states(model: nn.Module) -> dict[str, Tensor]:
    """Return the extra states of a model's modules, by name.

    Raises:
        StoreError: A state can't be saved without pickle.
    """
    found: dict[str, Tensor] = {}
    for path, module in _stateful_modules(model):
        name, tensors = _name(path), []
        text = json.dumps(
            _encode(module.get_extra_state(), tensors, f"{path!r} ({type(module).__name__})")
        ).encode()
        padded = text.ljust(-(-len(text) // BLOCK) * BLOCK)
        found[name] = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        found.update({f"{name}.{number}": tensor for number, tensor in enumerate(tensors)})
    return found


def has_extra_states(model: nn.Module) -> bool:
    """Return True if a module of the model has an extra state."""
    return any(_is_stateful(module) for module in modules_of(model))


def is_extra(name: str) -> bool:
    """Return True if a tensor of a file belongs to an extra state."""
    return KEY in name.split(".")


def difference(model: nn.Module, tensors: Mapping[str, Tensor]) -> str | None:
    """Return why a model can't take the extra states of a file; None if it can."""
    own = {_name(path): module for path, module in _stateful_modules(model)}
    kept = {name for name in tensors if name.rpartition(".")[2] == KEY}
    for name in sorted(own.keys() ^ kept):
        return f"it has no {name!r}" if name in kept else f"it has a {name!r} that the folder does not"
    for name, module in own.items():
        if type(module).set_extra_state is nn.Module.set_extra_state:
            return f"its {name!r} can't be set: {type(module).__name__} has get_extra_state but no set_extra_state"
    return None


def set_extra_states(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the modules of a model the extra states of a file.

    Raises:
        StoreError: A state is damaged.
    """
    for path, module in _stateful_modules(model):
        name = _name(path)
        try:
            kept = json.loads(tensors[name].numpy().tobytes())
            state = _decode(kept, lambda number, name=name: tensors[f"{name}.{number}"])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"its {name!r} is damaged ({error}). Load another copy.") from error
        module.set_extra_state(state)


def _stateful_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if has_extra_states(model):
        yield from ((path, module) for path, module in model.named_modules() if _is_stateful(module))


def _is_stateful(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _name(path: str) -> str:
    return f"{path}.{KEY}" if path else KEY


def _encode(value: object, tensors: list[Tensor], where: str) -> Json:
    """Return a value in JSON's types. Other types are tagged, and tensors are moved to `tensors`."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        tensors.append(torch.from_numpy(np.array(value)))
        return {"array": len(tensors) - 1}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return {type(value).__name__: [_encode(item, tensors, where) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_encode(part, tensors, where) for part in pair] for pair in value.items()]}
    raise StoreError(
        f"the get_extra_state of {where} returns a {type(value).__name__}, which can't be saved without pickle. "
        f"Return tensors, arrays, numbers, strings, lists, tuples and dicts only."
    )


def _decode(value: Json, tensor: Callable[[int], Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, own),) = value.items()
    if kind == "tensor":
        return tensor(own)
    if kind == "array":
        return tensor(own).numpy()
    if kind == "dict":
        return {_decode(key, tensor): _decode(item, tensor) for key, item in own}
    items = [_decode(item, tensor) for item in own]
    return tuple(items) if kind == "tuple" else items
