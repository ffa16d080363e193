"""TensorFlow's own models in fleets, which only predict. Exports the names of `adapter_protocol.Adapter`.

Keras models on TensorFlow belong to `modelfleet.frameworks.keras`, which trains them through `backend` here.
"""

from modelfleet.frameworks import files
from modelfleet.frameworks.batch_parts import inputs
from modelfleet.frameworks.no_schedules import NoSchedules as Schedules
from modelfleet.frameworks.tensorflow import arrays, nodes
from modelfleet.frameworks.tensorflow.building import (
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
from modelfleet.frameworks.tensorflow.devices import accelerators, choose, hardware, memory, native
from modelfleet.frameworks.tensorflow.engine import make_engine
from modelfleet.frameworks.tensorflow.recipe import compile, prepare
from modelfleet.frameworks.tensorflow.replica import replica as Replica
from modelfleet.frameworks.tensorflow.replica import weight_bytes
from modelfleet.frameworks.tensorflow.structure import difference, signature, trained_twice

NAME = "tensorflow"
PRECISIONS = ("float32",)
