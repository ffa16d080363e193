"""Steps of a Keras member as pure functions, for lanes on JAX and on TensorFlow."""

from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from modelfleet.frameworks import batch_parts
from modelfleet.frameworks.engine import Hyper
from modelfleet.frameworks.functional import Definition, State
from modelfleet.frameworks.keras.losses import label_check
from modelfleet.frameworks.keras.steps import Steps
from modelfleet.frameworks.keras.task import Task
from modelfleet.members import Member
from modelfleet.types import Arrays, Tensor, Tree

Loss = Callable[[dict[str, Tensor]], tuple[Tensor, Tree]]


class KerasDefinition(Definition):
    """Steps of the members of one lane (see `functional.Definition`); a backend adds `differentiate`."""

    def __init__(self, model: keras.Model, task: Task) -> None:
        self.steps = Steps(model)
        self.task = task
        self.sparse = False  # True once a gradient is that of the rows that were looked up in a table

    def differentiate(self, loss: Loss, params: dict[str, Tensor]) -> tuple[Tree, dict[str, Tensor]]:
        """Return what `loss` returns beside the number to differentiate, and the gradients by key."""
        raise NotImplementedError

    @property
    def can_mask_rows(self) -> bool:  # type: ignore[override]
        """Return True if rows of weight 0 have no influence. This is known once the metrics are."""
        return self.steps.can_mask_rows

    def state(self, member: Member) -> State:
        """Return a member's weights, seeds and optimizer's variables."""
        own = self.steps.state(member.model)
        return {
            part: {key: np.asarray(ops.convert_to_numpy(value)) for key, value in own[part].items()}
            for part in ("params", "buffers", "optimizer")
        }

    def try_out(self, state: State, batch: Tree) -> None:
        """Create the metrics for batches like this one."""
        self.steps.build(batch)

    def fresh_metrics(self) -> Arrays:
        """Return a member's metrics before its first batch."""
        return {key: np.asarray(ops.convert_to_numpy(value)) for key, value in self.steps.fresh_metrics().items()}

    def gradients(self, state: State, batch: Tree, weights: Tensor | None) -> dict[str, Tree]:
        """Return what `apply` needs to finish a step on a batch."""

        def loss(params: dict[str, Tensor]) -> tuple[Tensor, Tree]:
            return self.steps.loss(params, state["buffers"], state["metrics"], state["optimizer"], batch, weights)

        (value, buffers, metrics), found = self.differentiate(loss, state["params"])
        gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
        return {"loss": value, "gradients": gradients, "buffers": buffers, "metrics": metrics}

    def apply(self, state: State, hyper: Hyper, found: dict[str, Tree]) -> tuple[State, Tensor, Tensor]:
        """Return the state after an update by the model's own optimizer."""
        gradients, loss = found["gradients"], found["loss"]
        params, optimizer = self.steps.apply(state["params"], state["optimizer"], gradients)
        # An optimizer that scales the loss skips gradients that are not finite, and tries a smaller scale.
        scales = self.steps.scales_loss
        good_gradient = ops.ones_like(loss, dtype="bool") if scales else _finite(gradients)
        new = {"params": params, "optimizer": optimizer, "buffers": found["buffers"], "metrics": found["metrics"]}
        return new, loss, good_gradient

    def evaluate(
        self, state: State, metrics: dict[str, Tensor], batch: Tree, weights: Tensor | None
    ) -> tuple[dict[str, Tensor], State]:
        """Return the metrics with a batch added, and the seeds and counters that the model has changed."""
        found, changed = self.steps.evaluate(state["params"], state["buffers"], metrics, batch, weights)
        return found, {"buffers": changed}

    def results(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss and the metrics, by the names of Keras's logs."""
        return self.steps.results(metrics)

    def predict(self, state: State, x: Tree) -> tuple[Tree, State]:
        """Return the model's outputs, and the seeds and counters that the model has changed."""
        outputs, changed = self.steps.predict(state["params"], state["buffers"], x)
        return outputs, {"buffers": changed}

    def write_back(self, member: Member, state: State) -> None:
        """Copy a member's weights, seeds and optimizer's variables into its model."""
        # Copies: JAX may keep reading NumPy's memory in place, and this memory belongs to the engine.
        self.steps.write_back(
            member.model, {part: _copied(state[part]) for part in ("params", "buffers", "optimizer")}
        )

    def inputs(self, data: Tree) -> Tree:
        """Return the inputs of a batch: the x of (x,), (x, y) or (x, y, sample_weight), or the batch itself."""
        return batch_parts.weighted_inputs(data)

    def check_targets(self, output_shape: tuple[int, ...], target: Tree, name: str | None) -> None:
        """Raise InputError for labels that the model has no output for."""
        check = label_check(self.steps.model, output_shape, "" if name is None else f"member {name!r}: ")
        if check is not None:
            check(target)

    def label_check(self, output_shape: tuple[int, ...]) -> Callable[[Tree], None] | None:
        """Return a function that raises for a batch with such labels."""
        check = label_check(self.steps.model, output_shape)
        if check is None:
            return None
        return lambda batch: check(batch[1]) if isinstance(batch, tuple) and len(batch) > 1 else None


def _copied(arrays: Arrays) -> Arrays:
    return {key: np.array(array) for key, array in arrays.items()}


def _finite(gradients: dict[str, Tensor]) -> Tensor:
    return ops.all(ops.stack([ops.all(ops.isfinite(gradient)) for gradient in gradients.values()]))
