"""Keras nodes on TensorFlow and torch, where they predict and evaluate."""

from collections.abc import Callable, Collection, Hashable
from importlib import import_module
from weakref import WeakKeyDictionary, proxy

import keras
import numpy as np
from keras import ops

from modelfleet.frameworks.functional import Replica
from modelfleet.frameworks.keras.nodes.task import NodeTask
from modelfleet.frameworks.keras.steps import by_key
from modelfleet.frameworks.keras.structure import signature
from modelfleet.frameworks.node_engine import LossParts
from modelfleet.frameworks.predicting_node import PredictingNode
from modelfleet.members import Member
from modelfleet.types import NativeDevice, State, Tensor, Tree

_replicas: WeakKeyDictionary[keras.Model, dict[Hashable, Replica]] = WeakKeyDictionary()


class ReadingNode(PredictingNode):
    """Engine of a Keras node that does not train."""

    def __init__(self, member: Member, task: NodeTask, device: NativeDevice) -> None:
        replica = _replica(member.model, device)
        untrained = f"node {member.name!r} was opened to {task.kind}. Call fit to train it."
        super().__init__(member.name, replica, host=str(device).lower().startswith("cpu"), untrained=untrained)
        self._task, self._model = task, member.model
        self._outputs: dict[int, Tensor] = {}

    def forward(self, micro: int, inputs: Tree, wanted: object = ()) -> Tree:
        """Return the outputs for a micro-batch."""
        outputs = super().forward(micro, inputs, ())
        if self._task.loss is not None:
            self._outputs[micro] = outputs
        return outputs

    def read(self, parts: Collection[str] | None = None) -> State:
        """Return a copy of the weights, as arrays on the host `(1, …)`."""
        found: State = {"params": {}, "frozen": {}}
        for key, variable in by_key(self._model.variables).items():
            part = "params" if variable.trainable else "frozen"
            found[part][key] = np.array(ops.convert_to_numpy(variable.value))[None]
        return {part: own for part, own in found.items() if parts is None or part in parts}

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
        fraction = ops.convert_to_tensor(np.float64((stop - start) / self._step.count))
        output = ops.convert_to_tensor(self._outputs.pop(micro))
        self._task.loss.check(y, output)
        total, count, sums = self._task.loss.parts(output, y, weights, fraction)
        named = self._task.loss.named([ops.convert_to_numpy(value) for value in sums])
        return LossParts(float(total), float(count), {**named, "rows": float(stop - start)})


def _replica(model: keras.Model, device: NativeDevice) -> Replica:
    """Return what has the program of a model. On TensorFlow, where it reads the model's variables, it is kept."""
    name = keras.backend.backend()
    make: Callable[[keras.Model, NativeDevice], Replica] = import_module(
        f"modelfleet.frameworks.keras.{name}"
    ).replica
    if name != "tensorflow":
        return make(model, device)
    known = _replicas.setdefault(model, {})
    key = device, signature(model)
    if key not in known:
        known[key] = make(proxy(model), device)  # or the entry would keep the model alive
    return known[key]
