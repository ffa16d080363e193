"""What `modelfleet doctor` asks of Keras alone."""

import keras


def backend() -> str:
    """The backend that Keras has in this process."""
    return keras.backend.backend()
