"""Torch models as the layers above handle them: seeded, checked, copied, and their weights for files."""

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelfleet.devices import Device
from modelfleet.errors import InputError
from modelfleet.frameworks.torch.devices import accelerators, native, restoring_generators
from modelfleet.frameworks.torch.extra_state import (
    difference,
    extra_states,
    has_extra_states,
    is_extra,
    set_extra_states,
)
from modelfleet.frameworks.torch.walking import modules_of, plain_parameters
from modelfleet.frameworks.weight_mismatch import Spec, mismatch
from modelfleet.trees import leaves


@contextmanager
def seeding(seed: int) -> Iterator[None]:
    """Seed torch's generators within this context, and restore them afterwards."""
    with restoring_generators(*(native(device) for device in accelerators() if _in_use(device))):
        # torch.manual_seed records the call stack for devices that may be added later: half the time of a small
        # model.
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        yield


def _in_use(device: Device) -> bool:
    """Return True unless nothing has used a kind of accelerator yet: to read a generator's state would."""
    module = torch.get_device_module(device.kind)
    return bool(getattr(module, "is_initialized", lambda: True)())


@contextmanager
def without_callers_contexts() -> Iterator[None]:
    """Undo contexts that a verb was called in, such as `no_grad` and `autocast`, within this context.

    Threads and worker processes do not inherit them, so lanes of this thread must not depend on them.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        accelerator = torch.accelerator.current_accelerator()
        for kind in ("cpu", *([] if accelerator is None else [accelerator.type])):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def is_model(value: object) -> bool:
    """Return True for a torch module."""
    return isinstance(value, nn.Module)


def check_model(model: nn.Module, name: str) -> None:
    """Raise InputError for a model whose weights are not initialized."""
    if all(_has_numbers(tensor) for module in modules_of(model) for tensor in _tensors_in(module)):
        return
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise InputError(
                f"member {name!r}: its {path!r} is uninitialized. "
                f"Call the model once on a batch, so that its lazy layers know their shapes."
            )
        if tensor.is_meta:
            raise InputError(
                f"member {name!r}: its {path!r} is on the meta device, without values. Load its weights."
            )


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model. Tensors that it keeps from a forward pass are copied without their graph."""
    kept = (t for module in model.modules() for value in vars(module).values() for t in leaves(value))
    memo = {id(t): t.detach().clone() for t in kept if isinstance(t, Tensor) and not t.is_leaf}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # a model may hold anything, such as a lock or an open file
        raise InputError(
            f"a {type(model).__name__} can't be copied: {error}. Give its class a __deepcopy__, or build another "
            f"model and add that."
        ) from error


def randomness() -> Tensor:
    """Return the state of the generator with which torch's loaders shuffle."""
    return torch.get_rng_state()


def restore_randomness(state: Tensor) -> None:
    """Restore that generator."""
    torch.set_rng_state(state)


def weights_key(model: nn.Module) -> Hashable:
    """Return what models must have in common for their weights to be stacked in one file."""
    return tuple((name, tuple(t.shape), t.dtype) for name, t in _weights(model).items())


def stacked_weights(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the weights of models with one key, `(member, …)` each."""
    weights = [_weights(model) for model in models]
    return {name: torch.stack([own[name].detach().cpu() for own in weights]) for name in weights[0]}


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> str | None:
    """Copy weights into a model. If they do not fit, change nothing and return the first difference."""
    own = _tensors(model)
    if own.keys() != tensors.keys() or any(not _alike(t, tensors[name]) for name, t in own.items()):
        wrong = mismatch(_specs(own), _specs({name: t for name, t in tensors.items() if not is_extra(name)}))
        if wrong is not None:
            return wrong
    extra = own.keys() != tensors.keys() or has_extra_states(model)
    wrong = difference(model, tensors) if extra else None
    if wrong is not None:
        return wrong
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    if extra:
        set_extra_states(model, tensors)
    return None


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {**_tensors(model), **extra_states(model)}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    # Each parameter once, even if it is tied, and the buffers that a state_dict would contain.
    plain = plain_parameters(model)
    if plain is not None:
        return plain
    buffers = dict(model.named_buffers())
    if buffers:
        kept = set(model.state_dict(keep_vars=True))
        buffers = {name: buffer for name, buffer in buffers.items() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


def _has_numbers(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and not tensor.is_meta


def _tensors_in(module: nn.Module) -> Iterator[Tensor]:
    for tensors in (module._parameters, module._buffers):
        yield from (tensor for tensor in tensors.values() if tensor is not None)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _specs(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    return {name: Spec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
