"""Frameworks: each adapter is a package of the same module names, the only place that knows its framework."""

from importlib import import_module
from types import ModuleType
from typing import Any

from modelfleet.errors import InputError, MissingExtraError

ADAPTERS = ("torch",)


def adapter_of(model: Any, name: str) -> ModuleType:
    """The adapter for a member's model, found by the framework its class comes from."""
    roots = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    for framework in ADAPTERS:
        if framework in roots:
            return adapter(framework)
    raise InputError(
        f"member {name!r} is a {type(model).__module__}.{type(model).__qualname__}, which is not a model that "
        f"modelfleet can train. Give a torch.nn.Module."
    )


def adapter(framework: str) -> ModuleType:
    """The adapter of a framework by its name; imports the framework."""
    try:
        return import_module(f"modelfleet.frameworks.{framework}")
    except ModuleNotFoundError as error:
        if error.name != framework:
            raise
        raise MissingExtraError(framework, framework, f"a fleet of {framework} models") from error


def of_factory(factory: object) -> ModuleType:
    """The adapter for what a factory makes. Only torch models can be built as yet."""
    return adapter("torch")
