"""Keras's callbacks in a fit of a fleet: every Keras member has a copy of its own."""

import copy
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import keras
import numpy as np
from keras import callbacks

from modelfleet.errors import InputError

_PATHS = ("filepath", "filename", "log_dir")
_UNCALLED = (  # a fleet's steps come several in a call, and for many members at once
    *("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"),
    *("on_test_begin", "on_test_end", "on_test_batch_begin", "on_test_batch_end"),
)
_BLIND = (callbacks.CSVLogger, callbacks.History, callbacks.TerminateOnNaN)  # they do not look at the model
_READERS = (callbacks.ModelCheckpoint,)  # they do not change it


def wrap(callback: callbacks.Callback) -> "PerMember":
    """A callback of Keras as one of modelfleet's."""
    if isinstance(callback, callbacks.BackupAndRestore):
        raise InputError(
            "BackupAndRestore is of one model's fit. Use modelfleet.Checkpoint, which keeps all members."
        )
    for hook in _UNCALLED:
        own = getattr(type(callback), hook) is not getattr(callbacks.Callback, hook) or hook in vars(callback)
        # Members whose numbers went bad are set aside anyway; a checkpoint per epoch has nothing to do per batch.
        idle = isinstance(callback, callbacks.TerminateOnNaN) or (
            isinstance(callback, callbacks.ModelCheckpoint) and callback.save_freq == "epoch"
        )
        if own and not idle:
            raise InputError(
                f"{type(callback).__name__} has a {hook}, which a fleet does not call: it takes many steps of "
                f"many members at once. Use on_epoch_begin and on_epoch_end, or a modelfleet.Callback."
            )
    return PerMember(callback)


class PerMember:
    """A callback of Keras, copied for every Keras member (see `modelfleet.Callback`).

    A copy sees its member's model with the weights and the optimizer of this moment, and may change both.
    """

    together = False
    wants_steps = False

    def __init__(self, callback: callbacks.Callback) -> None:
        self._callback = callback
        self._copies: dict[str, Any] = {}
        self._remembered: dict[str, Any] = {}
        self._weights: dict[str, Any] = {}

    def on_fit_start(self, run: Any) -> None:
        """Make the copies, and begin the first epoch."""
        self._copies = {name: self._copy(name) for name in run.active if run.framework(name).NAME == "keras"}
        for name, own in self._copies.items():
            own.set_params({"verbose": 0, "epochs": run.epochs_of(name), "steps": None})
            with_model = self._synced(run, name)
            own.set_model(with_model)
            with_model.stop_training = False
            if run.epoch and hasattr(own, "append"):
                own.append = True  # a resumed run goes on in its file
            own.on_train_begin()
            self._restore(name, own)
            own.on_epoch_begin(run.epoch)
            self._taken(run, name)

    def on_step_end(self, run: Any) -> None:
        """Nothing: `wants_steps` is False."""

    def on_epoch_end(self, run: Any) -> None:
        """End the epoch of those that took part in it, and begin their next."""
        for name in run.active:
            if name not in self._copies:
                continue
            own, recorded = self._copies[name], run.history[name]
            epoch = max(map(len, recorded.values())) - 1
            logs = {key: series[-1] for key, series in recorded.items()}
            known = dict(logs)
            model = self._synced(run, name)
            own.on_epoch_end(epoch, logs)
            for key, value in logs.items():  # what it noted, such as the learning rate, belongs to the history
                if key not in known or value is not known[key]:
                    recorded.setdefault(key, [math.nan] * (epoch + 1))[-1] = float(value)
            if model.stop_training:
                run.stop(name, f"stopped by {type(own).__name__}")
            elif epoch + 1 < run.epochs_of(name):
                own.on_epoch_begin(epoch + 1)
            self._taken(run, name)

    def on_fit_end(self, run: Any) -> None:
        """End the training of every copy."""
        for name, own in self._copies.items():
            self._synced(run, name)
            own.on_train_end()
            self._taken(run, name)

    def state(self) -> dict[str, Any]:
        """What the copies remember, as far as JSON can hold it."""
        return {name: _plain(own) for name, own in self._copies.items()}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
        self._remembered = dict(state)

    def arrays(self) -> dict[str, Any]:
        """The best weights that copies of EarlyStopping hold."""
        found = {name: getattr(own, "best_weights", None) for name, own in self._copies.items()}
        return {
            name: {"best": {f"{index:03}": np.asarray(array) for index, array in enumerate(weights)}}
            for name, weights in found.items()
            if weights is not None
        }

    def restore_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Take back what `arrays` gave."""
        self._weights = dict(arrays)

    def _copy(self, name: str) -> Any:
        own = copy.deepcopy(self._callback)
        for attribute in _PATHS:
            path = getattr(own, attribute, None)
            if isinstance(path, str):
                setattr(own, attribute, own_path(path, name))
        return own

    def _restore(self, name: str, own: Any) -> None:
        for key, value in self._remembered.get(name, {}).items():
            setattr(own, key, value)
        if name in self._weights:
            best = self._weights[name]["best"]
            own.best_weights = [keras.ops.convert_to_numpy(best[key]) for key in sorted(best)]

    def _synced(self, run: Any, name: str) -> Any:
        return run.fleet[name] if self._is_blind() else run.sync(name)

    def _taken(self, run: Any, name: str) -> None:
        if not self._is_blind() and not isinstance(self._callback, _READERS):
            run.take(name)

    def _is_blind(self) -> bool:
        stopper = isinstance(self._callback, callbacks.EarlyStopping) and not self._callback.restore_best_weights
        return stopper or isinstance(self._callback, _BLIND)


def own_path(path: str, name: str) -> str:
    """A member's own path: with its name for "{name}", or else before the suffix."""
    text = name.replace("/", "_").replace("\\", "_").replace("{", "{{").replace("}", "}}")
    if "{name}" in path:
        return path.replace("{name}", text)
    suffix = ".weights.h5" if path.endswith(".weights.h5") else PurePath(path).suffix
    return f"{path.removesuffix(suffix)}-{text}{suffix}"


def _plain(own: Any) -> dict[str, Any]:
    """The attributes of a callback that change: numbers, words and truths."""
    return {
        key: value.item() if isinstance(value, np.generic) else value
        for key, value in vars(own).items()
        if isinstance(value, bool | int | float | str | np.number | type(None)) and key not in ("_model", "model")
    }
