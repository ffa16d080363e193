"""Settings of Keras and its backend that change a model's numbers, so that workers can apply them, too."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType

import keras

BACKENDS = ("jax", "torch")  # backends that have settings


def settings() -> dict[str, object]:
    """Return the settings that are not the defaults."""
    backend = _backend()
    found: dict[str, object] = dict(backend.settings()) if backend is not None else {}
    if keras.config.floatx() != "float32":
        found["floatx"] = keras.config.floatx()
    if keras.config.dtype_policy().name != keras.config.floatx():
        found["dtype_policy"] = keras.dtype_policies.serialize(keras.config.dtype_policy())
    return found


@contextmanager
def using(settings: Mapping[str, object]) -> Iterator[None]:
    """Apply settings within this context. In the process that they came from, nothing changes."""
    own = {name: value for name, value in settings.items() if name not in ("floatx", "dtype_policy")}
    before = keras.config.floatx()
    with ExitStack() as stack:
        if own and (backend := _backend()) is not None:
            stack.enter_context(backend.using(own))
        if settings.get("floatx", before) != before:
            keras.config.set_floatx(settings["floatx"])
            stack.callback(keras.config.set_floatx, before)
        if "dtype_policy" in settings:  # it applies to this thread only
            stack.callback(keras.config.set_dtype_policy, keras.config.dtype_policy())
            keras.config.set_dtype_policy(keras.dtype_policies.deserialize(settings["dtype_policy"]))
        yield


def _backend() -> ModuleType | None:
    """Return the backend's own `settings` and `using`. None if it has no settings."""
    backend = keras.backend.backend()
    return import_module(f"modelfleet.frameworks.{backend}.settings") if backend in BACKENDS else None
