"""Callbacks of Keras in a fleet's fit. Every Keras member has its own, called in Keras's order."""

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import keras
import numpy as np
from keras import callbacks

from modelfleet.errors import InputError
from modelfleet.frameworks.keras.plain import BACKEND, become_plain
from modelfleet.words import without_period

_PATHS = ("filepath", "filename", "log_dir")
_UNCALLED = (  # a fleet takes several steps of many members in one call
    *("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"),
    *("on_test_begin", "on_test_end", "on_test_batch_begin", "on_test_batch_end"),
)
_WITHOUT_MODEL = (callbacks.CSVLogger, callbacks.History, callbacks.TerminateOnNaN)  # they do not read the model
_READERS = (callbacks.ModelCheckpoint,)  # they do not change it


def wrap(given: Sequence[callbacks.Callback]) -> "PerMember":
    """Return all callbacks of Keras in a fit as one callback of modelfleet.

    Raises:
        InputError: A callback has hooks that a fleet does not call.
    """
    for callback in given:
        _check(callback)
    return PerMember(given)


def _check(callback: callbacks.Callback) -> None:
    if isinstance(callback, callbacks.BackupAndRestore):
        raise InputError(
            "BackupAndRestore works with one model's fit. Use modelfleet.Checkpoint, which keeps all members."
        )
    for hook in _UNCALLED:
        own = getattr(type(callback), hook) is not getattr(callbacks.Callback, hook) or hook in vars(callback)
        # A fleet stops members with bad numbers itself. A checkpoint per epoch does nothing per batch.
        idle = isinstance(callback, callbacks.TerminateOnNaN) or (
            isinstance(callback, callbacks.ModelCheckpoint) and callback.save_freq == "epoch"
        )
        if own and not idle:
            raise InputError(
                f"{type(callback).__name__} has a {hook}, which a fleet does not call: it takes many steps of "
                f"many members at once. Use on_epoch_begin and on_epoch_end, or a modelfleet.Callback."
            )


