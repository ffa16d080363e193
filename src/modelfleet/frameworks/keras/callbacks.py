"""Callbacks of Keras in a fleet's fit. Every Keras member has its own, called in Keras's order."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import keras
from keras import callbacks

from modelfleet.errors import InputError
from modelfleet.frameworks.keras.callback_checks import refuse_uncalled, refuse_uncalled_in_validation
from modelfleet.frameworks.keras.callback_copies import OwnPaths, by_member, remembered
from modelfleet.frameworks.keras.plain import BACKEND, become_plain
from modelfleet.types import Json, Tensor

if TYPE_CHECKING:
    from modelfleet.fitting import Fit

Logs = dict[str, float]
Weights = dict[str, dict[str, Tensor]]
"""Best weights that a member's callbacks hold: by the callback's number, then by the weight's."""

_WITHOUT_MODEL = (  # they do not read the model
    *(callbacks.CSVLogger, callbacks.History, callbacks.RemoteMonitor, callbacks.TerminateOnNaN),
)
_READERS = (callbacks.ModelCheckpoint, callbacks.OrbaxCheckpoint, callbacks.TensorBoard)  # they do not change it


def wrap(given: Sequence[callbacks.Callback]) -> "PerMember":
    """Return all callbacks of Keras in a fit as one callback of modelfleet.

    Raises:
        InputError: A callback needs something that a fleet does not have, such as a moment after each batch.
    """
    for callback in given:
        refuse_uncalled(callback)
    return PerMember(given)


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
        self._own: dict[str, list[callbacks.Callback]] = {}
        self._begun: dict[str, int] = {}  # the last epoch that has started
        self._added: dict[str, list[str]] = {}  # metrics that callbacks have added to the history
        self._logs: dict[str, Logs] = {}
        self._paths = OwnPaths()
        self._trained: dict[str, list[bool]] = {}
        self._remembered: dict[str, list[dict[str, Json]]] = {}
        self._weights: dict[str, Weights] = {}
        # The model needs to be up to date only for callbacks that read it.
        self._reads_model = not all(_ignores_model(callback) for callback in self._given)
        self._changes_model = not all(_ignores_model(one) or type(one) in _READERS for one in self._given)

    @property
    def kinds(self) -> list[str]:
        """Return the classes' names, by which a resumed run is compared with its checkpoint."""
        return [type(callback).__name__ for callback in self._given]

    def on_fit_start(self, run: "Fit") -> None:
        """Give every member its callbacks, and begin the training and its first epoch."""
        names = [name for name in run.active if run.framework(name).NAME == "keras"]
        for name in names:
            for callback in self._given if run.validates(name) else ():
                refuse_uncalled_in_validation(callback, name)
        self._own = {name: [] for name in names}
        for callback in self._given:
            for name, own in by_member(callback, names).items():
                self._own[name].append(own)
        for name, owns in self._own.items():
            model = self._synced(run, name)
            model.stop_training = False
            for own in owns:
                self._paths.set(own, name, alone=len(names) == 1)
                own.set_params({"verbose": 0, "epochs": run.epochs_of(name), "steps": run.steps_of(name)})
                own.set_model(model)
                if run.epoch > run.history.initial_epoch and isinstance(own, callbacks.CSVLogger):
                    own.append = True  # a resumed run appends to its file
            for own in owns:
                own.on_train_begin({})
            self._restore(name, owns)
            if self._begun.get(name) != run.epoch:  # otherwise it started before the checkpoint
                self._begin(name, run.epoch, model)
            self._take(run, name, model)

    def on_step_end(self, run: "Fit") -> None:
        """Do nothing: `wants_steps` is False."""

    def on_epoch_end(self, run: "Fit") -> None:
        """End the epoch of the members that took part in it, and begin their next."""
        for name in run.active:
            if name in self._own:
                self._end_epoch(run, name)

    def on_fit_end(self, run: "Fit") -> None:
        """End the training of every member."""
        for name, owns in self._own.items():
            model = self._synced(run, name)
            for own in owns:
                own.on_train_end(dict(self._logs.get(name, {})))
                if isinstance(own, callbacks.EarlyStopping) and own.best_weights is not None:
                    run.history.kept[name] = own.best_epoch + 1  # it has restored the weights of that epoch
            self._take(run, name, model, over=True)
        self._paths.restore()

    def state(self) -> dict[str, Json]:
        """Return the state of the members' callbacks, as far as JSON can hold it."""
        return {
            "callbacks": {name: [remembered(own) for own in owns] for name, owns in self._own.items()},
            "begun": dict(self._begun),
            "noted": dict(self._added),
            "logs": dict(self._logs),
        }

    def restore_state(self, state: Mapping[str, Json]) -> None:
        """Restore the result of `state`."""
        self._remembered = dict(state["callbacks"])
        self._begun, self._added = dict(state["begun"]), dict(state["noted"])
        self._logs = {name: dict(logs) for name, logs in state["logs"].items()}

    def arrays(self) -> dict[str, Weights]:
        """Return the best weights that EarlyStopping holds."""
        found: dict[str, Weights] = {}
        for name, owns in self._own.items():
            for number, own in enumerate(owns):
                if getattr(own, "best_weights", None) is not None:
                    # As tensors of the backend, which are all that its files take.
                    tensors = [keras.ops.convert_to_tensor(array) for array in own.best_weights]
                    best = {f"{index:03}": tensor for index, tensor in enumerate(tensors)}
                    found.setdefault(name, {})[f"{number:03}"] = best
        return found

    def restore_arrays(self, arrays: Mapping[str, Weights]) -> None:
        """Restore the result of `arrays`."""
        self._weights = dict(arrays)

    def _begin(self, name: str, epoch: int, model: keras.Model) -> None:
        for own in self._own[name]:
            own.on_epoch_begin(epoch, {})
        self._begun[name] = epoch
        if model.stop_training:
            raise InputError(
                f"a callback set stop_training of member {name!r} before epoch {epoch + 1}. Keras would end that "
                f"epoch after one batch, but a fleet trains whole epochs. Set it in on_epoch_end."
            )

    def _end_epoch(self, run: "Fit", name: str) -> None:
        recorded, added = run.history[name], self._added.setdefault(name, [])
        recorded_epochs = max(map(len, recorded.values()))
        epoch = run.history.initial_epoch + recorded_epochs - 1
        told = {key: recorded[key][-1] for key in sorted(recorded) if key not in added}  # in Keras's order
        self._logs[name], logs = dict(told), dict(told)
        model, stopped_by = self._synced(run, name), None
        if run.validates(name):
            values = {key.removeprefix("val_"): value for key, value in told.items() if key.startswith("val_")}
            for own in self._own[name]:
                own.on_test_end(dict(values))
        for own in self._own[name]:
            own.on_epoch_end(epoch, logs)
            if model.stop_training and stopped_by is None:
                stopped_by = type(own).__name__
        for key, value in logs.items():  # callbacks may add values, such as the learning rate
            if key not in told or value is not told[key]:
                recorded.setdefault(key, [math.nan] * recorded_epochs)[-1] = float(value)
            if key not in told and key not in added:
                added.append(key)
        over = stopped_by is not None or epoch + 1 >= run.epochs_of(name)
        if stopped_by is not None:
            run.stop(name, f"stopped by {stopped_by}")
        if not over:
            self._begin(name, epoch + 1, model)
        self._take(run, name, model, over=over)

    def _restore(self, name: str, owns: Sequence[callbacks.Callback]) -> None:
        for own, attributes in zip(owns, self._remembered.get(name, ()), strict=False):
            for key, value in attributes.items():
                setattr(own, key, value)
        for number, best in self._weights.get(name, {}).items():
            weights = [keras.ops.convert_to_numpy(best[key]) for key in sorted(best)]
            vars(owns[int(number)])["best_weights"] = weights

    def _synced(self, run: "Fit", name: str) -> keras.Model:
        model = run.sync(name) if self._reads_model else run.fleet[name]
        self._trained[name] = _trained(model)
        return model

    def _take(self, run: "Fit", name: str, model: keras.Model, *, over: bool = False) -> None:
        if not self._changes_model:
            return
        if self._trained[name] != _trained(model) and not over:
            _refreeze(run, name, model)
        run.take(name)


def _trained(model: keras.Model) -> list[bool]:
    """Return which layers and weights are trained."""
    return [one.trainable for one in (*model._flatten_layers(), *model.variables)]


def _refreeze(run: "Fit", name: str, model: keras.Model) -> None:
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


def _ignores_model(callback: callbacks.Callback) -> bool:
    stopper = type(callback) is callbacks.EarlyStopping and not callback.restore_best_weights
    return stopper or type(callback) in _WITHOUT_MODEL
