"""modelfleet on Keras models: one fleet, one `fit`."""

import time
from collections.abc import Callable

import keras

import modelfleet as mf
from benchmarks.checking import check
from benchmarks.keras_nets import BATCH, STEPS, equal_data, mlp, rates, three
from benchmarks.peers import Round, compete


def first_run(quick: bool) -> Callable[[], Round]:
    """Three unlike models from nothing: the fleet and its first `fit`. They must come out as alone."""
    keras.utils.set_random_seed(0)
    members = three()
    data = {name: own for name, (_, own, _) in members.items()}
    epochs = {name: 1 if quick else count for name, (_, _, count) in members.items()}

    def train() -> Round:
        started = time.perf_counter()
        fleet = mf.Fleet({name: model for name, (model, _, _) in members.items()})
        history = fleet.fit(mf.each(data), epochs=mf.each(epochs), batch_size=BATCH, progress=False)
        seconds = time.perf_counter() - started
        losses = [history[name]["loss"][-1] for name in fleet.names]
        keras.utils.set_random_seed(0)
        initial = {name: model for name, (model, _, _) in three().items()}
        notes = {
            "largest difference to alone": check(fleet, initial, data, recipes={}, epochs=epochs, batch=BATCH)
        }
        return Round(STEPS * sum(epochs.values()), sum(losses) / len(losses), seconds, notes)

    return train


def prepare(what: str, quick: bool) -> Callable[[], Round]:
    if what == "first":
        return first_run(quick)
    if what == "three":
        members = three()
        fleet = mf.Fleet({name: model for name, (model, _, _) in members.items()})
        data = mf.each({name: own for name, (_, own, _) in members.items()})
        epochs = {name: 1 if quick else count for name, (_, _, count) in members.items()}
    else:
        fleet = mf.Fleet([mlp(rate) for rate in rates(4 if quick else 32)])
        data = equal_data()
        epochs = dict.fromkeys(fleet.names, 1 if quick else 12)

    def train_round() -> Round:
        history = fleet.fit(data, epochs=mf.each(epochs), batch_size=BATCH, progress=False)
        losses = [history[name]["loss"][-1] for name in fleet.names]
        return Round(STEPS * sum(epochs.values()), sum(losses) / len(losses))

    train_round()
    train_round()
    return train_round


if __name__ == "__main__":
    compete(prepare)
