"""Keras models in fleets, on the backend that Keras has in this process.

What the layers above use of Keras is named here.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import keras

from modelfleet.frameworks import protocol
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
from modelfleet.frameworks.keras.frozen import Frozen, frozen, weight_bytes
from modelfleet.frameworks.keras.plain import PlainEngine
from modelfleet.frameworks.keras.recipe import compile, prepare
from modelfleet.frameworks.keras.settings import settings, using
from modelfleet.frameworks.keras.structure import difference, signature, trained_twice
from modelfleet.frameworks.schedules import NoSchedules as Schedules
from modelfleet.members import Member

NAME = "keras"
PRECISIONS = ("float32",)  # a model has its own dtype policy
GOES_ON = True  # with `steps_per_epoch`, an epoch of arrays goes on where the last one stopped

_PARTS = {  # the engine of each backend, and whose arrays, devices and files it goes by
    "jax": ("keras.jax", "jax.arrays", "jax.devices", "files"),
    "tensorflow": ("keras.tensorflow", "tensorflow.arrays", "tensorflow.devices", "files"),
    "torch": ("keras.torch", "torch.arrays", "torch.devices", "torch.files"),
}
_engine, arrays, _devices, files = (
    import_module(f"modelfleet.frameworks.{part}") for part in _PARTS[keras.backend.backend()]
)
accelerators, choose = _devices.accelerators, _devices.choose
memory, native = _devices.memory, _devices.native
if keras.backend.backend() == "torch":
    threads, use_threads = _devices.threads, _devices.use_threads


def Engine(  # noqa: N802  (a class in other adapters)
    members: Sequence[Member],
    task: Any,
    columns: Mapping[str, Any],
    device: Any,
    *,
    fused: bool,
    programs: Any = None,
) -> protocol.Engine:
    """The engine of a lane: by the backend's programs, or for one member by the model's own functions."""
    if task.plain is not None:
        return PlainEngine(members, task, device)
    return _engine.Engine(members, task, columns, device, fused=fused, programs=programs)


def Replica(model: Any, device: Any, precision: str) -> Any:  # noqa: N802  (a class in other adapters)
    """Answers batches with a model that was `frozen`, here or where it came from."""
    return _engine.replica(model.model if isinstance(model, Frozen) else model, device)
