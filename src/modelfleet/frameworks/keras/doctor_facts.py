"""Facts about Keras for `modelfleet doctor`."""

import keras


def backend() -> str:
    """Return the backend that Keras has in this process."""
    return keras.backend.backend()
