"""Loss and metrics of outputs that no single model gave, such as those of an ensemble."""

from collections.abc import Sequence

import jax.numpy as jnp

from modelfleet.frameworks.jax import losses, metrics
from modelfleet.frameworks.jax.arrays import place
from modelfleet.trees import leaves, map_tree
from modelfleet.types import LossLike, MetricLike, Model, Tree


def score(
    model: Model, output: Tree, target: Tree, loss: LossLike, chosen: Sequence[MetricLike]
) -> dict[str, float]:
    """Return the loss, if there is one, and the metrics of outputs. See `Adapter` for the arguments."""
    output, target = map_tree(lambda leaf: jnp.asarray(place(leaf, None)), (output, target))
    values: dict[str, float] = {}
    if loss is not None:
        values["loss"] = float(losses.weighted(losses.resolve(loss), output, target, None))
    ones = jnp.ones(len(leaves(target)[0]), jnp.float32)
    for metric in metrics.resolve(chosen):
        parts = metric.parts(output, target, ones)
        values[metric.name] = float(metric.value(metric.joined(metric.begun(parts), parts)))
    return values
