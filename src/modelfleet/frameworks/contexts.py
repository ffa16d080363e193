"""Contexts to compute in: the settings of the frameworks, the memory and cores of this process."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from modelfleet.frameworks import ADAPTERS, adapter, imported_adapters


def current_settings(framework: str | None) -> dict[str, Mapping[str, Any]]:
    """Return the settings of a framework that change a model's numbers, by framework.

    If the framework is not known, return the settings of all frameworks that this process has imported.
    """
    adapters = [adapter(framework)] if framework in ADAPTERS else imported_adapters()
    found = {one.NAME: getattr(one, "settings", dict)() for one in adapters}
    return {name: values for name, values in found.items() if values}


@contextmanager
def using_settings(settings: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Apply settings of `current_settings()` within this context, in another process or thread."""
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


def without_callers_contexts() -> AbstractContextManager[None]:
    """Undo the contexts that a verb was called in, such as `torch.no_grad`, within this context."""
    return adapter("torch").without_callers_contexts() if _uses_torch() else nullcontext()


def _uses_torch() -> bool:
    return "modelfleet.frameworks.torch" in sys.modules
