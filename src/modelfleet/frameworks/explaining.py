"""Errors for a batch on which a member's model, loss or metric failed."""

from modelfleet.errors import FleetError, InputError


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
            f"member {name!r}: a batch, {shapes} into {kind}, failed, as the system refused something: "
            f"{reason}. Look at the files that the model uses, at the current folder (was it removed?) and at "
            f"the limits of this process."
        )
    return InputError(
        f"member {name!r} can't take this batch: {shapes} into {kind} gave {reason}. Check the shapes and dtypes "
        f"of the data against what the model expects."
    )