class PerMember:
    """Callbacks of Keras, for every Keras member on its own (see `modelfleet.Callback`).

    The first Keras member uses the given objects, the others use copies. Each given object has all of them in its
    `members`, by name. At each hook, a member's callbacks are called in the given order, as in Keras. They see
    their member's model with its current weights and optimizer, and may change both.
    """

    together = False
    wants_steps = False

    def __init__(self, given: Sequence[callbacks.Callback]) -> None:
        self._given = list(given)
        self._own: dict[str, list[Any]] = {}
        self._begun: dict[str, int] = {}  # the last epoch that has started
        self._noted: dict[str, list[str]] = {}  # metrics that callbacks have added to the history
        self._logs: dict[str, dict[str, float]] = {}
        self._paths: list[tuple[Any, str, str]] = []
        self._trained: dict[str, list[bool]] = {}
        self._remembered: dict[str, Any] = {}
        self._weights: dict[str, Any] = {}
        # The model needs to be up to date only for callbacks that read it.
        self._reads_model = not all(_ignores_model(callback) for callback in self._given)
        self._changes_model = not all(_ignores_model(one) or isinstance(one, _READERS) for one in self._given)

    @property
    def kinds(self) -> list[str]:
        """Return the classes' names, by which a resumed run is compared with its checkpoint."""
        return [type(callback).__name__ for callback in self._given]

    def on_fit_start(self, run: Any) -> None:
        """Give every member its callbacks, and begin the training and its first epoch."""
        names = [name for name in run.active if run.framework(name).NAME == "keras"]
        self._own = {name: [] for name in names}
        for callback in self._given:
            for name, own in _by_member(callback, names).items():
                self._own[name].append(own)
        for name, owns in self._own.items():
            model = self._synced(run, name)
            model.stop_training = False
            for own in owns:
                self._set_paths(own, name, alone=len(names) == 1)
                own.set_params({"verbose": 0, "epochs": run.epochs_of(name), "steps": run.steps_of(name)})
                own.set_model(model)
                if run.epoch > run.history.initial_epoch and hasattr(own, "append"):
                    own.append = True  # a resumed run appends to its file
            for own in owns:
                own.on_train_begin({})
            self._restore(name, owns)
            if self._begun.get(name) != run.epoch:  # otherwise it started before the checkpoint
                self._begin(name, run.epoch, model)
            self._taken(run, name, model)

    def on_step_end(self, run: Any) -> None:
        """Do nothing: `wants_steps` is False."""

    def on_epoch_end(self, run: Any) -> None:
        """End the epoch of the members that took part in it, and begin their next."""
        for name in run.active:
            if name not in self._own:
                continue
            recorded, noted = run.history[name], self._noted.setdefault(name, [])
            recorded_epochs = max(map(len, recorded.values()))
            epoch = run.history.initial_epoch + recorded_epochs - 1
            told = {key: series[-1] for key, series in recorded.items() if key not in noted}
            self._logs[name], logs = dict(told), dict(told)
            model, stopped_by = self._synced(run, name), None
            for own in self._own[name]:
                own.on_epoch_end(epoch, logs)
                if model.stop_training and stopped_by is None:
                    stopped_by = type(own).__name__
            for (
                key,
                value,
            ) in logs.items():  # callbacks may add values, such as the learning rate
                if key not in told or value is not told[key]:
                    recorded.setdefault(key, [math.nan] * recorded_epochs)[-1] = float(value)
                if key not in told and key not in noted:
                    noted.append(key)
            if stopped_by is not None:
                run.stop(name, f"stopped by {stopped_by}")
            elif epoch + 1 < run.epochs_of(name):
                self._begin(name, epoch + 1, model)
            self._taken(run, name, model, over=epoch + 1 >= run.epochs_of(name) or stopped_by is not None)

    def on_fit_end(self, run: Any) -> None:
        """End the training of every member."""
        for name, owns in self._own.items():
            model = self._synced(run, name)
            for own in owns:
                own.on_train_end(dict(self._logs.get(name, {})))
            self._taken(run, name, model, over=True)
        for own, attribute, path in self._paths:
            setattr(own, attribute, path)

    def state(self) -> dict[str, Any]:
        """Return what the members' callbacks remember, as far as JSON can hold it."""
        return {
            "callbacks": {name: [_plain(own) for own in owns] for name, owns in self._own.items()},
            "begun": dict(self._begun),
            "noted": dict(self._noted),
            "logs": dict(self._logs),
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self._remembered = dict(state["callbacks"])
        self._begun, self._noted = dict(state["begun"]), dict(state["noted"])
        self._logs = {name: dict(logs) for name, logs in state["logs"].items()}

    def arrays(self) -> dict[str, Any]:
        """Return the best weights that EarlyStopping holds."""
        found: dict[str, Any] = {}
        for name, owns in self._own.items():
            for number, own in enumerate(owns):
                if getattr(own, "best_weights", None) is not None:
                    # As tensors of the backend, which are all that its files take.
                    tensors = [keras.ops.convert_to_tensor(array) for array in own.best_weights]
                    best = {f"{index:03}": tensor for index, tensor in enumerate(tensors)}
                    found.setdefault(name, {})[f"{number:03}"] = best
        return found

    def restore_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Restore the result of `arrays`."""
        self._weights = dict(arrays)

    def _begin(self, name: str, epoch: int, model: Any) -> None:
        for own in self._own[name]:
            own.on_epoch_begin(epoch, {})
        self._begun[name] = epoch
        if model.stop_training:
            raise InputError(
                f"a callback set stop_training of member {name!r} before epoch {epoch + 1}. Keras would end that "
                f"epoch after one batch, but a fleet trains whole epochs. Set it in on_epoch_end."
            )

    def _restore(self, name: str, owns: Sequence[Any]) -> None:
        for own, remembered in zip(owns, self._remembered.get(name, ()), strict=False):
            for key, value in remembered.items():
                setattr(own, key, value)
        for number, best in self._weights.get(name, {}).items():
            owns[int(number)].best_weights = [keras.ops.convert_to_numpy(best[key]) for key in sorted(best)]

    def _set_paths(self, own: Any, name: str, *, alone: bool) -> None:
        """Give a member's callback its own paths for the duration of the fit."""
        for attribute in _PATHS:
            path = getattr(own, attribute, None)
            if isinstance(path, str) and (not alone or "{name}" in path):
                self._paths.append((own, attribute, path))
                setattr(own, attribute, own_path(path, name))

    def _synced(self, run: Any, name: str) -> Any:
        model = run.sync(name) if self._reads_model else run.fleet[name]
        self._trained[name] = _trained(model)
        return model

    def _taken(self, run: Any, name: str, model: Any, *, over: bool = False) -> None:
        if not self._changes_model:
            return
        if self._trained[name] != _trained(model) and not over:
            _refreeze(run, name, model)
        run.take(name)


def _by_member(callback: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return each member's callback: the one of an earlier fit, the given object, or a copy of it."""
    before: dict[str, Any] = vars(callback).get("members", {})
    found = {name: before[name] for name in names if name in before}
    given = any(own is callback for own in found.values())
    if names and not given and (len(names) == 1 or names[0] not in found):
        found[names[0]] = callback
    # The model of an earlier fit and the other members' copies are not copied.
    left = (vars(callback).get("_model"), before)
    for name in names:
        if name in found:
            continue
        try:
            found[name] = copy.deepcopy(callback, {id(one): one for one in left if one is not None})
        except Exception as error:  # an attribute may raise anything
            raise InputError(
                f"{type(callback).__name__} can't be copied for member {name!r}: {without_period(error)}. "
                f"Every Keras member needs a callback of its own. Give the class a __deepcopy__, or use a "
                f"modelfleet.Callback."
            ) from error
        vars(found[name]).pop("members", None)
    callback.members = {**before, **found}
    return {name: found[name] for name in names}


def _trained(model: Any) -> list[bool]:
    """Return which layers and weights are trained."""
    return [one.trainable for one in (*model._flatten_layers(), *model.variables)]


def _refreeze(run: Any, name: str, model: Any) -> None:
    """Do what Keras does after a callback has set `trainable`, which depends on the backend.

    On TensorFlow, a traced step does not change until the next compile. On torch, the change applies at once. On
    JAX, Keras's own fit raises.
    """
    if BACKEND == "tensorflow" and int(model.optimizer.iterations) > 0:
        return
    what = f"a callback set trainable in the model of member {name!r} in the middle of a fit"
    between = "Set it between two fits, and compile the model again"
    if BACKEND == "jax":
        raise InputError(f"{what}, which Keras on JAX can't do. {between}.")
    lane = run.lane_here(name)
    if lane is None or lane.width > 1:
        raise InputError(f'{what}. Fused members can\'t. {between}, or use strategy="interleaved".')
    become_plain(lane.engine, lane.members, "a callback set trainable")
    model.reset_metrics()


def _ignores_model(callback: Any) -> bool:
    stopper = type(callback) is callbacks.EarlyStopping and not callback.restore_best_weights
    return stopper or type(callback) in _WITHOUT_MODEL


def own_path(path: str, name: str) -> str:
    """Return a member's own path: with its name for "{name}", or else before the suffix."""
    text = name.replace("/", "_").replace("\\", "_").replace("{", "{{").replace("}", "}}")
    if "{name}" in path:
        return path.replace("{name}", text)
    suffix = ".weights.h5" if path.endswith(".weights.h5") else PurePath(path).suffix
    return f"{path.removesuffix(suffix)}-{text}{suffix}"


def _plain(own: Any) -> dict[str, Any]:
    """Return the attributes of a callback that JSON can hold: numbers, strings and booleans."""
    return {
        key: value.item() if isinstance(value, np.generic) else value
        for key, value in vars(own).items()
        if isinstance(value, bool | int | float | str | np.number | type(None))
        and key not in ("_model", "model", *_PATHS)
    }
