"""Settings of JAX that change a model's numbers, so that worker processes and threads can apply them, too."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import jax


def settings() -> dict[str, Any]:
    """Return the settings of this thread that are not JAX's defaults."""
    config: Any = jax.config
    found: dict[str, Any] = {}
    if config.jax_enable_x64:
        found["x64"] = True
    if config.jax_default_matmul_precision is not None:
        found["matmul_precision"] = config.jax_default_matmul_precision
    return found


@contextmanager
def using(settings: Mapping[str, Any]) -> Iterator[None]:
    """Apply settings of `settings()` within this context, in this thread."""
    with ExitStack() as stack:
        stack.enter_context(jax.enable_x64(settings.get("x64", False)))
        if "matmul_precision" in settings:
            stack.enter_context(jax.default_matmul_precision(settings["matmul_precision"]))
        yield
