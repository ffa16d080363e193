"""Building members' models from a factory, each with its own seed."""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from modelfleet.errors import InputError
from modelfleet.formatting import without_period
from modelfleet.frameworks import ADAPTERS, adapter, frameworks_of, is_model
from modelfleet.types import Model


def build_model(factory: Callable[..., Model], arguments: Mapping[str, Any], seed: int, name: str) -> Model:
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
    if not frameworks_of(model):
        raise InputError(
            f"the factory returned a {type(model).__name__} for member {name!r}; expected a model. "
            f"A factory takes the keywords given to Fleet.build and returns a new model at every call."
        )
    return model


def check_factory(factory: object, advice: str = "") -> None:
    """Raise InputError if a factory is a model, or can't be called."""
    if is_made(factory):
        raise InputError(
            f"the factory is a model, a {type(factory).__name__}; expected a function that returns a new model at "
            f"every call.{advice}"
        )
    if not callable(factory):
        raise InputError(f"the factory is {factory!r}; expected a function that returns a new model.{advice}")


def list_models(models: object) -> list[Model]:
    """Return a sequence of models as a list. Raise InputError if it is one model, or no sequence."""
    if not isinstance(models, list | tuple) and is_model(models):
        raise InputError(
            f"models is one model, a {type(models).__name__}; expected a mapping from name to model, or a "
            f"sequence of models. Give [model] for a fleet of one, or use Fleet.build to make many. If its parts "
            f"are to be the members, give list(model)."
        )
    if isinstance(models, str | bytes) or not isinstance(models, Iterable):
        raise InputError(
            f"models is a {type(models).__name__}; give a mapping from name to model, or a sequence of models."
        )
    return list(models)


def is_made(value: object) -> bool:
    """Return True for a model. Its class is a factory, like any other function that makes models."""
    return not isinstance(value, type) and bool(frameworks_of(value))


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
