"""TensorFlow's own models as they are, to be asked only: their weights stay in their variables."""

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.composite_tensor import CompositeTensor

from modelfleet.errors import InputError
from modelfleet.frameworks import functional
from modelfleet.frameworks.tensorflow import arrays
from modelfleet.frameworks.tensorflow.backend import TensorFlowBackend
from modelfleet.frameworks.tensorflow.models import call_of
from modelfleet.trees import paths


def replica(model: Any, device: str, precision: str) -> functional.Replica:
    """Answers batches with a model."""
    call = call_of(model)
    # TensorFlow itself converts nothing.
    double = {v.dtype for v in getattr(model, "variables", ()) if v.dtype.is_floating} == {tf.float64}

    def place(leaf: np.ndarray) -> Any:
        wide = leaf.astype(np.float64) if double and leaf.dtype.kind == "f" else leaf
        return arrays.place(wide, device, exact=double)

    return functional.Replica(lambda _, x: dense(call(x)), None, TensorFlowBackend(device), place)


def dense(outputs: Any) -> Any:
    """The outputs of a model, if all are plain tensors: a program would give the parts of others as if they were
    outputs of their own."""
    for path, leaf in paths(outputs):
        if isinstance(leaf, CompositeTensor):
            raise InputError(
                f"the model gave {f'{path!r} as ' if path else ''}a {type(leaf).__name__}; expected a dense one, "
                f"(row, …). Have the model return its .to_tensor(), or tf.sparse.to_dense of it."
            )
    return outputs


def weight_bytes(model: Any) -> int:
    """What a model's weights take."""
    return sum(v.shape.num_elements() * v.dtype.size for v in getattr(model, "variables", ()))
