"""Replicas on a real Ray cluster of two nodes, one of them lost in the middle."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.clusters import NODE, two_nodes
from tests.replicas import models
from tests.replicas.test_pool import assert_answers, poisoned, rows

import modelfleet as mf

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as made:
        yield made


def test_the_cluster_has_a_device_for_every_node(cluster: Any) -> None:
    with mf.connect() as joined:
        assert joined.devices == ["ray:0", "ray:1"]
    with pytest.raises(mf.InputError, match="device 'ray:7' does not exist: the cluster has ray:0, ray:1"):
        mf.Replicas(models.Marked(), devices="ray:7")
    with pytest.raises(mf.InputError, match="partly of this machine and partly of a cluster"):
        mf.Replicas(models.Marked(), devices="ray:0,cpu:1")


def test_map_on_all_nodes_and_a_poison_row_fails_alone(cluster: Any) -> None:
    model = models.Refusing()
    data = {mark: rows(mark, 40) for mark in range(6)}
    with mf.connect():
        answers = mf.map(model, {**data, "bad": poisoned(7, 9, 4)}, batch_size=8)  # devices="auto" is the cluster
    assert list(answers) == list(data)
    for mark, x in data.items():
        assert_answers(model, x, answers[mark])
    failed = answers.failed["bad"]
    assert isinstance(failed, mf.RowsError)
    assert list(failed.rows) == [4]


def test_a_node_is_lost_and_replaced(cluster: Any) -> None:
    from modelfleet.workers import ray

    model = models.Marked()
    node = next(iter(cluster.worker_nodes))
    lost = next(place.name for place in ray.places(None) if place.node == node.node_id)
    data = {mark: rows(mark, 300) for mark in range(10)}
    with mf.Replicas(model, devices="ray", max_queue=None, batch_size=4) as replicas:
        assert len(replicas.stats().replicas) == 2
        futures = {mark: replicas.submit(mark, x) for mark, x in data.items()}
        futures[0].result()
        cluster.remove_node(node, allow_graceful=False)
        for mark, x in data.items():
            assert_answers(model, x, futures[mark].result())
        before = replicas.stats().replicas[lost].rows
        cluster.add_node(**NODE)
        asked = 10
        while replicas.stats().replicas[lost].rows == before:  # the new node has a replica before long
            assert_answers(model, data[1], replicas.submit(1, data[1]).result())
            asked += 1
    stats = replicas.stats()
    assert (stats.answered, stats.failed) == (asked, 0)
    assert sum(replica.rows for replica in stats.replicas.values()) == 300 * asked
