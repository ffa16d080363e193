"""Quick walks over the modules of a model, for fleets of many thousand models."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

Place = tuple[tuple[str, ...], str]
"""Path of a module, and the name of a parameter or buffer in it."""


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield every module once, in any order. `model.modules()` takes several times as long."""
    seen = {id(model)}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        yield module
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def places_of(names: Iterable[str]) -> list[Place]:
    """Return the places of parameters and buffers by their names, such as `encoder.0.weight`."""
    parts = [name.split(".") for name in names]
    return [(tuple(path), name) for *path, name in parts]


def tensors_at(model: nn.Module, places: Sequence[Place]) -> list[Tensor]:
    """Return the parameters and buffers at some places."""
    found = []
    for path, name in places:
        module = model
        for part in path:
            module = module._modules[part]
            assert module is not None
        tensor = module._parameters.get(name)
        tensor = module._buffers[name] if tensor is None else tensor
        assert tensor is not None
        found.append(tensor)
    return found


def plain_parameters(model: nn.Module) -> dict[str, Tensor] | None:
    """Return what `named_parameters` gives, for a model that has nothing else: no buffers, and nothing twice.

    For any other model, return None.
    """
    if type(model).named_parameters is not nn.Module.named_parameters:
        return None
    found: dict[str, Tensor] = {}
    return found if _add_parameters(model, "", found, set()) else None


def _add_parameters(module: nn.Module, prefix: str, found: dict[str, Tensor], seen: set[int]) -> bool:
    """Add a module's parameters by name. Return False if it has buffers, or if something was seen before."""
    if module._buffers or id(module) in seen:
        return False
    seen.add(id(module))
    for name, parameter in module._parameters.items():
        if parameter is not None:
            if id(parameter) in seen:
                return False
            found[prefix + name] = parameter
            seen.add(id(parameter))
    return all(
        _add_parameters(child, f"{prefix}{name}.", found, seen)
        for name, child in module._modules.items()
        if child is not None
    )
