"""Models that predict and evaluate one after the other, as in a loop over them, with next to nothing around it.

A lane checks, copies and explains. For a few rows, that takes longer than a small model's forward pass. What was
found out once holds for all rows of the same form: these models draw no random numbers, do not write to their
inputs, and return one tensor with a row for every input. The models themselves run, so new weights need no
attention. Any change of their structure is noticed, and then the lanes do the work.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.frameworks.target_checks import IGNORED, takes_classes
from modelfleet.frameworks.torch import arrays
from modelfleet.frameworks.torch.global_modes import KeepingModes
from modelfleet.frameworks.torch.random.detection import DrawDetector
from modelfleet.frameworks.torch.random.eager import EagerDraws
from modelfleet.frameworks.torch.stamps import ModelStamp, ModelStamps
from modelfleet.frameworks.torch.target_checks import check_targets
from modelfleet.frameworks.torch.task import Task
from modelfleet.types import Data, Kind

Answer = TypeVar("Answer")
Run = Callable[[Tensor], Tensor]
"""A model, or a function that calls it."""


class _UnsuitableError(Exception):
    """Raised for a model that needs more care than it gets here."""


class DirectModels:
    """Models of some members, on the CPU, for data of one form.

    Args:
        models: The models.
        tasks: The task of each.
        kind: "predict" or "evaluate".
        rows_at_once: How many rows go through a model together.
        whole: True if these are more than the batch size, because the rows are independent.

    Attributes:
        usable: False if some model needs a lane.
    """

    def __init__(
        self, models: Sequence[nn.Module], tasks: Sequence[Task], kind: Kind, rows_at_once: int, whole: bool
    ) -> None:
        self._tasks = list(tasks)
        self._rows_at_once, self._whole = rows_at_once, whole
        stamps = [ModelStamp(model) for model in models]
        self._stamps = ModelStamps(stamps)
        self._tables = [vars(module) for model in models for module in model.modules()]
        self._tried = False  # True once every model was tried
        self.usable = all(map(_suits, stamps, tasks)) and (
            kind == "predict" or all(task.loss is not None and task.loss.unchecked for task in tasks)
        )
        if kind == "evaluate":
            self.usable = self.usable and all(task.can_mask_rows for task in tasks)

    def unchanged(self, models: Sequence[nn.Module]) -> bool:
        """Return True if the models have the structure that they had, and torch is in no special mode."""
        return (
            not torch.is_autocast_enabled("cpu")
            and not torch.is_inference_mode_enabled()
            and self._stamps.same_structure(models)
        )

    def predict(self, models: Sequence[nn.Module], data: Data) -> list[np.ndarray] | None:
        """Return the outputs of every model, or None if some model needs a lane after all."""
        return self._run(models, (data,), self._outputs)

    def evaluate(self, models: Sequence[nn.Module], data: Data) -> list[dict[str, float]] | None:
        """Return the loss and the metrics of every model, or None if some model needs a lane after all."""
        return self._run(models, data, self._values)

    def _run(
        self,
        models: Sequence[nn.Module],
        data: Sequence[Data],
        run: Callable[[Sequence[Run], list[list[Tensor]]], Iterator[Answer]],
    ) -> list[Answer] | None:
        """Return what `run` yields for every model on the chunks of the data's parts."""
        before = torch.is_grad_enabled()
        training = [table for table in self._tables if table["training"]]
        try:
            torch._C._set_grad_enabled(False)
            for table in training:
                table["training"] = False
            parts = [_chunks(part, self._rows_at_once) for part in data]
            answers = list(run(models if self._tried else [partial(_watched, model) for model in models], parts))
        except Exception:  # the lanes say what is wrong, in the user's terms
            self.usable = False
            return None
        finally:
            for table in training:
                table["training"] = True
            torch._C._set_grad_enabled(before)
        if not self._tried:
            self._tried, self.usable = True, self._stamps.same_structure(models)  # False if it counts calls
        return answers

    def _outputs(self, models: Sequence[Run], parts: list[list[Tensor]]) -> Iterator[np.ndarray]:
        (chunks,) = parts
        first = chunks[0]
        rows = first.shape[0]
        for model in models:
            output = model(first)
            if output.shape[0] != rows or first._version:  # it has written to its input
                raise _UnsuitableError
            if len(chunks) == 1:
                yield output.numpy()
                continue
            outputs = [output, *map(model, chunks[1:])]
            if any(len(own) != len(chunk) for own, chunk in zip(outputs, chunks, strict=True)) or first._version:
                raise _UnsuitableError
            yield torch.cat(outputs).numpy()

    def _values(self, models: Sequence[Run], parts: list[list[Tensor]]) -> Iterator[dict[str, float]]:
        all_count = all(y.is_floating_point() or y.min().item() > IGNORED for y in parts[1])
        if self._whole and not all_count:
            raise _UnsuitableError  # then the mean over a batch depends on what else is in it
        ones = [torch.ones(len(x)) for x in parts[0]] if self._needs_weights(parts[1], all_count) else []
        checked: set[int] = set()
        chunks, targets = parts
        first = chunks[0]
        for model, task in zip(models, self._tasks, strict=True):
            outputs = [model(first)] if len(chunks) == 1 else list(map(model, chunks))
            if first._version:  # it has written to its input
                raise _UnsuitableError
            if id(task) not in checked:
                self._check(task, outputs, targets)
                checked.add(id(task))
            values = {"loss": _mean_loss(task, outputs, targets)}
            for metric in task.metrics:
                if not ones:
                    assert metric.of_labels is not None
                    values[metric.name] = metric.of_labels(outputs[0], targets[0])
                    continue
                sums: dict[str, Any] = {}
                for output, y, weights in zip(outputs, targets, ones, strict=True):
                    for key, value in metric.sums(output, y, weights).items():
                        sums[key] = sums[key] + value if key in sums else value
                values[metric.name] = float(metric.value(sums))
            yield values

    def _needs_weights(self, targets: list[Tensor], all_count: bool) -> bool:
        """Return False if every metric can be computed at once, from the labels of a single batch."""
        labels = len(targets) == 1 and targets[0].dim() == 1 and targets[0].dtype == torch.int64 and all_count
        return not labels or not all(metric.of_labels for task in self._tasks for metric in task.metrics)

    def _check(self, task: Task, outputs: list[Tensor], targets: list[Tensor]) -> None:
        """Check the targets, as far as torch does not. Raise _UnsuitableError for unusual outputs."""
        assert task.loss is not None
        first, y = outputs[0], targets[0]
        if not self._tried:
            task.loss.plain(first, y)
        if y.dim() == 1 and y.dtype == torch.int64 and (first.dim() != 2 or first.shape[1] < 2):
            raise _UnsuitableError
        if not takes_classes(task.loss.kind):  # torch itself refuses labels without a class
            check_targets(task.loss, tuple(first.shape), torch.cat(targets))


