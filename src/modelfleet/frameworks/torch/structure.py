"""Structure of a torch model: everything that decides what it computes, except its weights.

Models with equal signatures run as one program with stacked weights. If it is unknown whether two models compute
the same, they count as different.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelfleet.frameworks.structure import Signature
from modelfleet.frameworks.torch.values import Freezer, differ, show
from modelfleet.frameworks.torch.values import without_numbers as without_numbers_of
from modelfleet.frameworks.torch.walking import modules_of

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

# Attributes that nn.Module keeps for itself, and that libraries set on modules but no forward reads.
BOOKKEEPING = frozenset(vars(nn.Module())) | {
    "_compiled_call_impl",
    "_flat_weights",  # a recurrent layer's own list of its parameters
    "_flat_weight_refs",
    "_is_hf_initialized",
    "name_or_path",
    "warnings_issued",
}


class _Module(NamedTuple):
    kind: Hashable
    forward: Hashable
    training: bool
    hooks: tuple[Hashable, ...]


class _Again(NamedTuple):
    """Module that occurs in the model a second time."""

    first: str


class _Tensor(NamedTuple):
    role: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    trained: bool
    tied: str | None
    persistent: bool
    hooked: bool
    overlaps: str | None
    """Name of another tensor of the model that shares its memory."""


def signature(model: nn.Module) -> Signature:
    """Return the structure of `model`: its modules, parameters, buffers, hooks and plain attributes."""
    modules = list(_walk(model, "", {}))
    freezer = Freezer(lambda: _names(modules))
    tensors: dict[int, str] = {}
    overlaps = overlapping(model)
    entries: list[tuple[str, Hashable]] = []
    for path, module, first in modules:
        if first is not None:
            entries.append((path, _Again(first)))
            continue
        dot = f"{path}." if path else ""
        cls = type(module)
        kind = freezer.freeze_class(cls)
        # A local class is compared with its forward. In other classes, forward may be replaced between two models.
        forward = getattr(cls, "forward", None) if kind is cls else None
        entries.append((path, _Module(kind, forward, module.training, _hooks(module, freezer))))
        temporary = module._non_persistent_buffers_set
        held = [("parameter", name, tensor, True) for name, tensor in module._parameters.items()]
        held += [("buffer", name, tensor, name not in temporary) for name, tensor in module._buffers.items()]
        for role, name, tensor, persistent in held:
            if tensor is not None:
                described = _describe(role, tensor, dot + name, tensors, overlaps, persistent)
                entries.append((dot + name, described))
        attributes = vars(module)
        for name in sorted(name for name in attributes if name not in BOOKKEEPING):
            entries.append((dot + name, freezer.freeze(attributes[name])))
    return Signature(tuple(entries))


def without_modes(own: Signature) -> Signature:
    """Return a structure as if all of its modules were in evaluation mode."""
    return Signature(
        tuple((path, e._replace(training=False) if isinstance(e, _Module) else e) for path, e in own.entries)
    )


@lru_cache(maxsize=4096)
def without_numbers(own: Signature) -> Signature:
    """Return a structure without the numbers in it. Members that differ in nothing else may share a lane."""
    kinds = {path: entry.kind for path, entry in own.entries if isinstance(entry, _Module)}
    found: list[tuple[str, Hashable]] = []
    for path, entry in own.entries:
        if isinstance(entry, _Module):
            hooks = tuple(without_numbers_of(hook) for hook in entry.hooks)
            found.append((path, entry._replace(kind=without_numbers_of(entry.kind), hooks=hooks)))
        elif isinstance(entry, _Again | _Tensor):
            found.append((path, entry))
        else:
            owner, _, name = path.rpartition(".")
            found.append((path, without_numbers_of(entry, kinds.get(owner), name)))
    return Signature(tuple(found))


def difference(a: Signature, b: Signature) -> str | None:
    """Return where `a` first differs from `b`, as in "features.3.stride is 2, not 1"; None if nowhere.

    A difference that keeps the two from sharing a lane comes before a difference in a number.
    """
    if a == b:
        return None
    ours = {
        path: (value, plain)
        for (path, value), (_, plain) in zip(a.entries, without_numbers(a).entries, strict=True)
    }
    # What differs in numbers alone is taken from `a`.
    others = [
        (path, ours[path][0] if path in ours and ours[path][1] == plain else value)
        for (path, value), (_, plain) in zip(b.entries, without_numbers(b).entries, strict=True)
    ]
    return _difference(a, Signature(tuple(others))) or _difference(a, b)


def _difference(a: Signature, b: Signature) -> str | None:
    if a == b:
        return None
    ours, theirs = dict(a.entries), dict(b.entries)
    for (path, value), (other_path, other) in zip(a.entries, b.entries, strict=False):
        if other_path not in ours:
            return f"has no {_role(other)} {other_path}"
        if path not in theirs:
            return f"has {_a_role(value)} {path}, the other has none"
        if value != theirs[path]:
            return _words(path, value, theirs[path])
        if path != other_path:
            return f"has {path} where the other has {other_path}"
    if len(a.entries) < len(b.entries):
        path, value = b.entries[len(a.entries)]
        return f"has no {_role(value)} {path}"
    path, value = a.entries[len(b.entries)]
    return f"has {_a_role(value)} {path}, the other has none"


def shared_parameters(models: Sequence[nn.Module]) -> set[str]:
    """Return the names of parameters and buffers, trained or frozen, that are the same tensor in all `models`.

    A single model shares nothing.
    """
    if len(models) < 2:
        return set()
    shared = {name: address_of(tensor) for name, tensor in _named_tensors(models[0])}
    for model in models[1:]:
        theirs = dict(_named_tensors(model))
        shared = {
            name: address
            for name, address in shared.items()
            if name in theirs and address is not None and address_of(theirs[name]) == address
        }
        if not shared:
            break
    return set(shared)


def trained_twice(models: Sequence[nn.Module]) -> tuple[int, int, str] | None:
    """Return the positions of two models that would train the same tensor, and its name in the second."""
    if _all_apart(models):
        return None
    owners: dict[Hashable, int] = {}
    for position, model in enumerate(models):
        for name, parameter in model.named_parameters():
            address = address_of(parameter) if parameter.requires_grad else None
            if address is not None and owners.setdefault(address, position) != position:
                return owners[address], position, name
    return None


def _all_apart(models: Sequence[nn.Module]) -> bool:
    """Return True if the trained parameters of all models begin at different addresses. False is a maybe."""
    owners: dict[int, int] = {}
    for position, model in enumerate(models):
        for module in modules_of(model):
            for parameter in module._parameters.values():
                if parameter is None or not parameter.requires_grad:
                    continue
                if type(parameter) is not nn.Parameter or parameter.layout != torch.strided:
                    return False
                start = parameter.data_ptr()
                if start and owners.setdefault(start, position) != position:
                    return False
    return True


def _walk(module: nn.Module, path: str, seen: dict[int, str]) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Yield every module with its path, parents first, and its earlier path if it occurs again."""
    first = seen.setdefault(id(module), path)
    if first != path:
        yield path, module, first
        return
    yield path, module, None
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{path}.{name}" if path else name, seen)


