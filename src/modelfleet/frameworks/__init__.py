"""Frameworks: each adapter is a package of the same module names, the only place that knows its framework."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any

import numpy as np

from modelfleet.errors import InputError, MissingExtraError, refuse_masked
from modelfleet.frameworks.protocol import Adapter
from modelfleet.words import without_period

# In this order: a Keras model is a torch module, too, where torch is its backend, and a tf.Module elsewhere.
ADAPTERS = ("keras", "jax", "torch", "tensorflow")

_ROOTS = {"keras": "keras", "flax": "jax", "jax": "jax", "torch": "torch", "tensorflow": "tensorflow"}
# What an adapter imports, and the extra that brings it.
_EXTRAS = {
    "torch": "torch",
    "keras": "keras",
    "jax": "jax",
    "flax": "jax",
    "optax": "jax",
    "tensorflow": "tensorflow",
}


def adapter_of(model: Any, name: str) -> Adapter:
    """The adapter for a member's model, found by the framework its class comes from."""
    for framework in _frameworks(model):
        found = adapter(framework)
        if found.is_model(model):
            return found
    raise InputError(
        f"member {name!r} is a {type(model).__module__}.{type(model).__qualname__}, which is not a model that "
        f"modelfleet can run. Give a torch.nn.Module, a keras.Model, a flax.nnx.Module, a (params, apply) pair "
        f"of JAX, or, to predict only, a tf.Module, a tf.function or a loaded SavedModel. Plain functions and "
        f"models with a `predict`, as scikit-learn's, can't be trained here: mf.map and mf.Replicas take them."
    )


def _frameworks(model: Any) -> list[str]:
    """The frameworks that a model may be of, the likeliest first."""
    if isinstance(model, tuple) and len(model) == 2 and callable(model[1]):
        return ["jax"]
    roots = {_ROOTS.get(cls.__module__.partition(".")[0]) for cls in type(model).__mro__}
    return [framework for framework in ADAPTERS if framework in roots]


def adapter(framework: str) -> Any:
    """The adapter of a framework by its name; imports the framework."""
    try:
        return import_module(f"modelfleet.frameworks.{framework}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise MissingExtraError(package, _EXTRAS[package], f"a fleet of {framework} models") from error


def build(factory: Callable[..., Any], arguments: Mapping[str, Any], seed: int, name: str) -> Any:
    """A member's model. Its first weights depend on its seed alone; the caller's generators are left alone.

    A factory that takes a `seed` or, for Flax, `rngs` is given them from the member's seed if nobody else did.
    """
    arguments = dict(arguments)
    takes = _signature(factory)
    asked = () if takes is None else takes.parameters
    with ExitStack() as seeded:
        for framework in ADAPTERS:
            if framework in sys.modules:
                seeded.enter_context(adapter(framework).seeding(seed))
        if "seed" in asked and "seed" not in arguments:
            arguments["seed"] = seed
        if "rngs" in asked and "rngs" not in arguments:
            arguments["rngs"] = adapter("jax").rngs(seed)
        _check_keywords(takes, arguments, name)
        model = factory(**arguments)
    if not _frameworks(model):
        raise InputError(
            f"the factory returned a {type(model).__name__} for member {name!r}; expected a model. "
            f"A factory takes the keywords given to Fleet.build and returns a new model at every call."
        )
    return model


def _signature(factory: Callable[..., Any]) -> inspect.Signature | None:
    """What a factory takes; None if only calling it tells, as of one written in C."""
    try:
        if not isinstance(factory, type):
            return inspect.signature(factory)
        # Of a class, its __init__: a metaclass (Flax's) may take anything.
        _, *parameters = inspect.signature(factory.__init__).parameters.values()
        return inspect.Signature(parameters)
    except (TypeError, ValueError):
        return None


def _check_keywords(takes: inspect.Signature | None, arguments: Mapping[str, Any], name: str) -> None:
    if takes is None:
        return
    try:
        takes.bind(**arguments)
    except TypeError as error:
        keywords = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "no keywords"
        raise InputError(
            f"member {name!r}: the factory can't be called with {keywords}: {without_period(error)}. "
            f"Give a factory that takes these, and needs no others."
        ) from error


def loaded() -> list[Any]:
    """The adapters of the frameworks that this process has imported."""
    found = []
    for name in ADAPTERS:
        if name in sys.modules:
            with suppress(MissingExtraError):  # it is there, and what else our adapter would need is not
                found.append(adapter(name))
    return found


def settings(framework: str | None) -> dict[str, Mapping[str, Any]]:
    """What this program has set in a framework that changes its numbers; in all that it has imported, if none is
    known."""
    found = [adapter(framework)] if framework in ADAPTERS else loaded()
    own = {one.NAME: getattr(one, "settings", dict)() for one in found}
    return {name: values for name, values in own.items() if values}


@contextmanager
def using(settings: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Compute with what `settings` gave, in another process or thread."""
    with ExitStack() as stack:
        for name, own in settings.items():
            stack.enter_context(adapter(name).using(own))
        yield


@contextmanager
def computing() -> Iterator[None]:
    """Keep the memory that one step frees for the next one, until this is over."""
    with ExitStack() as stack:
        if "modelfleet.frameworks.torch" in sys.modules:
            stack.enter_context(adapter("torch").keeping_pages())
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Have frameworks compute as they do by default, whatever contexts a verb was called in."""
    with ExitStack() as stack:
        if "modelfleet.frameworks.torch" in sys.modules:
            stack.enter_context(adapter("torch").undisturbed())
        yield


def reduced(value: Any) -> Any:
    """How to pickle a framework's tensor by its NumPy array, or a model of Keras; NotImplemented for all else."""
    root = type(value).__module__.partition(".")[0]
    framework = {"torch": "torch", "jaxlib": "jax"}.get(root)  # JAX's arrays are of its part in C++
    if framework is not None and framework in sys.modules:
        return adapter(framework).arrays.reduced(value)
    models = sys.modules.get("modelfleet.frameworks.keras.frozen")
    return NotImplemented if models is None else models.reduced(value)


def as_numpy(value: Any) -> np.ndarray:
    """An array of any framework as NumPy's, wherever it is."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return adapter("torch").arrays.as_numpy(value)
    refuse_masked(value)
    return np.asarray(value)


def wrapped(callbacks: Sequence[Any]) -> Any:
    """A framework's own callbacks as one of modelfleet's, which keeps their order."""
    for callback in callbacks:
        if "keras" not in {cls.__module__.partition(".")[0] for cls in type(callback).__mro__}:
            raise InputError(
                f"callbacks hold a {type(callback).__module__}.{type(callback).__qualname__}. Give subclasses of "
                f"modelfleet.Callback, or callbacks of Keras."
            )
    return adapter("keras").wrap(callbacks)
