"""Training and evaluation mode of models: the modes they are trained in, and changes for a single step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn


def training_modes(model: nn.Module) -> dict[str, bool]:
    """Return the modes in which a model is trained, by module. Later changes of its modes do not count.

    A model in training mode is trained as it is: parts that are in evaluation mode (a frozen BatchNorm, for
    example) stay so. A model in evaluation mode is trained as after `model.train()`, which decides itself what it
    does. For such a model the result is empty.
    """
    if not model.training:
        return {}
    return {name: module.training for name, module in model.named_modules() if hasattr(module, "training")}


@contextmanager
def in_mode(model: nn.Module, *, train: bool, given: Mapping[str, bool] | None = None) -> Iterator[None]:
    """Context in which a model is in training or evaluation mode.

    Args:
        model: The model.
        train: True for training mode.
        given: The modes for training, as `training_modes` returns them.
    """
    before = _modes(model)
    if not train or not model.training:
        model.train(train)
    if train and given:
        for name, module in model.named_modules():
            if name in given:
                module.training = given[name]
    try:
        yield
    finally:
        _set_modes(before)


def enter_training(model: nn.Module) -> None:
    """Let a model's own `train()` drop what it kept for evaluation, as it would before a plain loop."""
    if not model.training and any(type(module).train is not nn.Module.train for module in model.modules()):
        before = _modes(model)
        model.train()
        _set_modes(before)


def _modes(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    # A frozen TorchScript module has no mode: it is in evaluation for good.
    return [(module, module.training) for module in model.modules() if hasattr(module, "training")]


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training
