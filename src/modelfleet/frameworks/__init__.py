"""Frameworks. Each adapter is a package of the same module names, and the only place that knows its framework."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from modelfleet.errors import InputError, MissingExtraError, refuse_masked
from modelfleet.formatting import without_period
from modelfleet.frameworks.adapter_protocol import Adapter
from modelfleet.types import Model, Tensor


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
    for framework in _frameworks(model):
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


def _frameworks(model: Model) -> list[str]:
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


def build(factory: Callable[..., Model], arguments: Mapping[str, Any], seed: int, name: str) -> Model:
    """Return a member's model. Its initial weights depend on its seed alone; global generators are restored.

    A factory that takes a `seed` or, for Flax, `rngs` gets them from the member's seed, unless `arguments` has
    them.

    Raises:
        InputError: The factory does not take the arguments, or returns something that is not a model.
    """
    arguments = dict(arguments)
    signature = _signature(factory)
    parameters = () if signature is None else signature.parameters
    with ExitStack() as seeded:
        for framework in ADAPTERS:
            if framework in sys.modules:
                seeded.enter_context(adapter(framework).seeding(seed))
        if "seed" in parameters and "seed" not in arguments:
            arguments["seed"] = seed
        if "rngs" in parameters and "rngs" not in arguments:
            arguments["rngs"] = adapter("jax").rngs(seed)
        _check_keywords(signature, arguments, name)
        model = factory(**arguments)
    if not _frameworks(model):
        raise InputError(
            f"the factory returned a {type(model).__name__} for member {name!r}; expected a model. "
            f"A factory takes the keywords given to Fleet.build and returns a new model at every call."
        )
    return model


def _signature(factory: Callable[..., Any]) -> inspect.Signature | None:
    """Return a factory's signature, or None if it has none, like functions written in C."""
    try:
        if not isinstance(factory, type):
            return inspect.signature(factory)
        # For a class, use its __init__: the metaclass (of Flax) takes any arguments.
        _, *parameters = inspect.signature(factory.__init__).parameters.values()
        return inspect.Signature(parameters)
    except (TypeError, ValueError):
        return None


def _check_keywords(signature: inspect.Signature | None, arguments: Mapping[str, Any], name: str) -> None:
    if signature is None:
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        keywords = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "no keywords"
        raise InputError(
            f"member {name!r}: the factory can't be called with {keywords}: {without_period(error)}. "
            f"Give a factory that takes these keywords and requires no others."
        ) from error


def loaded() -> list[Any]:
    """Return the adapters of the frameworks that this process has imported."""
    found = []
    for name in ADAPTERS:
        if name in sys.modules:
            with suppress(MissingExtraError):  # a package that its adapter needs is missing
                found.append(adapter(name))
    return found


def settings(framework: str | None) -> dict[str, Mapping[str, Any]]:
    """Return the settings of a framework that change a model's numbers, by framework.

    If the framework is not known, return the settings of all frameworks that this process has imported.
    """
    adapters = [adapter(framework)] if framework in ADAPTERS else loaded()
    found = {one.NAME: getattr(one, "settings", dict)() for one in adapters}
    return {name: values for name, values in found.items() if values}


@contextmanager
def using(settings: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Apply settings of `settings()` within this context, in another process or thread."""
    with ExitStack() as stack:
        for name, own in settings.items():
            stack.enter_context(adapter(name).using(own))
        yield


@contextmanager
def computing() -> Iterator[None]:
    """Keep the memory that a step frees for the next step, and share the cores well, within this context."""
    if not _uses_torch():
        yield
        return
    with adapter("torch").keeping_pages(), adapter("torch").sharing_cores():
        yield


def undisturbed() -> AbstractContextManager[None]:
    """Undo the contexts that a verb was called in, such as `torch.no_grad`, within this context."""
    return adapter("torch").undisturbed() if _uses_torch() else nullcontext()


def _uses_torch() -> bool:
    return "modelfleet.frameworks.torch" in sys.modules


def reduced(value: Any) -> Any:
    """Return how to pickle a tensor by its NumPy array, or a Keras model; NotImplemented for other values."""
    root = type(value).__module__.partition(".")[0]
    framework = {"torch": "torch", "jaxlib": "jax"}.get(root)  # the class of JAX's arrays is in jaxlib
    if framework is not None and framework in sys.modules:
        return adapter(framework).arrays.reduced(value)
    models = sys.modules.get("modelfleet.frameworks.keras.replica")
    return NotImplemented if models is None else models.reduced(value)


def as_numpy(value: Tensor) -> np.ndarray:
    """Return an array of any framework and device as a NumPy array."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return adapter("torch").arrays.as_numpy(value)
    refuse_masked(value)
    return np.asarray(value)


def wrapped(callbacks: Sequence[Any]) -> Any:
    """Return callbacks of Keras as one callback of modelfleet, which calls them in the same order.

    Raises:
        InputError: A callback is neither modelfleet's nor Keras's.
    """
    for callback in callbacks:
        if "keras" not in {cls.__module__.partition(".")[0] for cls in type(callback).__mro__}:
            raise InputError(
                f"callbacks has a {type(callback).__module__}.{type(callback).__qualname__}. Give subclasses of "
                f"modelfleet.Callback, or callbacks of Keras."
            )
    return adapter("keras").wrap(callbacks)
