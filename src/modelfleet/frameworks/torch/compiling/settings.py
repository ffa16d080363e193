"""Settings of torch that compiled code depends on.

They may have been changed since this process began. So the compile process gets them, and what was compiled is
found again only under the same ones.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils import deterministic

from modelfleet.types import Json

_MATMUL = torch.backends.cuda.matmul


def _matmul_precision() -> str | None:
    # torch refuses to name one for all devices if they were set one by one.
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return None


def _set_deterministic(wanted: list[bool]) -> None:
    torch.use_deterministic_algorithms(wanted[0], warn_only=wanted[1])


def _deterministic() -> list[bool]:
    return [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()]


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Json], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


_SETTINGS: dict[str, tuple[Callable[[], Json], Callable[[Any], None]]] = {
    "default dtype": (
        lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda name: torch.set_default_dtype(getattr(torch, name)),
    ),
    "matmul precision": (_matmul_precision, lambda name: name and torch.set_float32_matmul_precision(name)),
    # After the one for all devices, which sets this one, too.
    "cuda matmul precision": _attribute(_MATMUL, "fp32_precision"),
    "float16 reduction": _attribute(_MATMUL, "allow_fp16_reduced_precision_reduction"),
    "bfloat16 reduction": _attribute(_MATMUL, "allow_bf16_reduced_precision_reduction"),
    "deterministic": (_deterministic, _set_deterministic),
    "fill uninitialized memory": _attribute(deterministic, "fill_uninitialized_memory"),
}


def _compiler() -> Any:
    """Return the options of torch's compiler, whose internals are used here: those of torch 2.13."""
    from torch._inductor import config

    return config


def present() -> dict[str, Json]:
    """Return the settings of this process, in JSON's types."""
    config = _compiler()

    found = {name: get() for name, (get, _) in _SETTINGS.items()}
    # What is left out does not change the code, or can't be sent.
    options = config._get_dict(ignored_prefixes=config._cache_config_ignore_prefix, readonly_values=True)
    changed = {name: value for name, value in options.items() if value != config._config[name].default}
    plain = {name: value for name, value in changed.items() if isinstance(value, bool | int | float | str)}
    return {**found, "compiler": plain}


def apply(settings: dict[str, Json]) -> None:
    """Give this process the settings that `present` returned in another one."""
    config = _compiler()

    for name, (get, change) in _SETTINGS.items():
        if get() != settings[name]:
            change(settings[name])
    for name, value in settings["compiler"].items():
        if getattr(config, name) != value:
            setattr(config, name, value)
