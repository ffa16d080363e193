"""Verbs of a graph that leave its nodes as they are: evaluate and predict."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from modelfleet.errors import InputError
from modelfleet.feeds import is_loader
from modelfleet.frameworks.batch_parts import weighted_inputs
from modelfleet.frameworks.node_engine import LossParts
from modelfleet.graph.losses import EpochSums, EpochValues, split_batch
from modelfleet.graph.opening import ROWS_PER_MICRO_BATCH, Opener
from modelfleet.graph.orders import StepOrder, StepReport
from modelfleet.graph.plan import GraphPlan
from modelfleet.graph.running import Ranks
from modelfleet.graph.topology import select
from modelfleet.trees import map_trees
from modelfleet.types import Data, Tree


def evaluate(opener: Opener, data: Data, batch_size: int | None) -> dict[str, float]:
    """Return the loss and the metrics on data."""
    plan = opener.plan_untried(batch_size or default_rows(opener))
    feed = opener.feed(data, _size(data, opener, batch_size), what="data")
    with opener.open({"evaluate": plan}, "evaluate") as ranks:
        orders = (evaluate_orders(opener, plan, batch.member(0)) for batch in feed.epoch(0))
        return sum_up(opener, in_turn(ranks, orders)).flat


def evaluate_orders(opener: Opener, plan: GraphPlan, batch: Tree) -> list[StepOrder]:
    """Return the orders to evaluate one batch."""
    x, targets = split_batch(batch, opener.losses)
    return opener.step_orders(plan, "evaluate", x, targets, train=False)


def sum_up(opener: Opener, reports: Iterator[list[StepReport]]) -> EpochValues:
    """Return the loss and the metrics of evaluated batches."""
    sums = EpochSums(opener.units("evaluate"), opener.losses)
    for batch in reports:
        sums.add(joined_parts(batch, opener.losses))
    return sums.values()


def joined_parts(reports: Sequence[StepReport], losses: Sequence[str]) -> Mapping[str, list[LossParts]]:
    """Return what all ranks computed of a batch's losses, by node and in the order of the micro-batches."""
    found: dict[str, dict[int, LossParts]] = {name: {} for name in losses}
    for report in reports:
        for name, own in report.losses.items():
            found[name].update(own)
    return {name: [own[micro] for micro in sorted(own)] for name, own in found.items()}


def predict(opener: Opener, data: Data, batch_size: int | None) -> Tree:
    """Return the outputs on data."""
    plan = opener.plan_untried(batch_size or default_rows(opener))
    feed = opener.feed(data, _size(data, opener, batch_size), what="data")
    wanted = opener.topology.outputs
    found: dict[str, list[Tree]] = {name: [] for name in wanted}
    with opener.open({"predict": plan}, "predict") as ranks:
        orders = (
            opener.step_orders(plan, "predict", _inputs(opener, batch.member(0)), {}, train=False, outputs=wanted)
            for batch in feed.epoch(0)
        )
        for reports in in_turn(ranks, orders):
            for name in wanted:
                parts: dict[int, Tree] = {}
                for report in reports:
                    parts.update(report.outputs.get(name, {}))
                found[name] += [parts[micro] for micro in sorted(parts)]
    outputs = {name: map_trees(np.concatenate, own) for name, own in found.items()}
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def in_turn(ranks: Ranks, orders: Iterator[list[StepOrder]]) -> Iterator[list[StepReport]]:
    """Send orders, one ahead of the reports, and yield the reports."""
    ahead = 0
    try:
        for one in orders:
            ranks.send(one)
            ahead += 1
            if ahead == 2:
                ahead -= 1
                yield ranks.receive()
    except Exception:  # what the data have raised: what was sent before has its reports
        while ahead and not ranks.failed:
            ahead -= 1
            yield ranks.receive()
        raise
    for _ in range(ahead):
        yield ranks.receive()


def default_rows(opener: Opener) -> int:
    """Return the rows of a batch by default: a few for every micro-batch."""
    return ROWS_PER_MICRO_BATCH * opener.plan_untried(1_000_000).schedule.micro_batches


def _size(data: Data, opener: Opener, batch_size: int | None) -> int | None:
    """Return the batch size for a feed. A loader has batches of its own."""
    return None if is_loader(data, opener.adapter.arrays, "data") else batch_size or default_rows(opener)


def _inputs(opener: Opener, batch: Tree) -> Tree:
    """Return the x of a batch. Raises InputError if it lacks a part that an edge names."""
    x = weighted_inputs(batch)
    try:
        for link in opener.topology.inputs:
            select(x, link.output, "x")
    except InputError as error:
        if x is batch:
            raise
        raise InputError(
            f"{error} A tuple of two is taken as (x, y). For a model of two inputs, give ((u, v),)."
        ) from error
    return x
