"""Labels that a model has no output for: refused, as a device would compute nonsense from them in silence."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from modelfleet.errors import InputError
from modelfleet.trees import leaves


def label_check(
    model: keras.Model, output_shape: tuple[int, ...], whose: str = ""
) -> Callable[[Any], None] | None:
    """A function that refuses targets with labels out of range; None where the loss takes no labels."""
    loss = model.loss if model.compiled else None
    sparse = loss == "sparse_categorical_crossentropy" or isinstance(
        loss, keras.losses.SparseCategoricalCrossentropy
    )
    if not sparse or getattr(loss, "ignore_class", None) is not None:
        return None
    classes = output_shape[-1]

    def check(targets: Any) -> None:
        for target in leaves(targets)[:1]:
            labels = keras.ops.convert_to_numpy(target)
            wrong = (labels < 0) | (labels >= classes)
            if wrong.any():
                place = tuple(np.argwhere(wrong)[0])
                raise InputError(
                    f"{whose}the target in row {place[0]} is {labels[place]}, but the model has {classes} "
                    f"outputs, so that labels are 0 to {classes - 1}."
                )

    return check
