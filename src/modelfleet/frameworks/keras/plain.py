"""Engine of a single Keras member whose steps are not pure functions: it calls the functions that `fit` calls.

It serves models with their own `train_step`, eager models, and models that change state outside of themselves. The
model itself is the state: a step changes its variables in place, as `fit` does. Only two things differ from `fit`.
On torch, draws come from the member's own stream. And a step whose loss or weights are not finite is undone: the
member keeps its last good state.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from modelfleet.errors import InputError, StrategyError
from modelfleet.frameworks import batch_parts
from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.batch_errors import batch_error
from modelfleet.frameworks.engine import NOTHING_LEFT, Engine, Hyper, Pace
from modelfleet.frameworks.errors import FINE, GRADIENT, LOSS
from modelfleet.frameworks.keras.optimizers import averages_weights, built, hyperparameters_in, left_unbuilt
from modelfleet.frameworks.keras.own_functions import FunctionName, as_tuple, call_own_function, evaluation_offset
from modelfleet.frameworks.keras.own_variables import (
    assign_rows,
    assign_values,
    copied_values,
    variable_bytes,
    variables_by_part,
)
from modelfleet.frameworks.keras.task import Task, task_of
from modelfleet.frameworks.lane_context import LaneContext, alike
from modelfleet.frameworks.stacked import Given, Positions
from modelfleet.members import Member
from modelfleet.trees import map_tree
from modelfleet.types import Kind, Model, State, Tensor, Tree

BACKEND = keras.backend.backend()
Logs = dict[str, Tensor]
"""Loss and metrics by name, as Keras's own functions return them."""


