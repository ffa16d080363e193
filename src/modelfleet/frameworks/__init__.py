"""Frameworks: the list of adapters, and which one a model belongs to.

Each adapter is a package of the same module names, and the only place that knows its framework.
"""

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from modelfleet.devices import find_kinds_by
from modelfleet.errors import InputError, MissingExtraError
from modelfleet.frameworks.adapter_protocol import Adapter
from modelfleet.types import Model


@dataclass(frozen=True)
class AdapterEntry:
    """Describes an adapter without importing its framework."""

    packages: Mapping[str, str]
    """Packages that it needs, which the extra of its name installs, and their purposes for `modelfleet doctor`."""
    model_packages: tuple[str, ...]
    """Packages that define the classes of its models."""
    forkable: bool = False
    """True if a process may import the framework and fork then. Most start threads, or read the environment."""


# The only list of frameworks. The order matters: a Keras model is also a torch module or a tf.Module, depending on
# its backend.
ADAPTERS: dict[str, AdapterEntry] = {
    "keras": AdapterEntry({"keras": "fleets and replicas of Keras models"}, ("keras",)),
    "tensorflow": AdapterEntry({"tensorflow": "Keras on TensorFlow, SavedModels"}, ("tensorflow",)),
    "jax": AdapterEntry(
        {
            "jax": "fleets and replicas of JAX models",
            "flax": "JAX models: Flax NNX modules",
            "optax": "optimizers of JAX models",
        },
        ("jax", "flax"),
    ),
    "torch": AdapterEntry({"torch": "fleets and replicas of torch models"}, ("torch",), forkable=True),
}
# Modules whose functions and classes may be imported because a folder names them: they only compute.
TRUSTED = (
    "torch.optim",
    "torch.nn.functional",
    "optax",
    "keras.src.optimizers",
    "modelfleet.frameworks.torch.schedules",
)


def adapter_of(model: Model, name: str) -> Adapter:
    """Return the adapter for a member's model, by the framework of its class.

    Raises:
        InputError: No framework knows the model.
    """
    for framework in frameworks_of(model):
        found = adapter(framework)
        if found.is_model(model):
            return found
    if isinstance(model, type):
        raise InputError(
            f"member {name!r} is the class {model.__name__}, expected a model. Call it: {model.__name__}(...)."
        )
    raise InputError(
        f"member {name!r} is a {type(model).__module__}.{type(model).__qualname__}, which is not a model that "
        f"modelfleet can run. Give a torch.nn.Module, a keras.Model, a flax.nnx.Module, a (params, apply) pair "
        f"of JAX, or, to predict only, a tf.Module, a tf.function or a loaded SavedModel. Plain functions "
        f"and models with a `predict`, such as scikit-learn's, can't be trained here: mf.map and mf.Replicas take "
        f"them."
    )


def is_model(value: object) -> bool:
    """Return True if a framework knows a value as a model."""
    return any(adapter(framework).is_model(value) for framework in frameworks_of(value))


def frameworks_of(model: Model) -> list[str]:
    """Return the frameworks that a model may belong to, the most specific first."""
    if isinstance(model, tuple) and len(model) == 2 and callable(model[1]):
        return ["jax"]
    roots = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    return [framework for framework, entry in ADAPTERS.items() if roots.intersection(entry.model_packages)]


def adapter(framework: str) -> Any:
    """Return the adapter of a framework by name. Imports the framework.

    Raises:
        MissingExtraError: A package that the adapter needs is not installed.
    """
    try:
        return import_module(f"modelfleet.frameworks.{framework}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((name for name, entry in ADAPTERS.items() if package in entry.packages), None)
        if extra is None:
            raise
        raise MissingExtraError(package, extra, f"a fleet of {framework} models") from error


def _kinds_of_accelerators() -> set[str]:
    return {device.kind for found in imported_adapters() for device in found.accelerators()}


find_kinds_by(_kinds_of_accelerators)


def imported_adapters() -> list[Any]:
    """Return the adapters of the frameworks that this process has imported."""
    found = []
    for name in ADAPTERS:
        if name in sys.modules:
            with suppress(MissingExtraError):  # a package that its adapter needs is missing
                found.append(adapter(name))
    return found
