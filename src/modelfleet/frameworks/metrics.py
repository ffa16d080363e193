"""Metrics of `compile`, as far as all frameworks have them in common: names, and functions of the user."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from modelfleet.errors import InputError
from modelfleet.types import MetricLike
from modelfleet.unknown_names import unknown

Function = Callable[[Any, Any], Any]
"""User's metric: a function of output and target that returns one number for the batch."""


_NOTE = "in the metric "


class Named(Protocol):
    """Metric with a name."""

    @property
    def name(self) -> str:
        """Return the metric's name in a history."""
        ...


Metric = TypeVar("Metric", bound=Named)


def resolve(
    metrics: Sequence[MetricLike],
    known: Mapping[str, Metric],
    top: Callable[[int], Metric],
    from_function: Callable[[Function, str], Metric],
) -> tuple[Metric, ...]:
    """Return the metrics of names ("accuracy", "top_5", …), functions, or mappings of names to functions.

    Args:
        metrics: The `metrics` of `compile`.
        known: The framework's metrics by name.
        top: Makes the metric that counts a row if its label is among the k best.
        from_function: Makes a metric of a function and its name.

    Raises:
        InputError: A name is unknown or taken, or a metric is neither a name nor a function.
    """
    if isinstance(metrics, str | Mapping) or callable(metrics):
        metrics = [metrics]
    found: list[Metric] = []
    for metric in metrics:
        if isinstance(metric, str):
            if (match := re.fullmatch(r"top_([1-9]\d*)", metric)) is not None:
                found.append(top(int(match[1])))
            elif metric in known:
                found.append(known[metric])
            else:
                raise unknown("metric", metric, [*known, "top_5"])
            continue
        own_name = getattr(metric, "__name__", type(metric).__name__)
        named = metric.items() if isinstance(metric, Mapping) else [(own_name, metric)]
        for name, function in named:
            if not callable(function):
                raise InputError(
                    f"the metric {name!r} is a {type(function).__name__}. Pass a name or a function of output "
                    f"and target."
                )
            found.append(from_function(function, name))
    taken = {"loss"}  # every history has a loss
    for metric in found:
        if metric.name in taken:
            raise InputError(
                f"there are two metrics named {metric.name!r}. Names are unique; to give a function another "
                f'one, pass {{"name": function}}.'
            )
        taken.add(metric.name)
    return tuple(found)


@contextmanager
def naming_metric(name: str) -> Iterator[None]:
    """Note the metric's name on any error of its function, for `metric_of`. The error is raised unchanged."""
    try:
        yield
    except Exception as error:
        note_metric(error, name)
        raise


def note_metric(error: Exception, name: str) -> None:
    """Note on an error which metric raised it."""
    error.add_note(f"{_NOTE}{name!r}")


def metric_of(error: Exception) -> str | None:
    """Return the quoted name of the metric whose function raised an error; None if none did."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)]
    return notes[0].removeprefix(_NOTE) if notes else None


def not_one_number(name: str, shape: Sequence[int]) -> InputError:
    """Return the error for a user's metric that gave more than one number for a batch."""
    return InputError(f"the metric {name!r} gave {tuple(shape)}; expected one number for the batch.")


def wrong_shapes(name: str, output: Sequence[int], target: Sequence[int], scores: str) -> InputError:
    """Return the error for shapes that a metric of classes can't compare. `scores` names the axes of an output."""
    return InputError(
        f"{name} can't compare an output {tuple(output)} with a target {tuple(target)}. It takes scores {scores} "
        f"with class indices (row, …) or one-hot targets, or one logit with 0 and 1."
    )


def too_few_classes(k: int, classes: int) -> InputError:
    """Return the error for top_k of a model with fewer than k classes."""
    return InputError(f"top_{k} needs at least {k} classes, but the model gives {classes}.")
