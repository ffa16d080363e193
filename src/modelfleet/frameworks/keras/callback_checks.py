"""Refuses callbacks of Keras that a fleet can't call as Keras's own fit does.

A fleet takes many steps of many members in one call, so it has no moment before or after a single batch. It calls
what Keras calls by epoch: `on_train_begin`, `on_epoch_begin`, `on_test_end`, `on_epoch_end` and `on_train_end`.
"""

from importlib.util import find_spec

from keras import callbacks

from modelfleet.errors import InputError

TRAIN_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
TEST_HOOKS = ("on_test_begin", "on_test_batch_begin", "on_test_batch_end")
"""Hooks of a validation that come before its end. Keras calls them only if there are validation data."""

_REPLACEMENTS: dict[type[callbacks.Callback], str] = {
    callbacks.BackupAndRestore: (
        "BackupAndRestore works with one model's fit. Use modelfleet.Checkpoint, which keeps all members."
    ),
    callbacks.CallbackList: (
        "a CallbackList belongs to one model's fit. Give the callbacks themselves: callbacks=its.callbacks."
    ),
    callbacks.ProgbarLogger: (
        "ProgbarLogger shows the batches of one model. Leave it out: fleet.fit(progress=True) shows all members."
    ),
}
_BY_EPOCH: dict[type[callbacks.Callback], dict[str, tuple[object, str]]] = {
    # Keras's own callbacks whose batch hooks do nothing, if these attributes have these values.
    callbacks.ModelCheckpoint: {"save_freq": ("epoch", 'save_freq="epoch"')},
    callbacks.OrbaxCheckpoint: {"save_freq": ("epoch", 'save_freq="epoch"')},
    callbacks.TensorBoard: {
        "update_freq": ("epoch", 'update_freq="epoch"'),
        "_should_trace": (False, "profile_batch=0"),
    },
    callbacks.TerminateOnNaN: {},  # a fleet sets members with bad numbers aside itself
}


def refuse_uncalled(callback: callbacks.Callback) -> None:
    """Raise InputError if a callback needs something that no fleet has, such as a moment after each batch."""
    for kind, sentence in _REPLACEMENTS.items():
        if isinstance(callback, kind):
            raise InputError(sentence)
    if isinstance(callback, callbacks.TerminateOnNaN) and callback.raise_error:
        raise InputError(
            "TerminateOnNaN(raise_error=True) ends a fit with an error, but the other members of a fleet continue."
            " Leave raise_error out: a member with bad numbers stops, and is named in history.failed."
        )
    if isinstance(callback, callbacks.TensorBoard):
        for package in ("tensorflow", "tensorboard"):
            if find_spec(package) is None:
                raise InputError(f"TensorBoard needs the package {package}: pip install {package}.")
    for kind, settings in _BY_EPOCH.items():
        for attribute, (expected, advice) in settings.items():
            if isinstance(callback, kind) and getattr(callback, attribute) != expected:
                raise InputError(
                    f"this {_name(callback)} needs every batch, but a fleet takes many steps of many members at "
                    f"once. Use {advice}."
                )
    hook = _uncalled(callback, TRAIN_HOOKS)
    if hook is not None:
        raise InputError(
            f"{_name(callback)} has an {hook}, which a fleet does not call: it takes many steps of many members "
            f"at once. Use on_epoch_begin and on_epoch_end, or a modelfleet.Callback with an on_step_end."
        )


def refuse_uncalled_in_validation(callback: callbacks.Callback, name: str) -> None:
    """Raise InputError if a callback needs a moment before a validation ends, which a fleet does not have."""
    hook = _uncalled(callback, TEST_HOOKS)
    if hook is None:
        return
    if isinstance(callback, callbacks.SwapEMAWeights):
        raise InputError(
            f"{_name(callback)} has member {name!r} validated with averaged weights, but a fleet validates with "
            f"the weights that it trains. Leave out the validation data, and call fleet.evaluate after the fit: "
            f"it leaves the averaged weights in the models."
        )
    raise InputError(
        f"{_name(callback)} has an {hook}, which a fleet does not call: it validates member {name!r} together "
        f"with others. Use on_test_end or on_epoch_end, which have all values, or leave out the validation data."
    )


def _uncalled(callback: callbacks.Callback, hooks: tuple[str, ...]) -> str | None:
    """Return the first of these hooks that a callback has, unless it is one of Keras's that does nothing."""
    idle = (callbacks.Callback, *_BY_EPOCH)
    for hook in hooks:
        defined_by = next(kind for kind in type(callback).__mro__ if hook in vars(kind))
        if hook in vars(callback) or defined_by not in idle:
            return hook
    return None


def _name(callback: callbacks.Callback) -> str:
    return type(callback).__name__
