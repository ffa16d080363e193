"""Keras models in fleets, on the backend that Keras has in this process.

What the layers above use of Keras is named here.
"""

from importlib import import_module
from typing import Any

import keras

from modelfleet.frameworks.batches import weighted_inputs as inputs
from modelfleet.frameworks.keras.building import (
    check_model,
    copy_model,
    fill,
    is_model,
    randomness,
    restore_randomness,
    seeding,
    stacked_weights,
    weights_key,
)
from modelfleet.frameworks.keras.callbacks import wrap
from modelfleet.frameworks.keras.classes import weighted
from modelfleet.frameworks.keras.datasets import as_loader
from modelfleet.frameworks.keras.engine import backend_module, make_engine
from modelfleet.frameworks.keras.frozen import Frozen, frozen, weight_bytes
from modelfleet.frameworks.keras.recipe import compile, prepare
from modelfleet.frameworks.keras.schedules import Schedules
from modelfleet.frameworks.keras.settings import settings, using
from modelfleet.frameworks.keras.structure import difference, signature, trained_twice

NAME = "keras"
PRECISIONS = ("float32",)  # a model has its own dtype policy
GOES_ON = True  # with `steps_per_epoch`, an epoch of arrays goes on where the last one stopped

_PARTS = {  # whose arrays, devices and files each backend goes by
    "jax": ("jax.arrays", "jax.devices", "files"),
    "tensorflow": ("tensorflow.arrays", "tensorflow.devices", "files"),
    "torch": ("torch.arrays", "torch.devices", "torch.files"),
}
arrays, _devices, files = (
    import_module(f"modelfleet.frameworks.{part}") for part in _PARTS[keras.backend.backend()]
)
accelerators, choose = _devices.accelerators, _devices.choose
memory, native = _devices.memory, _devices.native
if keras.backend.backend() == "torch":
    threads, use_threads = _devices.threads, _devices.use_threads


def Replica(model: Any, device: Any, precision: str) -> Any:  # noqa: N802  (a class in other adapters)
    """Answers batches with a model that was `frozen`, here or where it came from."""
    return backend_module.replica(model.model if isinstance(model, Frozen) else model, device)


__all__ = [
    "GOES_ON",
    "NAME",
    "PRECISIONS",
    "Replica",
    "Schedules",
    "accelerators",
    "arrays",
    "as_loader",
    "check_model",
    "choose",
    "compile",
    "copy_model",
    "difference",
    "files",
    "fill",
    "frozen",
    "inputs",
    "is_model",
    "make_engine",
    "memory",
    "native",
    "prepare",
    "randomness",
    "restore_randomness",
    "seeding",
    "settings",
    "signature",
    "stacked_weights",
    "trained_twice",
    "using",
    "weight_bytes",
    "weighted",
    "weights_key",
    "wrap",
]
