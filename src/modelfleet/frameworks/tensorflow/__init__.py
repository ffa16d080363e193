"""TensorFlow's own models in fleets, to predict. What the layers above use is named here.

Keras models on TensorFlow are Keras's (`modelfleet.frameworks.keras`), which trains them through `backend` here.
"""

from modelfleet.frameworks import files
from modelfleet.frameworks.batches import inputs
from modelfleet.frameworks.tensorflow import arrays
from modelfleet.frameworks.tensorflow.devices import accelerators, choose, memory, native
from modelfleet.frameworks.tensorflow.engine import make_engine
from modelfleet.frameworks.tensorflow.models import (
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
from modelfleet.frameworks.tensorflow.recipe import Schedules, compile, prepare
from modelfleet.frameworks.tensorflow.replica import replica as Replica
from modelfleet.frameworks.tensorflow.replica import weight_bytes
from modelfleet.frameworks.tensorflow.structure import difference, signature, trained_twice

NAME = "tensorflow"
PRECISIONS = ("float32",)

__all__ = [
    "NAME",
    "PRECISIONS",
    "Replica",
    "Schedules",
    "accelerators",
    "arrays",
    "check_model",
    "choose",
    "compile",
    "copy_model",
    "difference",
    "files",
    "fill",
    "inputs",
    "is_model",
    "make_engine",
    "memory",
    "native",
    "prepare",
    "randomness",
    "restore_randomness",
    "seeding",
    "signature",
    "stacked_weights",
    "trained_twice",
    "weight_bytes",
    "weights_key",
]
