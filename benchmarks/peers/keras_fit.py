"""Keras's own `fit`, one model after the other."""

from collections.abc import Callable

from benchmarks.keras_nets import BATCH, STEPS, equal_data, mlp, rates, three
from benchmarks.peers import Round, compete

ALONE = 4  # of the equal models: each costs the same, however many follow


def prepare(what: str, quick: bool) -> Callable[[], Round]:
    if what in ("three", "first"):
        jobs = [(model, data, 1 if quick else epochs) for model, data, epochs in three().values()]
    else:
        data = equal_data()
        jobs = [(mlp(rate), data, 1 if quick else 6) for rate in rates(ALONE)]

    def train_round() -> Round:
        losses = []
        for model, (x, y), epochs in jobs:
            history = model.fit(x, y, epochs=epochs, batch_size=BATCH, verbose=0)
            losses.append(history.history["loss"][-1])
        return Round(STEPS * sum(epochs for *_, epochs in jobs), sum(losses) / len(losses))

    if what != "first":
        train_round()
    return train_round


if __name__ == "__main__":
    compete(prepare)
