"""Teaching: before a step, all members predict every member's batch, and each learns from the others' answers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from modelfleet.errors import InputError
from modelfleet.exchange.distill import Distill
from modelfleet.feeds import Batch
from modelfleet.frameworks.batch_parts import has_target, weighted_inputs
from modelfleet.frameworks.lessons import Comparison, Lesson, with_lesson
from modelfleet.lanes.lane import Lane
from modelfleet.runs.lane_run import LaneRun
from modelfleet.trees import map_tree
from modelfleet.types import Tree

_SOFTMAX = {"cross_entropy", "nll", "multi_margin", "CrossEntropyLoss", "NLLLoss", "MultiMarginLoss"}
_SIGMOID = {"bce_with_logits", "BCEWithLogitsLoss"}
_PROBABILITIES = {"bce", "BCELoss"}  # their outputs are probabilities already, which a temperature does not fit


class _Teacher(NamedTuple):
    """Members of a lane that teach."""

    lane: Lane
    slots: np.ndarray


class Teaching:
    """Gives batches the lessons of `Distill`.

    Args:
        distill: The options.
        runs: The runs of all lanes.

    Raises:
        InputError: A member is of Keras, or has no loss by which outputs can be compared.
    """

    def __init__(self, distill: Distill, runs: Sequence[LaneRun]) -> None:
        self._distill, self._runs = distill, runs
        self._comparisons = {id(run.lane): _comparison(run.lane, distill) for run in runs}

    def __call__(self, turn: Sequence[tuple[LaneRun, Batch]]) -> list[Batch]:
        """Return the batches of the next step of some lanes, with lessons by the current weights of all."""
        teachers = [_Teacher(run.lane, _fine_slots(run)) for run in self._runs if run.working]
        found = []
        for run, batch in turn:
            pieces = [self._taught(run, piece, teachers) for piece in batch.by_shape]
            found.append(replace(pieces[0], others=tuple(pieces[1:])))
        return found

    def _taught(self, run: LaneRun, batch: Batch, teachers: Sequence[_Teacher]) -> Batch:
        """Return a batch that holds one step, with lessons."""
        lane, comparison = run.lane, self._comparisons[id(run.lane)]
        students = np.flatnonzero(batch.counts > 0)
        if not len(students) or not any(len(teacher.slots) for teacher in teachers):
            return batch
        others = self._others(lane, batch, students, teachers, comparison)
        mean = others.total / np.maximum(_like(others.count, others.total), 1)
        if comparison != "outputs":
            mean = np.clip(mean, 0.0, 1.0)  # a difference of sums may be off by a rounding
        shape = lane.width, batch.size
        lesson = np.zeros((*shape, *mean.shape[2:]), others.dtype)
        lesson[students] = mean
        weight = np.zeros(shape)
        weight[students] = (others.count[:, None] > 0) * self._distill.weight
        tensor = lane.engine.tensor
        data = batch.data if not batch.shared else _for_each_member(lane, batch.data)
        x, target, *rest = data
        parts = (tensor(lesson), tensor(weight), tensor(np.full(shape, self._distill.temperature)))
        return replace(batch, data=(x, with_lesson(target, Lesson(comparison, *parts)), *rest), shared=False)

    def _others(
        self, lane: Lane, batch: Batch, students: np.ndarray, teachers: Sequence[_Teacher], comparison: Comparison
    ) -> "_Others":
        """Return what the others answer to each student. Answers that are not finite do not count."""
        if not has_target(batch.data):
            raise InputError("Distill needs batches of (x, y), and the data hold another form. Give (x, y).")
        x, arrays, many = weighted_inputs(batch.data), lane.members[0].framework.arrays, not batch.shared
        if many:  # the rows of all students, one after the other
            index = arrays.index(students, lane.engine.device)
            x = map_tree(lambda leaf: arrays.take(leaf, index).reshape(-1, *leaf.shape[2:]), x)
        found: _Others | None = None
        for teacher in teachers:
            answers = self._of(teacher.lane, x, comparison)
            if many:
                answers = answers.reshape(len(answers), len(students), batch.size, *answers.shape[2:])
            else:
                answers = np.repeat(answers[:, None], len(students), axis=1)
            if found is None:
                found = _Others(np.zeros(answers.shape[1:]), np.zeros(len(students), dtype=int), answers.dtype)
            elif answers.shape[1:] != found.total.shape:
                raise InputError(
                    f"Distill: the outputs of member {teacher.lane.names[0]!r} are {answers.shape[3:]} for a row, "
                    f"and those of {teachers[0].lane.names[0]!r} are {found.total.shape[2:]}. Members can only "
                    f"learn from others whose outputs have the same shape."
                )
            counted = np.zeros(answers.shape[:2], dtype=bool)  # (slot, student)
            counted[teacher.slots] = True
            counted &= np.isfinite(answers).all(axis=tuple(range(2, answers.ndim)))
            answers = np.where(_like(counted, answers), answers, 0.0).astype(np.float64)
            found.total[:] += answers.sum(axis=0)
            found.count[:] += counted.sum(axis=0)
            if teacher.lane is lane:  # without the students' own
                own = students, np.arange(len(students))
                found.total[:] -= answers[own]
                found.count[:] -= counted[own]
        assert found is not None
        return found

    def _of(self, lane: Lane, x: Tree, comparison: Comparison) -> np.ndarray:
        """Return the answers `(slot, row, …)` of all members of a lane on some rows."""
        arrays, device = lane.members[0].framework.arrays, lane.engine.device
        rows = map_tree(lambda leaf: arrays.place(leaf, device), x)
        outputs = lane.engine.predict(Batch(rows, True, np.full(lane.width, _rows_of(rows))))
        if not isinstance(outputs, np.ndarray):
            raise InputError(
                f"Distill: member {lane.names[0]!r} returns several tensors. Members can only learn from others "
                f"whose output is one tensor."
            )
        if comparison == "outputs":
            return outputs
        scores = outputs / np.asarray(self._distill.temperature, outputs.dtype)
        axis: int = getattr(lane.members[0].framework, "CLASS_AXIS")  # noqa: B009  not of every adapter
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is left out
            return _softmax(scores, axis) if comparison == "softmax" else 1 / (1 + np.exp(-scores))


class _Others(NamedTuple):
    """What the others answer to each student."""

    total: np.ndarray
    """`(student, row, …)`: the sum of their answers."""
    count: np.ndarray
    """`(student,)`: how many have answered."""
    dtype: np.dtype


def _like(numbers: np.ndarray, array: np.ndarray) -> np.ndarray:
    """Return numbers with as many axes as an array, whose first axes they have."""
    return numbers.reshape(*numbers.shape, *[1] * (array.ndim - numbers.ndim))


def _comparison(lane: Lane, distill: Distill) -> Comparison:
    """Return what of the outputs of a lane's members is compared."""
    member, task = lane.members[0], lane.tasks[0]
    loss = getattr(task, "loss", None)
    if not hasattr(member.framework, "CLASS_AXIS"):
        raise InputError(
            f"Distill: member {member.name!r} is a model of {member.framework.NAME}, which computes its loss "
            f"itself. Members of torch and JAX can learn from the others' predictions. Use Average, Gossip or "
            f"Exploit."
        )
    if loss is None:
        raise InputError(
            f"Distill: member {member.name!r} was compiled without a loss of (output, target), to which what the "
            f"others answer could be added. Give compile a loss."
        )
    if distill.compare == "outputs":
        return "outputs"
    if loss.name in _SIGMOID:
        return "sigmoid"
    if loss.name in _SOFTMAX or (distill.compare == "probabilities" and loss.name not in _PROBABILITIES):
        return "softmax"
    if loss.name in _PROBABILITIES:
        raise InputError(
            f'Distill: the outputs of member {member.name!r} are probabilities (loss "bce"). Give the model no '
            f'sigmoid and compile with "bce_with_logits", or say compare="outputs".'
        )
    if loss.kind == "any":
        raise InputError(
            f"Distill can't tell what the outputs of member {member.name!r} are by its loss {loss.name!r}. Say "
            f'compare="probabilities" or compare="outputs".'
        )
    return "outputs"


def _fine_slots(run: LaneRun) -> np.ndarray:
    """Return the slots of the members that are training and have not failed."""
    return np.flatnonzero(run.lane.on()[run.lane.slots] & (run.lane.engine.trouble() == 0))


def _for_each_member(lane: Lane, data: Tree) -> Tree:
    """Return rows that all members share as rows of each member."""
    arrays = lane.members[0].framework.arrays
    return map_tree(lambda leaf: arrays.stack([leaf] * lane.width), data)


def _rows_of(rows: Tree) -> int:
    sizes: list[int] = []
    map_tree(lambda leaf: sizes.append(len(leaf)), rows)
    return sizes[0]


def _softmax(scores: np.ndarray, axis: int) -> np.ndarray:
    """Return the softmax of scores `(slot, row, …)` over the classes, which have this axis of `(row, …)`."""
    axis += axis > 0
    powers = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)
