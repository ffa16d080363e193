"""modelfleet: one fleet, one `fit`."""

from collections.abc import Callable
from functools import partial

import torch  # noqa: F401  (imported here, so that memory is counted from after the import on)

import modelfleet as mf
from benchmarks.nets import make_net
from benchmarks.peers import Round, serve
from benchmarks.rows import Row, datasets


def build(row: Row) -> mf.Fleet:
    """The fleet of `row`, compiled."""
    fleet = mf.Fleet.build(partial(make_net, row), row.members, seed=0)
    fleet.compile("adam", "cross_entropy", metrics=["accuracy"], lr=mf.each(row.rates().tolist()))
    return fleet


def prepare(row: Row) -> Callable[[], Round]:
    data = datasets(row)
    given = mf.each(data) if row.own_data else data[0]
    fleet = build(row)

    def train_round() -> Round:
        history = fleet.fit(given, epochs=row.epochs, batch_size=row.batch, progress=False)
        losses = [history[name]["loss"][-1] for name in fleet.names]
        return Round(row.members * row.steps * row.epochs, sum(losses) / len(losses))

    train_round()
    return train_round


if __name__ == "__main__":
    serve(prepare)
