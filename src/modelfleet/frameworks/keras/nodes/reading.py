"""Keras nodes that predict and evaluate, on every backend."""

from importlib import import_module

import keras
import numpy as np
from keras import ops

from modelfleet.frameworks.functional import Replica
from modelfleet.frameworks.keras.nodes.task import NodeTask
from modelfleet.frameworks.node_engine import LossParts
from modelfleet.frameworks.predicting_node import PredictingNode
from modelfleet.members import Member
from modelfleet.types import NativeDevice, Tensor, Tree


class ReadingNode(PredictingNode):
    """Engine of a Keras node that does not train."""

    def __init__(self, member: Member, task: NodeTask, device: NativeDevice) -> None:
        backend = import_module(f"modelfleet.frameworks.keras.{keras.backend.backend()}")
        replica: Replica = backend.replica(member.model, device)
        untrained = f"node {member.name!r} was opened to {task.kind}. Call fit to train it."
        super().__init__(member.name, replica, host=is_host(device), untrained=untrained)
        self._task = task
        self._outputs: dict[int, Tensor] = {}

    def forward(self, micro: int, inputs: Tree, wanted: object = ()) -> Tree:
        """Return the outputs for a micro-batch."""
        outputs = super().forward(micro, inputs, ())
        if self._task.loss is not None:
            self._outputs[micro] = outputs
        return outputs

    def count(self, micro: int, target: Tree) -> float:
        """Return the count by which the loss of the whole batch is divided."""
        assert self._task.loss is not None
        y, weights = (*target, None)[:2]
        return self._task.loss.count_of(self._step.count, y, self._outputs[micro], weights)

    def loss(self, micro: int, target: Tree, divisor: float) -> LossParts:
        """Compute the loss of a micro-batch's outputs."""
        assert self._task.loss is not None
        start, stop = self._step.rows[micro]
        y, weights = (*target, None)[:2]
        fraction = ops.convert_to_tensor(np.float32((stop - start) / self._step.count))
        output = ops.convert_to_tensor(self._outputs.pop(micro))
        self._task.loss.check(y, output)
        total, count, sums = self._task.loss.parts(output, y, weights, fraction)
        named = self._task.loss.named([ops.convert_to_numpy(value) for value in sums])
        return LossParts(float(total), float(count), {**named, "rows": float(stop - start)})


def is_host(device: NativeDevice) -> bool:
    """Return True if a device, as the backend names it, is a CPU."""
    kind = getattr(device, "platform", None) or getattr(device, "type", None) or str(device)
    return str(kind).lower().startswith("cpu")
