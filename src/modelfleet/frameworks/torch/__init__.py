"""Torch models in fleets. What the layers above use of torch is named here."""

from modelfleet.frameworks.torch import arrays, files
from modelfleet.frameworks.torch.building import (
    build,
    check_model,
    copy_model,
    fill,
    randomness,
    restore_randomness,
    stacked_weights,
    weights_key,
)
from modelfleet.frameworks.torch.devices import choose, torch_device
from modelfleet.frameworks.torch.engine import Engine
from modelfleet.frameworks.torch.recipe import prepare
from modelfleet.frameworks.torch.schedules import Schedules
from modelfleet.frameworks.torch.state import REASONS
from modelfleet.frameworks.torch.structure import difference, signature, trained_twice
from modelfleet.frameworks.torch.tracing import CannotTraceError

NAME = "torch"

__all__ = [
    "NAME",
    "REASONS",
    "CannotTraceError",
    "Engine",
    "Schedules",
    "arrays",
    "build",
    "check_model",
    "choose",
    "copy_model",
    "difference",
    "files",
    "fill",
    "prepare",
    "randomness",
    "restore_randomness",
    "signature",
    "stacked_weights",
    "torch_device",
    "trained_twice",
    "weights_key",
]
