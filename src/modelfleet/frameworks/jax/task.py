"""Tasks of JAX members: how a batch becomes a loss and the parts of metrics."""

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from modelfleet.errors import InputError
from modelfleet.fingerprints import fingerprint
from modelfleet.frameworks.batch_parts import loss_and_metrics, unpack
from modelfleet.frameworks.jax import metrics
from modelfleet.frameworks.jax.lessons import lesson_loss
from modelfleet.frameworks.jax.losses import Loss, weighted
from modelfleet.frameworks.jax.metrics import Metric
from modelfleet.frameworks.jax.optimizers import Optimizer
from modelfleet.frameworks.jax.structure import freeze
from modelfleet.frameworks.lessons import split_lesson
from modelfleet.frameworks.structure import without_numbers
from modelfleet.types import Model, Precision, Tensor, Tree

PRECISIONS = {"float32": None, "bf16": jnp.bfloat16, "fp16": jnp.float16}  # fp16 is only for predicting

Array = jax.Array | np.ndarray


@dataclass(frozen=True)
class Task:
    """Loss, metrics, optimizer and precision that the members of one lane have in common.

    `own` has each member's own numbers by its name: hyperparameters in its optimizer's state, and its `clip_norm`.
    """

    optimizer: Optimizer | None = None
    loss: Loss | None = None
    objective: Callable[[Model, Tree], Any] | None = None
    metrics: tuple[Metric, ...] = ()
    clip: bool = False
    precision: Precision = "float32"
    own: Mapping[str, Mapping[str, float]] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def family(self) -> Hashable:
        """Return what members have in common whose tasks differ only in their optimizers and in numbers."""
        loss = self.loss
        parts = (
            self.optimizer is None,
            None if loss is None else (loss.name, loss.function),
            self.objective,
            tuple((metric.name, metric.parts, metric.value) for metric in self.metrics),
        )
        return *map(without_numbers, map(freeze, parts)), self.clip, self.precision

    @property
    def summary(self) -> str:
        """Return the task as one line for checkpoints. A run can be resumed only with an equal summary."""
        fixed = () if self.optimizer is None else self.optimizer.fixed
        plain = [f"{key}={value}" for key, value in fixed if isinstance(value, bool | int | float | str | None)]
        if self.objective is not None:
            loss = fingerprint(self.objective)
        elif self.loss is None:
            loss = "its own loss"
        else:
            loss = self.loss.summary
        metrics = [metric.name for metric in self.metrics]
        return ", ".join([self.optimizer_name, *plain, loss, *metrics, self.precision])

    @property
    def optimizer_name(self) -> str:
        """Return the name of the optimizer, for a plan."""
        return "no optimizer" if self.optimizer is None else self.optimizer.name

    def run(
        self, call: Callable[[Model, Tree], Tree], model: Model, batch: Tree, weights: Array | None
    ) -> tuple[Array, Mapping[str, Mapping[str, Array]]]:
        """Return one member's loss on a batch, and the parts of its metrics, by metric.

        `call` runs the model on inputs. `weights` is `(row,)`: 1 for a row that counts and 0 for padding. If it is
        None, every row counts.
        """
        if weights is None:
            weights, mask = jnp.ones(_count(batch), jnp.float32), None
        else:
            mask = weights
        rows = weights.sum()
        if self.objective is not None:
            loss, extra = loss_and_metrics(self.objective(model, batch), jax.Array)
            found = {name: {"total": jnp.asarray(value) * rows, "count": rows} for name, value in extra.items()}
        else:
            assert self.loss is not None
            x, given, own = unpack(batch, self.loss.name)
            target, lesson = split_lesson(given)
            output = widened(call(model, x))
            loss = weighted(self.loss, output, target, mask, own)
            if lesson is not None:
                loss = loss + lesson_loss(output, lesson, mask)
            seen = jax.lax.stop_gradient(output)
            found = {metric.name: metric.parts(seen, target, weights) for metric in self.metrics}
        loss = _scalar(loss)
        return loss, {"loss": {"total": loss * rows, "count": rows}, **found}

    def metric(self, name: str) -> Metric:
        """Return the metric of a name. The loss, and the metrics of an objective, are means."""
        return next((metric for metric in self.metrics if metric.name == name), None) or metrics.mean(name)


def _scalar(loss: Tensor) -> Array:
    if jnp.size(loss) != 1:
        raise InputError(f"the loss is {jnp.shape(loss)}; expected one number, such as the batch's mean.")
    loss = jnp.asarray(loss)
    return loss.astype(jnp.promote_types(loss.dtype, jnp.float32)).reshape(())


def widened(output: Tree, precision: Precision = "bf16") -> Tree:
    """Return an output with halves cast to float32."""
    halves = (jnp.bfloat16, PRECISIONS[precision] or jnp.bfloat16)
    # Other values stay: JAX's own error says where they are among the outputs.
    return jax.tree.map(lambda a: a.astype(jnp.float32) if getattr(a, "dtype", None) in halves else a, output)


def _count(batch: Tree) -> int:
    return jax.tree.leaves(batch)[0].shape[0]
