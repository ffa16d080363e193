"""Tasks of torch members: how a batch becomes a loss and sums of metrics."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.errors import InputError
from modelfleet.fingerprints import fingerprint
from modelfleet.frameworks.batch_parts import loss_and_metrics, unpack
from modelfleet.frameworks.lessons import split_lesson
from modelfleet.frameworks.losses import no_loss_by_row
from modelfleet.frameworks.torch.lessons import lesson_loss
from modelfleet.frameworks.torch.losses import Loss, by_row, weighted
from modelfleet.frameworks.torch.metrics import Metric
from modelfleet.frameworks.torch.optimizers.stacked import Optimizer
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Precision, Tree

PRECISIONS = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Task:
    """Loss, metrics, optimizer and precision that the members of one lane have in common."""

    optimizer: Optimizer
    loss: Loss | None = None
    objective: Callable[[nn.Module, Tree], Any] | None = None
    metrics: tuple[Metric, ...] = ()
    clip: bool = False
    precision: Precision = "float32"

    @property
    def can_mask_rows(self) -> bool:
        """Return True if the loss and every metric can leave out padded rows by weights."""
        return self.loss is not None and self.loss.rows is not None and all(m.can_mask_rows for m in self.metrics)

    @cached_property
    def summary(self) -> str:
        """Return the task as one line for checkpoints. A run can be resumed only with an equal summary."""
        flags = [name for name, on in self.optimizer.flags.items() if on]
        if self.objective is not None:
            loss = fingerprint(self.objective)
        elif self.loss is None:
            loss = "its own loss"
        else:
            loss = self.loss.name if self.loss.rows is not None else fingerprint(self.loss.plain)
        metrics = [metric.name for metric in self.metrics]
        return ", ".join([self.optimizer.name, *sorted(flags), loss, *metrics, self.precision])

    @property
    def optimizer_name(self) -> str:
        """Return the name of the optimizer with its flags, for a plan."""
        flags = sorted(name for name, on in self.optimizer.flags.items() if on)
        return " ".join([self.optimizer.name, *flags])

    def run(self, model: nn.Module, batch: Tree, weights: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return one member's loss on a batch, and the batch's sums for the metrics of the epoch.

        `weights` is `(row,)`: 1 for a row that counts and 0 for padding. If it is None, every row counts.
        """
        loss, sums, rows = self.measured(model, batch, weights)
        return loss, {"loss": loss.detach() * rows, **sums, "rows": torch.as_tensor(rows, device=loss.device)}

    def measured(
        self, model: nn.Module, batch: Tree, weights: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor | int]:
        """Return one member's loss on a batch, the sums of the metrics, and the number of rows that count."""
        rows = weights.sum() if weights is not None else _count(batch)
        if self.objective is not None:
            loss, extra = loss_and_metrics(self.objective(model, batch), Tensor)
            sums = {name: torch.as_tensor(value).detach() * rows for name, value in extra.items()}
        elif self.loss is not None:
            x, given, own = unpack(batch, self.loss.name)
            target, lesson = split_lesson(given)
            output = logits(call(model, x))
            if weights is None and own is None:
                loss = self.loss.plain(output, target)
            else:
                loss = weighted(self.loss, output, target, weights, own)
            if lesson is not None:
                loss = loss + lesson_loss(output, lesson, weights)
            sums = self._sums(output, target, weights)
        else:
            if isinstance(batch, tuple) and len(batch) == 3:
                raise no_loss_by_row(f"{type(model).__name__}.loss")
            x = batch[0] if isinstance(batch, tuple) else batch
            output = call(model, x)
            loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
            if loss is None:
                raise InputError(
                    f"{type(model).__name__} gives no .loss of its own. Give compile a loss or an objective, or "
                    f"include the labels in the batch."
                )
            sums = self._sums(logits(output), x["labels"], weights) if self.metrics else {}
        return _scalar(loss), sums, rows

    def partial_loss(
        self, model: nn.Module, batch: Tree, weights: Tensor | None, fraction: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return what some rows of a batch add to its loss: (total, count, sums), to be summed over all rows.

        The loss of the whole batch is the sum of the totals over the sum of the counts. `fraction` is the part of
        the batch that the rows are. A loss without values per row (a function, an objective, the output's own
        `.loss`) is taken as the mean over its rows, which `row_independence.divide_by_rows` has verified.
        """
        loss = self.loss if self.objective is None else None
        if loss is None or (loss.parts is None and loss.rows is None):
            mean, sums = self.run(model, batch, weights)
            return mean * sums["rows"], sums["rows"], sums
        x, target, own = unpack(batch, loss.name)
        return self.partial_loss_of(logits(call(model, x)), target, own, weights, fraction)

    def partial_loss_of(
        self, output: Tree, target: Tree, own: Tensor | None, weights: Tensor | None, fraction: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return what `partial_loss` does, for rows whose outputs are there already. `own` are their sample
        weights.

        A function without values per row is taken as the mean over the rows.
        """
        loss = self.loss
        assert loss is not None
        rows = torch.as_tensor(_count(output), device=_first(output).device) if weights is None else weights.sum()
        if loss.rows is not None or own is not None:
            totals, counts = by_row(loss, output, target, own)
            if weights is not None:
                totals, counts = weights * totals, weights * counts
            total, count = totals.sum(), counts.sum()
        elif loss.parts is not None:
            total, count = loss.parts(output, target)
            count = fraction.to(total.dtype) if count is None else count
        else:
            total, count = _scalar(loss.plain(output, target)) * rows, rows
        return total, count, {**self._sums(output, target, weights), "rows": rows}

    def values(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the loss and the metrics from their sums over an epoch."""
        named: dict[str, dict[str, np.ndarray]] = {}
        values: dict[str, np.ndarray] = {}
        with np.errstate(divide="ignore", invalid="ignore"):
            for name, total in sums.items():
                metric, slash, key = name.partition("/")
                if slash:
                    named.setdefault(metric, {})[key] = total
                elif name != "rows":
                    values[name] = total / sums["rows"]
            for metric in self.metrics:
                columns = named[metric.name]
                rows = zip(*columns.values(), strict=True)
                values[metric.name] = np.array(
                    [metric.value(dict(zip(columns, row, strict=True))) for row in rows]
                )
        return values

    def _sums(self, output: Tree, target: Tree, weights: Tensor | None) -> dict[str, Tensor]:
        if not self.metrics:
            return {}
        if weights is None:
            weights = torch.ones(_count(output), device=leaves(output)[0].device)
        seen = map_tree(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
        return {
            f"{metric.name}/{key}": value
            for metric in self.metrics
            for key, value in metric.sums(seen, target, weights).items()
        }


def call(model: nn.Module, x: Tree) -> Tree:
    """Call a model with a dict as keywords, a tuple or list as arguments, or a single tensor.

    A dict, tuple or list that does not match the parameters of `forward` is passed as one argument.
    """
    args, keywords = call_arguments(model, x)
    return model(*args, **keywords)


def call_arguments(model: nn.Module, x: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and keywords with which `call` calls a model."""
    if isinstance(x, Mapping) and _accepts(model, (), x):
        return (), dict(x)
    if isinstance(x, tuple | list) and _accepts(model, x, {}):
        return tuple(x), {}
    return (x,), {}


def _accepts(model: nn.Module, args: Sequence[object], keywords: Mapping[str, object]) -> bool:
    forward: Any = model.forward
    return _binds(getattr(forward, "__func__", forward), hasattr(forward, "__func__"), len(args), tuple(keywords))


@lru_cache
def _binds(forward: Callable[..., Any], is_method: bool, count: int, names: tuple[str, ...]) -> bool:
    """Return False if `forward` takes one argument, but neither `count` arguments nor these keywords."""
    own = [None] if is_method else []
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):  # not written in Python
        return True
    try:
        signature.bind(*own, *[None] * count, **dict.fromkeys(names))
    except TypeError:
        try:
            signature.bind(*own, None)
        except TypeError:
            return True  # it takes neither form: the error is torch's
        return False
    return True


def logits(output: Tree) -> Tree:
    """Return the tensor that users mean by a model's output: the output itself, or Hugging Face's `.logits`."""
    if isinstance(output, Tensor):
        return output
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("logits")
    if found is not None:
        return found
    if isinstance(output, Mapping):
        return {name: value for name, value in output.items() if _holds_tensors(value)}
    return output


def _holds_tensors(value: Tree) -> bool:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return isinstance(value, Tensor) or any(_holds_tensors(part) for part in parts)


def _scalar(loss: object) -> Tensor:
    if not isinstance(loss, Tensor):
        raise InputError(f"the loss is a {type(loss).__name__}; expected a tensor of one number.")
    if loss.numel() != 1:
        raise InputError(f"the loss is {tuple(loss.shape)}; expected one number, such as the batch's mean.")
    return loss.reshape(()) if loss.dim() else loss


def _count(batch: Tree) -> int:
    return _first(batch).shape[0]


def _first(tree: Tree) -> Tensor:
    return next(leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))