def _names(modules: Sequence[tuple[str, nn.Module, str | None]]) -> dict[int, str]:
    """Return the names of modules, parameters and buffers, by id."""
    names: dict[int, str] = {}
    for path, module, _ in modules:
        names.setdefault(id(module), f"module {path}" if path else "the model")
        dot = f"{path}." if path else ""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                names.setdefault(id(tensor), dot + name)
    return names


def _hooks(module: nn.Module, freezer: Freezer) -> tuple[Hashable, ...]:
    """Return the hooks that run with forward or backward, without their keys, which a global counter gives."""
    found: list[Hashable] = []
    for table in HOOKS:
        hooks = getattr(module, table)
        if hooks:
            keyed = getattr(module, f"{table}_with_kwargs", {})
            always = getattr(module, f"{table}_always_called", {})
            found += [(table, freezer.freeze(hook), key in keyed, key in always) for key, hook in hooks.items()]
    return tuple(found)


def _describe(
    role: str, tensor: Tensor, name: str, tensors: dict[int, str], overlaps: Mapping[str, str], persistent: bool
) -> _Tensor:
    first = tensors.setdefault(id(tensor), name)
    shape = None if is_lazy(tensor) else tuple(tensor.shape)
    tied = None if first == name else first
    return _Tensor(
        role, shape, tensor.dtype, tensor.requires_grad, tied, persistent, hooked(tensor), overlaps.get(name)
    )


