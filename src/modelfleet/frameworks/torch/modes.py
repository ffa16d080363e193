"""Training and evaluation mode of models: theirs for good, and ours for a step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn


def training_modes(model: nn.Module) -> dict[str, bool]:
    """Return the modes that a model was given in, by module: it is trained in them, whatever is set meanwhile.

    A model given in training mode is trained as it was given, with those of its parts that were set to evaluation
    left so (a frozen BatchNorm, say). One given in evaluation mode is trained as after `model.train()`, which says
    itself what it does: for that there are none.
    """
    if not model.training:
        return {}
    return {name: module.training for name, module in model.named_modules() if hasattr(module, "training")}


@contextmanager
def in_mode(model: nn.Module, *, train: bool, given: Mapping[str, bool] | None = None) -> Iterator[None]:
    """Put a model into training or evaluation mode for a while; `given` are its modes for training (`modes`)."""
    # A frozen program has no mode any more: it is in evaluation for good.
    before = [(module, module.training) for module in model.modules() if hasattr(module, "training")]
    if not train or not model.training:
        model.train(train)
    if train and given:
        for name, module in model.named_modules():
            if name in given:
                module.training = given[name]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def enter_training(model: nn.Module) -> None:
    """Let a model's own `train()` drop what it kept for evaluation, as it would before a plain loop."""
    if not model.training and any(type(module).train is not nn.Module.train for module in model.modules()):
        before = [(module, module.training) for module in model.modules()]
        model.train()
        for module, training in before:
            module.training = training
