"""JAX models in fleets: Flax NNX modules and `(params, apply)` pairs.

Exports the names of `adapter_protocol.Adapter`.
"""

import os

from modelfleet.frameworks import files
from modelfleet.frameworks.batch_parts import inputs
from modelfleet.frameworks.jax import arrays
from modelfleet.frameworks.jax.building import (
    check_model,
    copy_model,
    fill,
    is_model,
    randomness,
    restore_randomness,
    rngs,
    seeding,
    stacked_weights,
    weights_key,
)
from modelfleet.frameworks.jax.devices import accelerators, choose, hardware, memory, native
from modelfleet.frameworks.jax.engine import make_engine
from modelfleet.frameworks.jax.lessons import CLASS_AXIS
from modelfleet.frameworks.jax.recipe import compile, prepare
from modelfleet.frameworks.jax.replica import replica as Replica
from modelfleet.frameworks.jax.replica import weight_bytes
from modelfleet.frameworks.jax.scoring import score
from modelfleet.frameworks.jax.settings import settings, using
from modelfleet.frameworks.jax.structure import difference, family, signature, trained_twice
from modelfleet.frameworks.jax.task import PRECISIONS
from modelfleet.frameworks.no_schedules import NoSchedules as Schedules

NAME = "jax"
COMPILES_FIRST = True

# JAX would take three quarters of a GPU's memory at its first use, which other programs may need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
