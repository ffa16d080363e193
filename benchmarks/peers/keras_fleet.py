"""modelfleet on Keras models: one fleet, one `fit`."""

from collections.abc import Callable

import modelfleet as mf
from benchmarks.keras_nets import BATCH, STEPS, equal_data, mlp, rates, three
from benchmarks.peers import Round, compete


def prepare(what: str, quick: bool) -> Callable[[], Round]:
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
