"""A fleet on a Ray cluster: two real nodes, one of which is lost in the middle."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.clusters import NODE, two_nodes
from tests.helpers import fit, mlp, toy
from tests.sharing.test_sharing import same

import modelfleet as mf

pytest.importorskip("ray")
# Ray leaves files and sockets to the collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

X, Y = toy(40)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as made:
        yield made


def fleet_on(devices: str) -> mf.Fleet:
    """Two groups, so that each node has one."""
    torch.manual_seed(0)
    fleet = mf.Fleet({"a": mlp(), "b": mlp(), "drop": mlp(7, 0.3)}, devices=devices)
    fleet.compile("adam", "cross_entropy", metrics=["accuracy"], lr=mf.each([0.01, 0.02, 0.03]))
    return fleet


class Loses(mf.Callback):
    """Has a node die at the end of the first epoch of somebody."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.node = next(iter(cluster.worker_nodes))

    def on_epoch_end(self, run: Any) -> None:
        if self.node is not None:
            self.cluster.remove_node(self.node, allow_graceful=False)
            self.node = None


def test_a_fleet_on_two_nodes_has_the_numbers_of_one_device_and_outlives_a_node(cluster: Any) -> None:
    one, two = fleet_on("cpu"), fleet_on("ray")
    fit(one, (X, Y), epochs=3, batch_size=8)
    loses = Loses(cluster)
    history = fit(two, (X, Y), epochs=3, batch_size=8, callbacks=[loses])
    cluster.add_node(**NODE)  # for the tests that follow as well, whatever comes of this one
    cluster.wait_for_nodes()
    assert loses.node is None
    assert not history.failed
    assert all(len(history[name]["loss"]) == 3 for name in two.names)
    same(one, two)

    # The new node takes its part, and nobody dies this time.
    told = fit(one, (X, Y), validation=(X, Y), batch_size=8)
    history = fit(two, (X, Y), validation=(X, Y), batch_size=8)
    same(one, two)
    assert not history.failed
    for name in one.names:
        assert history[name]["val_loss"] == pytest.approx(told[name]["val_loss"], rel=1e-4)
    plan = two.plan((X, Y))
    assert {lane.device for lane in plan.lanes} == {"ray:0", "ray:1"}
    assert plan.sharing == "processes"
    assert "on ray" in repr(two)
    assert one.evaluate((X, Y))["drop"] == pytest.approx(two.evaluate((X, Y))["drop"], rel=1e-4)
    with pytest.raises(mf.StrategyError, match='strategy="threads" is for the devices of this machine'):
        fit(two, (X, Y), strategy="threads")


def test_a_member_over_two_nodes_has_the_numbers_of_one_device(cluster: Any) -> None:
    one, two = fleet_on("cpu"), fleet_on("ray")
    given: dict[str, Any] = {"epochs": 2, "batch_size": 5}  # 3 rows for one node, 2 for the other
    told = fit(one, (X, Y), **given)
    history = fit(two, (X, Y), strategy="data_parallel", **given)
    same(one, two)
    assert not history.failed
    for name in one.names:
        assert history[name]["loss"] == pytest.approx(told[name]["loss"], rel=1e-4)


@pytest.mark.parametrize("way", ["weights", "hyperparameters", "over both nodes"])
def test_members_on_two_nodes_exchange_as_on_one_device(cluster: Any, way: str) -> None:
    exchange: Any = mf.Average(every_steps=3, groups=[["a", "b"]])
    if way == "hyperparameters":
        exchange = [mf.Gossip(groups=[["a", "b"]]), Halves()]
    one, two = fleet_on("cpu"), fleet_on("ray")
    fit(one, (X, Y), epochs=3, batch_size=8, exchange=exchange)
    strategy = "data_parallel" if way == "over both nodes" else "auto"
    fit(two, (X, Y), epochs=3, batch_size=8, exchange=exchange, strategy=strategy)
    same(one, two)


class Halves(mf.Exchange):
    """Halves the learning rate of a member, and forgets its optimizer's state."""

    def exchange(self, run: mf.ExchangeRun) -> None:
        run.set_hyperparameters("b", {"lr": run.hyperparameters("b")["lr"] / 2})
        state = run.optimizer_state(["b"])
        run.write_optimizer_state(["b"], {name: 0 * own for name, own in state.items()})
