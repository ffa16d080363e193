"""What to tell when a member was tried on a batch and something was raised."""

from modelfleet.errors import FleetError, InputError


def batch_error(name: str, kind: str, shapes: str, error: Exception, *, memory: bool) -> FleetError:
    """The error to raise in the place of what a model of some kind, a loss or a metric raised on a batch.

    memory: whether it says that there is no more memory. The data are not to blame for that, nor for what the
        system refuses.
    """
    said = f"{type(error).__name__}: {error}".rstrip(".: ")
    if isinstance(error, InputError):
        return InputError(f"member {name!r}: {error}")
    if memory or isinstance(error, MemoryError):
        return FleetError(
            f"member {name!r}: there was not enough memory for a batch, {shapes} into {kind}: {said}. Give this "
            f"process more memory, or use a smaller batch_size."
        )
    if isinstance(error, OSError):
        return FleetError(
            f"member {name!r}: a batch, {shapes} into {kind}, could not be tried, as the system refused something"
            f": {said}. Look at the files that the model uses, at the current folder (was it removed?) and at the "
            f"limits of this process."
        )
    return InputError(
        f"member {name!r} can't take this batch: {shapes} into {kind} gave {said}. Check the shapes and dtypes of "
        f"the data against what the model expects."
    )
