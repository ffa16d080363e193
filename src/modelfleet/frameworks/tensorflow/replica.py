"""TensorFlow's own models as they are, to be asked only: their weights stay in their variables."""

from typing import Any

import numpy as np
import tensorflow as tf

from modelfleet.frameworks import functional
from modelfleet.frameworks.tensorflow import arrays
from modelfleet.frameworks.tensorflow.backend import TensorFlowBackend
from modelfleet.frameworks.tensorflow.models import call_of


def replica(model: Any, device: str, precision: str) -> functional.Replica:
    """Answers batches with a model."""
    call = call_of(model)
    # TensorFlow itself converts nothing.
    double = {v.dtype for v in getattr(model, "variables", ()) if v.dtype.is_floating} == {tf.float64}

    def place(leaf: np.ndarray) -> Any:
        wide = leaf.astype(np.float64) if double and leaf.dtype.kind == "f" else leaf
        return arrays.place(wide, device, exact=double)

    return functional.Replica(lambda _, x: call(x), None, TensorFlowBackend(device), place)


def weight_bytes(model: Any) -> int:
    """What a model's weights take."""
    return sum(v.shape.num_elements() * v.dtype.size for v in getattr(model, "variables", ()))
