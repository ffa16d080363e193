"""A Keras model's own train, test and predict functions, called on one batch as `fit` calls them."""

from contextlib import nullcontext
from typing import Literal

import keras
import numpy as np
from keras import ops, tree

from modelfleet.types import Model, NativeDevice, Tensor, Tree

BACKEND = keras.backend.backend()
FunctionName = Literal["train", "test", "predict"]

# The variables that each function takes and returns on JAX, by the names of `Model._get_jax_state`.
_JAX_STATE: dict[FunctionName, tuple[str, ...]] = {
    "train": ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables"),
    "test": ("trainable_variables", "non_trainable_variables", "metrics_variables"),
    "predict": ("trainable_variables", "non_trainable_variables"),
}


def call_own_function(model: Model, name: FunctionName, batch: Tree, device: NativeDevice) -> Tree:
    """Return the logs of a model's own train or test function, or the outputs of its predict function."""
    getattr(model, f"make_{name}_function")()
    function = getattr(model, f"{name}_function")
    try:
        if BACKEND == "jax":
            return _call_with_jax_state(model, name, as_tuple(batch))
        if BACKEND == "tensorflow":
            batch = tree.map_structure(_with_strings, batch)
        if BACKEND == "torch":
            (model.train if name == "train" else model.eval)()
        with keras.device(str(device)) if BACKEND == "torch" else nullcontext():
            return function([as_tuple(batch)])
    finally:
        if BACKEND == "torch":
            model.eval()


def _call_with_jax_state(model: Model, name: FunctionName, batch: Tree) -> Tree:
    # As `train_on_batch` does on JAX, but without its reset of the metrics.
    parts = _JAX_STATE[name]
    state = model._get_jax_state(**dict.fromkeys(parts, True))
    model._jax_state_synced = False
    try:
        found, state = getattr(model, f"{name}_function")(state, iter([batch]))
        model._jax_state = dict(zip(parts, state, strict=True))
        model.jax_state_sync()
    finally:
        model._jax_state_synced = True
    return found


def as_tuple(batch: Tree) -> tuple[Tree, ...]:
    """Return a batch as `train_step` takes it: (x,), (x, y) or (x, y, sample_weight)."""
    return tuple(batch) if isinstance(batch, list) else batch if isinstance(batch, tuple) else (batch,)


def evaluation_offset(batch: int) -> int:
    """Return the offset of a member's seed, modulo 2**63, for the draws of one batch of an evaluation."""
    return batch * 0x9E3779B97F4A7C15 % 2**63


def _with_strings(leaf: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """Return an array of strings as a tensor of TensorFlow, and any other array unchanged."""
    strings = isinstance(leaf, np.ndarray) and leaf.dtype.kind == "O"
    return ops.convert_to_tensor(leaf, dtype="string") if strings else leaf