def _watched(model: nn.Module, given: Tensor) -> Tensor:
    """Return a model's output. Raise _UnsuitableError if it draws, or writes to its input, or is unusual."""
    x, modes = given.clone(), KeepingModes("cpu")
    with modes, EagerDraws(0, 0) as draws:
        output = model(x)
        same_modes = modes.unchanged()
    usual = type(output) is Tensor and output.dim() > 0 and not output.is_conj() and not output.is_neg()
    if draws.count or not same_modes or not usual or not torch.equal(x, given):
        raise _UnsuitableError
    memory = {t.untyped_storage().data_ptr() for t in (x, *model.parameters(), *model.buffers())}
    if output.untyped_storage().data_ptr() in memory:  # a user may write to an answer
        raise _UnsuitableError
    return output


def _mean_loss(task: Task, outputs: list[Tensor], targets: list[Tensor]) -> float:
    """Return the mean of the loss over the rows of all chunks."""
    loss: Any = task.loss
    if len(outputs) == 1:
        return loss.unchecked(outputs[0], targets[0]).item()
    losses = [loss.unchecked(output, y).item() for output, y in zip(outputs, targets, strict=True)]
    sizes = [len(y) for y in targets]
    return sum(map(operator.mul, losses, sizes)) / sum(sizes)


def _suits(stamp: ModelStamp, task: Task) -> bool:
    model = stamp.model
    return (
        stamp.complete
        and task.objective is None
        and task.precision == "float32"
        and all(type(module).train is nn.Module.train for module in model.modules())
        and not DrawDetector(model, ()).always
    )


def _copy(part: Data) -> Tensor:
    """Return a copy of an array as a feed would place it, so that no model can write to the user's data."""
    if part.dtype in (np.float32, np.int64):
        return torch.from_numpy(part.copy())
    return arrays.place(part, None, copy=True)


def _chunks(part: Data, rows: int) -> list[Tensor]:
    whole = _copy(part)
    return [whole] if part.shape[0] <= rows else list(whole.split(rows))
