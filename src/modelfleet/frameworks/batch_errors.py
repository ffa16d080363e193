"""Errors for a batch on which a member's model, loss or metric failed."""

from modelfleet.errors import FleetError, InputError
from modelfleet.frameworks.metrics import metric_of
from modelfleet.frameworks.user_code import line_of_error

_MISTAKES = (AttributeError, NameError, ImportError, NotImplementedError)  # of code, not of data


def batch_error(name: str, kind: str, shapes: str, error: Exception, *, memory: bool) -> FleetError:
    """Return the error to raise instead of the one that a model, a loss or a metric raised on a batch.

    Args:
        name: The member's name.
        kind: The model, in words.
        shapes: The shapes of the batch, in words.
        error: The error that was raised.
        memory: True if the error means that memory ran out. Then, as for an OSError, the data are not at fault.
    """
    reason = f"{type(error).__name__}: {error}".rstrip(".: ")
    if isinstance(error, InputError):
        return InputError(f"member {name!r}: {error}")
    if memory or isinstance(error, MemoryError):
        return FleetError(
            f"member {name!r}: there was not enough memory for a batch, {shapes} into {kind}: {reason}. Give this "
            f"process more memory, or use a smaller batch_size."
        )
    if isinstance(error, OSError):
        return FleetError(
            f"member {name!r}: a batch, {shapes} into {kind}, failed with an error of the system: {reason}. "
            f"Check the files that the model uses, the current folder (was it removed?) and the limits of this "
            f"process."
        )
    line = line_of_error(error)
    place = "" if line is None else f" at {line}"
    if (metric := metric_of(error)) is not None:
        return InputError(
            f"member {name!r}: the metric {metric} raised {reason}{place}, after {shapes} into {kind}. A metric "
            f"is a function of an output and a target that returns one number for the batch: change it, or leave "
            f"it out of compile."
        )
    if isinstance(error, _MISTAKES):
        return InputError(
            f"member {name!r}: {kind} raised {reason}{place}. This is a mistake in the code of the model, its "
            f"loss or a metric, not in the data: fix it there."
        )
    advice = "Check the shapes and dtypes of the data against what the model expects."
    if isinstance(error, TypeError) and shapes.count("(") > 2:
        advice = (
            "The batch holds more than (x, y), and all of it went into the model. To predict, give x or (x, y). "
            "To train, give (x, y), or compile with an objective, which takes any batch."
        )
    return InputError(
        f"member {name!r} can't take this batch: {shapes} into {kind} gave {reason}{place}. {advice}"
    )
