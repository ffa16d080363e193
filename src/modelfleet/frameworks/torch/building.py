"""Models from factories, each from its own seed; and the generator that loaders shuffle with."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelfleet.errors import InputError
from modelfleet.frameworks.torch.extra import difference, extra_states, is_extra, set_extra_states
from modelfleet.frameworks.weights import Spec, mismatch
from modelfleet.trees import leaves


@contextmanager
def seeding(seed: int) -> Iterator[None]:
    """Seed torch's generators for a while; then they are as they were."""
    with torch.random.fork_rng():
        # torch.manual_seed notes the call stack for devices that may come later: half the time of a small model.
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Have torch compute as it does by default, whatever contexts a verb was called in.

    Threads and worker processes do not see these; so it must not matter that lanes of this thread would.
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
    """Whether it is a torch model."""
    return isinstance(value, nn.Module)


def check_model(model: nn.Module, name: str) -> None:
    """Refuse a model whose weights are not there yet."""
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
    """A model of its own with the same weights; what it keeps of a forward pass comes without its graph."""
    kept = (t for module in model.modules() for value in vars(module).values() for t in leaves(value))
    memo = {id(t): t.detach().clone() for t in kept if isinstance(t, Tensor) and not t.is_leaf}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # a model may hold anything, a lock or an open file too
        raise InputError(
            f"a {type(model).__name__} can't be copied: {error}. Give its class a __deepcopy__, or build another "
            f"model and add that."
        ) from error


def randomness() -> Tensor:
    """The state of the generator that torch's loaders shuffle with."""
    return torch.get_rng_state()


def restore_randomness(state: Tensor) -> None:
    """Put that generator back into a state."""
    torch.set_rng_state(state)


def weights_key(model: nn.Module) -> tuple[Any, ...]:
    """What models must have in common for their weights to be stacked in one file."""
    return tuple((name, tuple(t.shape), t.dtype) for name, t in _weights(model).items())


def stacked_weights(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The weights of models of one key, `(member, …)` each."""
    own = [_weights(model) for model in models]
    return {name: torch.stack([tensors[name].detach().cpu() for tensors in own]) for name in own[0]}


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> str | None:
    """Copy weights into a model; gives the first thing that does not fit instead, if there is one."""
    own = _tensors(model)
    wrong = mismatch(_specs(own), _specs({name: t for name, t in tensors.items() if not is_extra(name)}))
    wrong = wrong or difference(model, tensors)
    if wrong is not None:
        return wrong
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    set_extra_states(model, tensors)
    return None


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {**_tensors(model), **extra_states(model)}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    # Every parameter once, tied ones too, and the buffers that a state_dict would keep.
    kept = set(model.state_dict(keep_vars=True))
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


def _specs(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    return {name: Spec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
