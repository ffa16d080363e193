"""Settings of Keras and its backend that change a model's numbers, so that workers can apply them, too."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from modelfleet import frameworks

BACKENDS = ("jax", "torch")  # backends that have settings


def settings() -> dict[str, Any]:
    """Return the settings that are not the defaults."""
    found: dict[str, Any] = _backend("settings", dict)()
    if keras.config.floatx() != "float32":
        found["floatx"] = keras.config.floatx()
    if keras.config.dtype_policy().name != keras.config.floatx():
        found["dtype_policy"] = keras.dtype_policies.serialize(keras.config.dtype_policy())
    return found


@contextmanager
def using(settings: Mapping[str, Any]) -> Iterator[None]:
    """Apply settings within this context. In the process that they came from, nothing changes."""
    own = {name: value for name, value in settings.items() if name not in ("floatx", "dtype_policy")}
    before = keras.config.floatx()
    with ExitStack() as stack:
        if own:
            stack.enter_context(_backend("using", None)(own))
        if settings.get("floatx", before) != before:
            keras.config.set_floatx(settings["floatx"])
            stack.callback(keras.config.set_floatx, before)
        if "dtype_policy" in settings:  # it applies to this thread only
            stack.callback(keras.config.set_dtype_policy, keras.config.dtype_policy())
            keras.config.set_dtype_policy(keras.dtype_policies.deserialize(settings["dtype_policy"]))
        yield


def _backend(name: str, otherwise: Any) -> Any:
    """Return a function of the backend's own adapter."""
    backend = keras.backend.backend()
    return getattr(frameworks.adapter(backend), name) if backend in BACKENDS else otherwise
