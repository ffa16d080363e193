"""Facts about Keras for `modelfleet doctor`."""

import keras


def version_note() -> str:
    """Return the backend that Keras has in this process."""
    return f"backend {keras.backend.backend()}"
