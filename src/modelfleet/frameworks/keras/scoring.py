"""Loss and metrics of outputs that no single model gave, such as those of an ensemble."""

from collections.abc import Sequence

import keras
import numpy as np

from modelfleet.errors import InputError
from modelfleet.frameworks.keras.metrics import resolve
from modelfleet.types import LossLike, MetricLike, Model, Tensor, Tree


def score(
    model: Model, output: Tree, target: Tree, loss: LossLike, chosen: Sequence[MetricLike]
) -> dict[str, float]:
    """Return the loss, if there is one, and the metrics of outputs. See `Adapter` for the arguments.

    The outputs are evaluated as those of a model that returns its inputs.
    """
    if not isinstance(output, np.ndarray):
        raise InputError(
            "an ensemble of Keras models that return several arrays can't be evaluated. Call predict, and compare "
            "its arrays with the targets."
        )
    if output.dtype == np.float64:  # JAX has no float64 by default
        output = output.astype(keras.config.floatx())
    same = keras.Sequential(
        [keras.layers.Input(output.shape[1:], dtype=output.dtype.name), keras.layers.Identity()]
    )
    # Only on JAX does Keras evaluate a model that has no loss.
    same.compile(loss=_no_loss if loss is None else loss, metrics=resolve(chosen, loss))
    found = same.evaluate(output, target, batch_size=len(output), verbose=0, return_dict=True)
    return {name: float(value) for name, value in found.items() if name != "loss" or loss is not None}


def _no_loss(target: Tensor, output: Tensor) -> Tensor:
    return keras.ops.zeros(keras.ops.shape(output)[:1])


def compiled(model: Model) -> tuple[LossLike, Sequence[MetricLike]]:
    """Return the loss and the metrics that a model was compiled with."""
    if not model.compiled:
        return None, ()
    config = model._compile_config.config
    return config["loss"], config["metrics"] or ()
