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

X, Y = toy(44)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as made:
        yield made


def fleet_on(devices: str) -> mf.Fleet:
    torch.manual_seed(0)
    models = {"a": mlp(), "b": mlp(), "wide": mlp(9), "drop": mlp(7, 0.3), "c": mlp()}
    fleet = mf.Fleet(models, devices=devices)
    fleet.compile("adam", "cross_entropy", metrics=["accuracy"], lr=mf.each([0.01, 0.02, 0.01, 0.03, 0.02]))
    return fleet


def test_a_fleet_on_two_nodes_has_the_numbers_of_one_device(cluster: Any) -> None:
    given: dict[str, Any] = {"validation": (X, Y), "epochs": mf.each([2, 1, 3, 2, 2]), "batch_size": 8}
    one, two = fleet_on("cpu"), fleet_on("ray")
    told = fit(one, (X, Y), **given)
    history = fit(two, (X, Y), **given)
    same(one, two)
    assert not history.failed
    for name in one.names:
        assert history[name]["val_loss"] == pytest.approx(told[name]["val_loss"], rel=1e-4)
    plan = two.plan((X, Y))
    assert {lane.device for lane in plan.lanes} == {"ray:0", "ray:1"}
    assert plan.sharing == "processes"
    assert "on ray" in repr(two)
    assert one.evaluate((X, Y))["wide"] == pytest.approx(two.evaluate((X, Y))["wide"], rel=1e-4)
    with pytest.raises(mf.StrategyError, match='strategy="threads" is for the devices of this machine'):
        fit(two, (X, Y), strategy="threads")


def test_a_member_over_two_nodes_has_the_numbers_of_one_device(cluster: Any) -> None:
    one, two = fleet_on("cpu"), fleet_on("ray")
    told = fit(one, (X, Y), epochs=2, batch_size=7)  # and a last batch of 2 rows
    history = fit(two, (X, Y), epochs=2, batch_size=7, strategy="data_parallel")
    same(one, two)
    assert not history.failed
    for name in one.names:
        assert history[name]["loss"] == pytest.approx(told[name]["loss"], rel=1e-4)


class Loses(mf.Callback):
    """Has a node die at the end of the first epoch of somebody."""

    def __init__(self, cluster: Any, node: Any, *, together: bool) -> None:
        self.cluster, self.node = cluster, node
        self.together = together

    def on_epoch_end(self, run: Any) -> None:
        if self.node is not None:
            self.cluster.remove_node(self.node, allow_graceful=False)
            self.node = None


@pytest.mark.parametrize("together", [False, True])
def test_a_node_that_is_lost_is_made_up_for(cluster: Any, together: bool) -> None:
    one, two = fleet_on("cpu"), fleet_on("ray")
    fit(one, (X, Y), epochs=3, batch_size=8)
    node = next(iter(cluster.worker_nodes))
    history = fit(two, (X, Y), epochs=3, batch_size=8, callbacks=[Loses(cluster, node, together=together)])
    assert not history.failed
    assert all(len(history[name]["loss"]) == 3 for name in two.names)
    same(one, two)
    if not together:
        cluster.add_node(**NODE)
        cluster.wait_for_nodes()
        fit(one, (X, Y), batch_size=8)
        fit(two, (X, Y), batch_size=8)
        same(one, two)
        assert {lane.device for lane in two.plan((X, Y)).lanes} == {"ray:0", "ray:1"}
