"""Loss and metrics of outputs that no single model gave, such as those of an ensemble."""

from collections.abc import Sequence

import torch

from modelfleet.frameworks.torch import losses, metrics
from modelfleet.frameworks.torch.task import logits
from modelfleet.trees import leaves, map_tree
from modelfleet.types import LossLike, MetricLike, Model, Tree


def score(
    model: Model, output: Tree, target: Tree, loss: LossLike, chosen: Sequence[MetricLike]
) -> dict[str, float]:
    """Return the loss, if there is one, and the metrics of outputs. See `Adapter` for the arguments."""
    output, target = map_tree(torch.as_tensor, (output, target))
    output, values = logits(output), {}
    with torch.no_grad():
        if loss is not None:
            values["loss"] = float(losses.resolve(loss).plain(output, target))
        ones = torch.ones(len(leaves(target)[0]))
        for metric in metrics.resolve(chosen):
            values[metric.name] = float(metric.value(metric.sums(output, target, ones)))
    return values