def hooked(tensor: Tensor) -> bool:
    """Return True if there is a hook on a tensor's gradient."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def overlapping(model: nn.Module) -> dict[str, str]:
    """Return the names of parameters and buffers that share another's memory, with the other's name."""
    found: dict[str, str] = {}
    known: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if address_of(tensor) is None:
            continue
        start = tensor.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (last + 1) * tensor.element_size()
        others = known.setdefault(tensor.untyped_storage().data_ptr(), [])
        for begins, ends, other in others:
            if start < ends and begins < end:
                found[name] = other
        others.append((start, end, name))
    return found


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def address_of(tensor: Tensor) -> Hashable:
    """Return where a tensor's numbers are; None if it has no memory that could be shared."""
    if is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _role(value: object) -> str:
    if isinstance(value, _Tensor):
        return value.role
    return "module" if isinstance(value, _Module | _Again) else "attribute"


def _a_role(value: object) -> str:
    role = _role(value)
    return f"an {role}" if role == "attribute" else f"a {role}"


def _words(path: str, value: object, other: object) -> str:
    if isinstance(value, _Module) and isinstance(other, _Module):
        return _module_words(path, value, other)
    if isinstance(value, _Tensor) and isinstance(other, _Tensor) and value.role == other.role:
        return _tensor_words(path, value, other)
    if isinstance(value, _Again) or isinstance(other, _Again):
        return f"tied modules: {path} is {_origin(value)}, not {_origin(other)}"
    if _role(value) != _role(other):
        return f"{path} is {_a_role(value)}, not {_a_role(other)}"
    return differ(path, value, other)


def _module_words(path: str, value: _Module, other: _Module) -> str:
    name = path or "the model"
    if value.kind != other.kind:
        return differ(f"class of {name}", value.kind, other.kind)
    if value.forward != other.forward:
        return f"forward of {name} is not the same function: {show(value.kind)} was changed in between"
    if value.training != other.training:
        subject = f"{path} is " if path else ""
        return f"{subject}in eval mode, not training" if other.training else f"{subject}training, not in eval mode"
    for ours, theirs in zip(value.hooks, other.hooks, strict=False):
        if ours != theirs:
            return f"hooks of {name} differ: {_hook_text(ours)}, not {_hook_text(theirs)}"
    return f"number of hooks of {name} is {len(value.hooks)}, not {len(other.hooks)}"


def _hook_text(hook: Hashable) -> str:
    assert isinstance(hook, tuple)
    table, function, keyed, always = hook
    options = "".join([" with kwargs" * keyed, " always called" * always])
    return f"{table.strip('_').replace('_', ' ').removesuffix('s')} {show(function)}{options}"


def _tensor_words(path: str, value: _Tensor, other: _Tensor) -> str:
    name = f"{value.role} {path}"
    if value.shape != other.shape:
        return f"{name} is {_sized(value.shape)}, not {_sized(other.shape)}"
    if value.dtype != other.dtype:
        return f"{name} is {_short(value.dtype)}, not {_short(other.dtype)}"
    if value.trained != other.trained:
        return f"{name} is trained, not frozen" if value.trained else f"{name} is frozen, not trained"
    if value.tied != other.tied:
        return f"tied weights: {path} is {value.tied or 'its own'}, not {other.tied or 'its own'}"
    if value.hooked != other.hooked:
        return f"{name} has {'a' if value.hooked else 'no'} hook on its gradient, unlike the other"
    if value.overlaps != other.overlaps:
        return f"{name} shares memory with {value.overlaps or 'nothing'}, not with {other.overlaps or 'nothing'}"
    return f"{name} is {'persistent, not temporary' if value.persistent else 'temporary, not persistent'}"


def _sized(shape: tuple[int, ...] | None) -> str:
    return "uninitialized" if shape is None else str(shape)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _origin(value: object) -> str:
    return value.first or "the model" if isinstance(value, _Again) else "its own"
