"""A real Ray cluster of two nodes on this machine, for tests."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NODE = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100_000_000}


@contextmanager
def two_nodes() -> Iterator[Any]:
    """The cluster, with this process connected to it; `add_node(**NODE)` and `remove_node` change it."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray.cluster_utils import Cluster

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Without what serves people and autoscalers: it takes a test's time and gives it nothing.
        spare = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, **spare})
        cluster.add_node(**NODE)
        ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        cluster.wait_for_nodes()
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
