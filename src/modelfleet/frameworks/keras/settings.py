"""What a program sets in Keras and its backend that changes a model's numbers, for worker processes to set."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from modelfleet import frameworks

BACKENDS = ("jax", "torch")  # those that have settings


def settings() -> dict[str, Any]:
    """The settings that are not the defaults."""
    found: dict[str, Any] = _backend("settings", dict)()
    if keras.config.floatx() != "float32":
        found["floatx"] = keras.config.floatx()
    if keras.config.dtype_policy().name != keras.config.floatx():
        found["dtype_policy"] = keras.dtype_policies.serialize(keras.config.dtype_policy())
    return found


@contextmanager
def using(settings: Mapping[str, Any]) -> Iterator[None]:
    """Compute with what `settings` gave. In the process that gave it, nothing changes."""
    own = {name: value for name, value in settings.items() if name not in ("floatx", "dtype_policy")}
    before = keras.config.floatx()
    with ExitStack() as stack:
        if own:
            stack.enter_context(_backend("using", None)(own))
        if settings.get("floatx", before) != before:
            keras.config.set_floatx(settings["floatx"])
            stack.callback(keras.config.set_floatx, before)
        if "dtype_policy" in settings:  # of this thread alone
            stack.callback(keras.config.set_dtype_policy, keras.config.dtype_policy())
            keras.config.set_dtype_policy(keras.dtype_policies.deserialize(settings["dtype_policy"]))
        yield


def _backend(name: str, otherwise: Any) -> Any:
    """A function of the backend's own adapter."""
    backend = keras.backend.backend()
    return getattr(frameworks.adapter(backend), name) if backend in BACKENDS else otherwise
