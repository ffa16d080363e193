"""What `compile(metrics=...)` may hold, whatever the framework."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from modelfleet.errors import InputError

Metric = TypeVar("Metric")


def listed(
    metrics: Sequence[Any], named: Callable[[str], Metric], of_function: Callable[[Any, str], Metric]
) -> tuple[Metric, ...]:
    """The metrics of names ("accuracy", "top_5", …), functions of output and target, or named functions.

    A framework says what a name means and what it makes of a function; its metrics have a `name`.
    """
    if isinstance(metrics, str | Mapping) or callable(metrics):
        metrics = [metrics]
    found: list[Any] = []
    for metric in metrics:
        if isinstance(metric, str):
            found.append(named(metric))
        elif isinstance(metric, Mapping):
            found += [of_function(function, name) for name, function in metric.items()]
        else:
            found.append(of_function(metric, getattr(metric, "__name__", type(metric).__name__)))
    taken = {"loss"}  # what every history has
    for metric in found:
        if metric.name in taken:
            raise InputError(
                f"there are two metrics named {metric.name!r}. Names are unique; to give a function another "
                f'one, pass {{"name": function}}.'
            )
        taken.add(metric.name)
    return tuple(found)
