"""What the members of a lane are to do: how a batch becomes a loss and the numbers of the metrics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from modelfleet.errors import InputError
from modelfleet.fingerprints import fingerprint
from modelfleet.frameworks.batches import input_and_target, loss_and_metrics
from modelfleet.frameworks.jax import metrics
from modelfleet.frameworks.jax.losses import Loss, weighted
from modelfleet.frameworks.jax.metrics import Metric
from modelfleet.frameworks.jax.optimizers import Optimizer

PRECISIONS = {"float32": None, "bf16": jnp.bfloat16, "fp16": jnp.float16}  # to train in: not fp16

Array = jax.Array


@dataclass(frozen=True)
class Task:
    """The loss, metrics, optimizer and precision that the members of one lane have in common.

    `own` has each member's own numbers, by its name: the hyperparameters in its optimizer's state, and its
    `clip_norm`.
    """

    optimizer: Optimizer | None = None
    loss: Loss | None = None
    objective: Callable[[Any, Any], Any] | None = None
    metrics: tuple[Metric, ...] = ()
    clip: bool = False
    precision: str = "float32"
    own: Mapping[str, Mapping[str, float]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def summary(self) -> str:
        """The task in a line, for checkpoints: what must be the same for a run to go on."""
        optimizer = "no optimizer" if self.optimizer is None else self.optimizer.name
        fixed = () if self.optimizer is None else self.optimizer.fixed
        plain = [f"{key}={value}" for key, value in fixed if isinstance(value, bool | int | float | str | None)]
        if self.objective is not None:
            loss = fingerprint(self.objective)
        elif self.loss is None:
            loss = "its own loss"
        else:
            loss = self.loss.summary
        return ", ".join([optimizer, *plain, loss, *(metric.name for metric in self.metrics), self.precision])

    def run(self, call: Callable[[Any, Any], Any], model: Any, batch: Any, weights: Array | None) -> Any:
        """One member's loss on a batch, and the parts of its metrics, by metric.

        `call` runs the model on inputs. `weights` is `(row,)`, 1 for a row that counts and 0 for padding; without
        it every row counts.
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
            x, target = input_and_target(batch, self.loss.name)
            output = widened(call(model, x))
            loss = weighted(self.loss, output, target, mask)
            seen = jax.lax.stop_gradient(output)
            found = {metric.name: metric.parts(seen, target, weights) for metric in self.metrics}
        loss = _scalar(loss)
        return loss, {"loss": {"total": loss * rows, "count": rows}, **found}

    def metric(self, name: str) -> Metric:
        """The metric of a name; the loss, and what an objective gives, are means."""
        return next((metric for metric in self.metrics if metric.name == name), None) or metrics.mean(name)


def _scalar(loss: Any) -> Array:
    if jnp.size(loss) != 1:
        raise InputError(f"the loss is {jnp.shape(loss)}; expected one number, such as the batch's mean.")
    loss = jnp.asarray(loss)
    return loss.astype(jnp.promote_types(loss.dtype, jnp.float32)).reshape(())


def widened(output: Any, precision: str = "bf16") -> Any:
    """An output in float32, where it was computed in halves."""
    halves = (jnp.bfloat16, PRECISIONS[precision] or jnp.bfloat16)
    # What is no array stays: JAX says of it where it is among the outputs.
    return jax.tree.map(lambda a: a.astype(jnp.float32) if getattr(a, "dtype", None) in halves else a, output)


def _count(batch: Any) -> int:
    return jax.tree.leaves(batch)[0].shape[0]
