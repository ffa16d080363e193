"""Keras models in fleets, on the backend of this process. Exports the names of `adapter_protocol.Adapter`."""

from importlib import import_module

import keras
import numpy as np

from modelfleet.frameworks.batch_parts import weighted_inputs as inputs
from modelfleet.frameworks.keras import nodes, own_training
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
from modelfleet.frameworks.keras.class_weights import weighted
from modelfleet.frameworks.keras.cutting import pieces
from modelfleet.frameworks.keras.datasets import as_loader
from modelfleet.frameworks.keras.doctor_facts import version_note
from modelfleet.frameworks.keras.engine import leaves_models_alone, make_engine
from modelfleet.frameworks.keras.family import family
from modelfleet.frameworks.keras.recipe import compile, prepare
from modelfleet.frameworks.keras.replica import frozen, weight_bytes
from modelfleet.frameworks.keras.replica import replica as Replica
from modelfleet.frameworks.keras.scoring import compiled, score
from modelfleet.frameworks.keras.settings import settings, using
from modelfleet.frameworks.keras.structure import difference, signature, trained_twice
from modelfleet.frameworks.no_schedules import NoSchedules as Schedules

NAME = "keras"
PRECISIONS = ("float32",)  # any other comes from the model's dtype policy
COMPILES_FIRST = keras.backend.backend() == "jax"
GOES_ON = True  # with `steps_per_epoch`, an epoch of arrays continues where the last one stopped

_PARTS = {  # for each backend, the modules of its arrays, devices and files
    "jax": ("jax.arrays", "jax.devices", "files"),
    "tensorflow": ("tensorflow.arrays", "tensorflow.devices", "files"),
    "torch": ("torch.arrays", "torch.devices", "torch.files"),
}
arrays, _devices, files = (
    import_module(f"modelfleet.frameworks.{part}") for part in _PARTS[keras.backend.backend()]
)
accelerators, choose = _devices.accelerators, _devices.choose
hardware, memory, native = _devices.hardware, _devices.memory, _devices.native
if keras.backend.backend() == "torch":
    threads, use_threads = _devices.threads, _devices.use_threads