class PlainEngine(Engine):
    """Engine of a lane of one member, on the member's own model (see `frameworks.engine.Engine`)."""

    programs = None
    steps_per_call = 1
    fused = False
    time_ratio = 1.0
    untraced: str | None = None
    compiling = False
    positions = slots = np.zeros(1, dtype=np.int64)

    def __init__(self, context: LaneContext[Task, Any], reason: str | None = None) -> None:
        """Make the engine. `reason` says why its steps are not traced."""
        (self._member,) = context.members
        self.device = context.device
        self.untraced = reason
        self._task = context.task
        self.model: Model = self._member.model
        self._step = 0
        self._trouble = FINE
        self._batch = 0  # the number of the next batch to evaluate or predict
        self._logs: Logs = {}
        self._train_metrics: list[tuple[keras.Variable, Tensor]] = []  # values to restore after an evaluation

    def hyperparameters_in(self, tensors: Collection[str]) -> dict[str, str]:
        """Return the hyperparameters that are variables of the optimizer."""
        return hyperparameters_in(tensors)

    @property
    def task(self) -> Task:
        """Return the task of the member."""
        return self._task

    @property
    def parameters(self) -> int:
        """Return the number of trained numbers."""
        return sum(int(np.prod(variable.shape)) for variable in self.model.trainable_variables)

    @property
    def bytes(self) -> int:
        """Return the size of the model's and the optimizer's variables."""
        return variable_bytes(self.model)

    @property
    def program(self) -> str:
        """Return how the train steps run."""
        return "Keras's own train step, eager" if self.model.run_eagerly else "Keras's own train step"

    def stop(self) -> None:
        """Do nothing: nothing runs beside the steps."""

    def finish(self, positions: Positions) -> None:
        """Finish the training as Keras does: an optimizer may replace the weights by their averages."""
        optimizer: Any = getattr(self.model, "optimizer", None)
        if averages_weights(optimizer) and int(ops.convert_to_numpy(optimizer.iterations)) > 0:
            optimizer.finalize_variable_values(self.model.trainable_variables)
            for variable in self.model.trainable_variables:
                # A copy: on JAX, a later step that donates the weights would also donate the average (Keras 3.15).
                variable.assign(ops.copy(variable.value))

    # --- steps ---------------------------------------------------------------------------------------------------

    def train(self, hyper: Hyper, active: Tensor, batch: Batch, pace: Pace = NOTHING_LEFT) -> None:
        """Take the steps of a batch, if the member is active."""
        for number in range(batch.steps or 1):
            if bool(np.all(ops.convert_to_numpy(active))) and self._trouble == FINE:
                self._take_step((batch if batch.steps is None else batch.step(number)).member(0))

    def train_some(self, hyper: Hyper, batch: Batch, pace: Pace = NOTHING_LEFT) -> None:
        """Take one step on a batch from `first_rows`."""
        self.train(hyper, np.ones(1, dtype=bool), batch)

    def gradients(self, batch: Batch) -> Tree:
        """Raise StrategyError: the model's own train step has no parts."""
        raise self._no_parts()

    def apply(self, hyper: Hyper, active: Tensor, gradients: Tree) -> None:
        """Raise StrategyError: the model's own train step has no parts."""
        raise self._no_parts()

    def _no_parts(self) -> StrategyError:
        return StrategyError(
            f"member {self._member.name!r} trains by its model's own train_step, which can't be taken in parts. "
            f"Leave train_step as Keras has it, and compile without run_eagerly."
        )

    def _take_step(self, batch: Tree) -> None:
        if self.model.optimizer is not None:
            built(self.model)
        before = copied_values(self.model)
        with self._drawing(self._member.seed):
            self._logs = self._called("train", batch) if self.record is None else self._recorded(batch)
        if not _finite(self._logs.get("loss", 0.0)):
            self._trouble = LOSS
        elif not all(_finite(ops.sum(v.value * 0)) for v in self.model.trainable_variables):
            self._trouble = GRADIENT
        if self._trouble == FINE:
            self._step += 1
        else:
            assign_values(self.model, before)

    def _recorded(self, batch: Tree) -> Logs:
        """Take a step and record its loss. Keras's own logs have the mean since the start of the epoch."""
        assert self.record is not None
        means = [
            metric
            for metric in self.model.metrics
            if metric.name == "loss" and isinstance(metric, keras.metrics.Mean)
        ]
        variables = [variable for metric in means for variable in metric.variables]
        before = [ops.copy(variable.value) for variable in variables]
        for metric in means:
            metric.reset_state()
        logs = dict(self._called("train", batch))
        loss = np.asarray(ops.convert_to_numpy(logs.get("loss", np.nan)), dtype=np.float64)
        self.record(loss.reshape(1), None)
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value + variable.value)  # the sum and the count: as if they had never been reset
        if means:
            logs["loss"] = means[0].result()
        return logs

    def ready(self, kind: Kind, hyper: Hyper, active: Tensor, batch: Batch) -> None:
        """Raise InputError for a model that is to be trained and has no trainable variable."""
        self._batch = 0
        own_step = type(self.model).train_step is not keras.Model.train_step
        if kind == "train" and not self.model.trainable_variables and not own_step:
            raise InputError(
                f"member {self._member.name!r} has no trainable variable. "
                f"Set trainable=True on what is to be trained."
            )

    def epoch_values(self) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` since the last call, and start a new epoch."""
        found = self._results(self._logs)
        self.model.reset_metrics()
        self._logs = {}
        return found

    def evaluate(self, totals: Logs | None, batch: Batch) -> Logs | None:
        """Add a batch to the model's own metrics, and return its logs as the totals."""
        if not batch.counts[0]:
            return totals
        if totals is None:
            self._train_metrics = [
                (variable, ops.copy(variable.value)) for variable in self.model.metrics_variables
            ]
            self.model.reset_metrics()
            self._batch = 0
        with self._drawing_to_evaluate():
            return self._called("test", batch.member(0))

    def values(self, totals: Logs | None) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` from the totals of `evaluate`."""
        found = self._results(totals or {})
        for variable, value in self._train_metrics:
            variable.assign(value)
        self._train_metrics = []
        return found

    def predict(self, batch: Batch, positions: Positions | None = None) -> Tree:
        """Return the outputs on the member's real rows, as NumPy arrays `(1, row, …)`."""
        x = map_tree(lambda leaf: leaf[: int(batch.counts[0])], batch.member(0))
        with self._drawing_to_evaluate():
            found = self._called("predict", (x,))
        return map_tree(lambda leaf: np.asarray(ops.convert_to_numpy(leaf))[None], found)

    def inputs(self, data: Tree) -> Tree:
        """Return the x of (x,), (x, y) and (x, y, sample_weight), or the data themselves."""
        return batch_parts.weighted_inputs(data)

    # --- padding -------------------------------------------------------------------------------------------------

    def can_mask_padding(self, batch: Batch) -> bool:
        """Return False: padding is cut off, as a user's own step may ignore row weights."""
        return False

    def rows_are_independent(self, inputs: Tree) -> bool:
        """Return False: this is not known, and one member needs no padding."""
        return False

    def row_weights(self, counts: np.ndarray, size: int) -> Tensor:
        """Return `(slot, row)`: 1 for a real row, 0 for padding."""
        return (np.arange(size) < np.asarray(counts)[:, None]).astype(np.float32)

    def first_rows(self, batch: Batch, slots: np.ndarray, count: int) -> Batch:
        """Return a batch of the member's first `count` rows."""
        rows = map_tree(lambda leaf: leaf[:count], batch.member(0))
        return Batch(rows, True, np.array([count]), slots=slots)

    # --- state ---------------------------------------------------------------------------------------------------

    def tensor(self, array: np.ndarray) -> Tensor:
        """Return a host array unchanged: the engine reads its arguments on the host."""
        return np.asarray(array)

    def trouble(self) -> np.ndarray:
        """Return `(slot,)`: why the member was set aside, by the codes of `errors.REASONS`."""
        return np.array([self._trouble])

    def steps_taken(self) -> np.ndarray:
        """Return `(slot,)`: the number of steps that changed the member's weights."""
        return np.array([self._step])

    def clear_trouble(self) -> None:
        """Mark the member as fine, and reset its metrics as `fit` does."""
        self._trouble = FINE
        if self.model.compiled:
            self.model.reset_metrics()

    def give_slots(self, positions: Positions) -> None:
        """Do nothing: there is one member."""

    def adopt(self, positions: Positions, other: Engine, sources: Positions) -> None:
        """Copy the number of steps that the member has taken."""
        self._step = _number(other.read(sources, ("member",))["member"]["step"])

    def still_shared(self, members: Sequence[Member]) -> bool:
        """Return True if the member is compiled as it was when the lane was made."""
        return all(task_of(member.model) is self.task for member in members)

    def gather(self, positions: Positions, members: Sequence[Member]) -> None:
        """Do nothing: the model is the state."""

    def scatter(self, positions: Positions, members: Sequence[Member]) -> None:
        """Do nothing: the model is the state."""

    def read(self, positions: Positions, parts: Collection[str] | None = None) -> State:
        """Return a copy of the member's state, `(1, …)`."""
        found: State = {
            part: {key: variable.value[None] * 1 for key, variable in own.items()}
            for part, own in variables_by_part(self.model).items()
            if parts is None or part in parts
        }
        if parts is None or "member" in parts:
            numbers = {"step": self._step, "trouble": self._trouble}
            found["member"] = {
                name: ops.convert_to_tensor(np.array([number], dtype=np.int32)) for name, number in numbers.items()
            }
        return found

    def write(self, positions: Positions, state: Given) -> None:
        """Replace the member's state by part and name."""
        assign_rows(self.model, state)
        member = state.get("member", {})
        self._step = _number(member["step"]) if "step" in member else self._step
        self._trouble = _number(member["trouble"]) if "trouble" in member else self._trouble

    def stream(self) -> AbstractContextManager[object]:
        """Return an empty context."""
        return nullcontext()

    def out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error of a step means that the device is out of memory."""
        return (
            isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error)
        )

    # --- checks and costs ----------------------------------------------------------------------------------------

    def check(self, batch: Batch, name: str) -> None:
        """Create the variables of the metrics, if the model can be traced for this."""
        data = batch.member(0)
        with (
            left_unbuilt(self.model),
            suppress(Exception),
        ):  # an eager model may read values; its first step raises if something is wrong
            self.model._symbolic_build(data_batch=as_tuple(data))

    def output_shape(self, batch: Batch, name: str) -> tuple[int, ...] | None:
        """Return None: the outputs of the model's own functions are known only once it is called."""
        return None

    def check_targets(self, output_shape: tuple[int, ...] | None, target: Tree, name: str | None) -> None:
        """Do nothing: the outputs are not known."""

    def label_check(self, output_shape: tuple[int, ...] | None) -> Callable[[Tree], None] | None:
        """Return None: the outputs are not known."""
        return None

    def working_bytes(self, batch: Batch) -> int | None:
        """Return None: it is not known."""
        return None

    # --- helpers -------------------------------------------------------------------------------------------------

    def _called(self, name: FunctionName, batch: Tree) -> Tree:
        """Call the model's own train, test or predict function on one batch, and explain its errors."""
        try:
            return call_own_function(self.model, name, batch, self.device)
        except Exception as error:  # a user's own step may raise anything
            if self.out_of_memory(error):
                raise
            kind = type(self.model).__name__
            raise batch_error(self._member.name, kind, _shapes(batch), error, memory=False) from error

    def _results(self, logs: Logs) -> dict[str, np.ndarray]:
        """Return the values of Keras's logs: the metrics, or what the model's own step has returned."""
        found = self.model._get_metrics_result_or_logs(logs) if logs else self.model.get_metrics_result()
        numbers = {name: np.asarray(ops.convert_to_numpy(value)) for name, value in dict(found).items()}
        for name, value in numbers.items():
            if value.size != 1:
                raise InputError(
                    f"member {self._member.name!r}: the metric {name!r} gives an array {value.shape}; a history "
                    f"holds single numbers."
                )
        return {name: value.astype(np.float64).reshape(1) for name, value in numbers.items()}

    def _drawing(self, seed: int) -> AbstractContextManager[object]:
        """On torch, draw from the member's own stream. On other backends draws depend on the model's seeds."""
        if BACKEND != "torch":
            return nullcontext()
        from modelfleet.frameworks.keras.torch import drawing

        return drawing(seed, self._step)

    def _drawing_to_evaluate(self) -> AbstractContextManager[object]:
        self._batch += 1
        return self._drawing((self._member.seed + evaluation_offset(self._batch)) % 2**63)


def _number(value: Tensor | np.ndarray) -> int:
    """Return the number in a tensor or array `(1,)`."""
    return int(np.asarray(ops.convert_to_numpy(value))[0])


def _finite(value: Tensor | float) -> bool:
    return bool(np.isfinite(ops.convert_to_numpy(value)).all())


def _shapes(batch: Tree) -> str:
    found = [leaf for leaf in tree.flatten(batch) if leaf is not None]
    return ", ".join(f"{tuple(leaf.shape)} {getattr(leaf.dtype, 'name', leaf.dtype)}" for leaf in found)


def become_plain(engine: Engine, members: Sequence[Member], reason: str) -> None:
    """Turn the engine of one member into a plain engine, in place."""
    steps = engine.steps_taken()
    assert isinstance(engine.task, Task)
    plain = PlainEngine(alike(members, engine.task, {}, engine.device, fused=False), reason)
    plain._step, plain.record = int(steps[0]), engine.record
    engine.__class__ = PlainEngine
    engine.__dict__.clear()
    engine.__dict__.update(vars(plain))
