"""TensorFlow's own models that only predict. Their weights stay in their variables."""

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.composite_tensor import CompositeTensor

from modelfleet.errors import InputError
from modelfleet.frameworks import functional
from modelfleet.frameworks.tensorflow import arrays
from modelfleet.frameworks.tensorflow.backend import TensorFlowBackend
from modelfleet.frameworks.tensorflow.models import call_of
from modelfleet.trees import paths
from modelfleet.types import Model, Precision, Tree


def replica(model: Model, device: str, precision: Precision) -> functional.Replica:
    """Return a replica that answers batches with a model."""
    call = call_of(model)
    # TensorFlow itself casts no inputs.
    double = {v.dtype for v in getattr(model, "variables", ()) if v.dtype.is_floating} == {tf.float64}

    def place(leaf: np.ndarray) -> arrays.Array:
        wide = leaf.astype(np.float64) if double and leaf.dtype.kind == "f" else leaf
        return arrays.place(wide, device, exact=double)

    return functional.Replica(lambda _, x: dense(call(x)), None, TensorFlowBackend(device), place)


def dense(outputs: Tree) -> Tree:
    """Return the outputs of a model. Raises InputError unless all are dense tensors.

    A program would return the parts of a sparse or ragged tensor as separate outputs.
    """
    for path, leaf in paths(outputs):
        if isinstance(leaf, CompositeTensor):
            raise InputError(
                f"the model gave {f'{path!r} as ' if path else ''}a {type(leaf).__name__}; expected a dense one, "
                f"(row, …). Have the model return its .to_tensor(), or tf.sparse.to_dense of it."
            )
    return outputs


def weight_bytes(model: Model) -> int:
    """Return the size of a model's weights in bytes."""
    return sum(v.shape.num_elements() * v.dtype.size for v in getattr(model, "variables", ()))
