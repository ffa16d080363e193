"""Losses of Keras models by modelfleet's names, and the check of their labels."""

from collections.abc import Callable, Mapping

import keras
import numpy as np

from modelfleet.errors import InputError
from modelfleet.trees import leaves
from modelfleet.types import LossLike, Tree

# Names that Keras does not have. The model's output is logits.
LOSSES: Mapping[str, Callable[[], keras.Loss]] = {
    "cross_entropy": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "bce_with_logits": lambda: keras.losses.BinaryCrossentropy(from_logits=True),
    "binary_cross_entropy_with_logits": lambda: keras.losses.BinaryCrossentropy(from_logits=True),
    "bce": keras.losses.BinaryCrossentropy,
    "binary_cross_entropy": keras.losses.BinaryCrossentropy,
    "l1": keras.losses.MeanAbsoluteError,
    "huber": keras.losses.Huber,
    "smooth_l1": keras.losses.Huber,
}


def resolve(loss: LossLike) -> LossLike:
    """Return a loss, or nested losses for several outputs, with modelfleet's names replaced by Keras's objects."""
    if isinstance(loss, Mapping):
        return {key: resolve(value) for key, value in loss.items()}
    if isinstance(loss, list | tuple):
        return [resolve(value) for value in loss]
    return LOSSES[loss]() if isinstance(loss, str) and loss in LOSSES else loss


def label_check(
    model: keras.Model, output_shape: tuple[int, ...], whose: str = ""
) -> Callable[[Tree], None] | None:
    """Return a function that raises InputError for labels without an output; None if the loss takes no labels.

    Without the check, a device would silently compute nonsense from such labels.
    """
    loss = model.loss if model.compiled else None
    return label_check_of(loss, output_shape[-1], whose)


def label_check_of(loss: LossLike, classes: int, whose: str = "") -> Callable[[Tree], None] | None:
    """Return the function of `label_check` for a loss and a number of classes."""
    sparse = loss == "sparse_categorical_crossentropy" or isinstance(
        loss, keras.losses.SparseCategoricalCrossentropy
    )
    if not sparse or getattr(loss, "ignore_class", None) is not None:
        return None

    def check(targets: Tree) -> None:
        for target in leaves(targets)[:1]:
            labels = keras.ops.convert_to_numpy(target)
            wrong = (labels < 0) | (labels >= classes)
            if wrong.any():
                first = tuple(np.argwhere(wrong)[0])
                raise InputError(
                    f"{whose}the target in row {first[0]} is {labels[first]}, but the model has {classes} "
                    f"outputs, so that labels are 0 to {classes - 1}."
                )

    return check
