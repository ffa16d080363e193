"""Masks of Keras, which hang on a layer's output and do not go over an edge."""

import keras
from keras.src.backend import get_keras_mask

from modelfleet.errors import InputError


def check_output(model: keras.Model, name: str) -> None:
    """Raise InputError if a model's output has a mask that the next layer, or the loss, would use."""
    try:
        outputs = model.outputs or []
    except (AttributeError, ValueError):  # a user's own class may declare none
        return
    if any(get_keras_mask(output) is not None for output in outputs):
        raise InputError(
            f"the output of node {name!r} has a mask (as from mask_zero=True), which goes neither over an edge "
            f"nor to a graph's loss, so the numbers would differ. Keep the layers that use the mask in this node, "
            f"up to one that ends it, such as a pooling layer."
        )
