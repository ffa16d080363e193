"""Engine of a lane of one torch member: its own module, eager autograd and `torch.optim`, as in a plain loop.

Models that can't be fused run here, and so does a fleet of one. The model itself runs: its hooks are called, its
Python state advances, its parameters are updated in place. Only two things differ from a loop written by hand.
Random draws come from the member's own stream, if the model draws any. And a step whose loss or gradient is not
finite is not taken: the member keeps its last good weights and buffers.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.errors import InputError, StrategyError
from modelfleet.frameworks import batch_parts
from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.engine import NOTHING_LEFT, Engine, Hyper, Pace
from modelfleet.frameworks.errors import FINE, GRADIENT, LOSS, SCALE
from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.frameworks.stacked import Given, Positions
from modelfleet.frameworks.torch.base import ModuleEngine, TorchEngine, on_host
from modelfleet.frameworks.torch.cpu.thread_choice import ThreadChoice
from modelfleet.frameworks.torch.fused import state as states
from modelfleet.frameworks.torch.fused.updating import GROWTH_STEPS, SMALLEST_SCALE
from modelfleet.frameworks.torch.global_modes import KeepingModes
from modelfleet.frameworks.torch.parallel import plain as plain_parallel
from modelfleet.frameworks.torch.parallel.process_group import ProcessGroup
from modelfleet.frameworks.torch.plain import optimizer as plain_optimizer
from modelfleet.frameworks.torch.plain.contexts import PlainContexts
from modelfleet.frameworks.torch.plain.member import PlainMember, copy_weights, exact
from modelfleet.frameworks.torch.plain.trials import PlainTrials
from modelfleet.frameworks.torch.python_state.undo import undoing_own_changes
from modelfleet.frameworks.torch.random.streams import DrawShapes
from modelfleet.frameworks.torch.task import Task, call, logits
from modelfleet.members import Member
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Kind, State, Tree


class PlainEngine(ModuleEngine):
    """Engine of a lane of one torch member (see `frameworks.engine.Engine`)."""

    programs = None
    undoes_steps = True
    steps_per_call = 8  # steps a call: the overhead of a call costs as much as a small model's forward
    fused = False
    time_ratio = 1.0
    compiling = False
    untraced = None
    program = "plain torch"
    positions = slots = np.zeros(1, dtype=np.int64)

    def __init__(self, context: LaneContext[Task, object]) -> None:
        """Make the engine of the lane's one member."""
        (member,) = context.members
        self.device = context.device
        self._member = PlainMember(member, context.task, context.columns, context.device)
        self.transposed = self._member.layout
        self._contexts = PlainContexts(self._member)
        self._trials = PlainTrials(self._member, self._contexts)
        self._group: ProcessGroup | None = None
        self._active: tuple[Tensor | None, bool] = None, True  # the last mask, and its value
        self._skipped = False  # True if the last step was not taken
        self._independent_rows: dict[int, bool] = {}  # by the size of a batch
        self._threads = ThreadChoice()

    @property
    def model(self) -> nn.Module:
        """Return the module that is stepped: the member's own, or a copy of it on the lane's device."""
        return self._member.model

    @property
    def task(self) -> Task:
        """Return the member's task."""
        return self._member.task

    @property
    def parameters(self) -> int:
        """Return the number of trained numbers."""
        return sum(parameter.numel() for parameter in states.trained(self.model).values())

    @property
    def bytes(self) -> int:
        """Return the size of the weights and the optimizer's state on the device."""
        trained = sum(parameter.nbytes for parameter in states.trained(self.model).values())
        weights = sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))
        return weights + trained * len(self.task.optimizer.tensor_names)

    def stop(self) -> None:
        """Drop the last step's gradients."""
        self._member.drop_gradients()

    # --- steps ---------------------------------------------------------------------------------------------------

    def tensor(self, array: np.ndarray) -> Tensor:
        """Return a host array as a tensor of the host: `torch.optim` takes a member's numbers from there."""
        return torch.from_numpy(np.ascontiguousarray(array))

    def train(self, hyper: Hyper, active: Tensor, batch: Batch, pace: Pace = NOTHING_LEFT) -> None:
        """Take the steps of a batch, if the member is active."""
        self._member.use(hyper)
        weights = None if batch.weights is None else batch.weights[0]
        with self._threads(batch.steps or 1):
            for step in range(batch.steps or 1):
                if self._takes_part(active):
                    self._take_step(_own_copy(batch, None if batch.steps is None else step), weights)

    def train_some(self, hyper: Hyper, batch: Batch, pace: Pace = NOTHING_LEFT) -> None:
        """Take one step on a batch that `first_rows` returned."""
        if self._member.trouble == FINE:
            self._member.use(hyper)
            self._take_step(_own_copy(batch), None)

    def gradients(self, batch: Batch) -> dict[str, Tree]:
        """Return what `apply` needs of a batch. The model's buffers stay as they are."""
        member = self._member
        saved = member.save_buffers()
        member.drop_gradients()
        scale = self._loss_scale()
        try:
            weights = None if batch.weights is None else batch.weights[0]
            with KeepingModes(self.device.type):
                loss, sums = self._backward(_own_copy(batch), weights, scale)
            gradients = {name: p.grad.unsqueeze(0) for name, p in member.params.items() if p.grad is not None}
            buffers = {name: tensor.clone().unsqueeze(0) for name, tensor in self.model.named_buffers()}
        finally:
            member.undo(saved)
        gradients = member.stored({"gradients": gradients})["gradients"]
        return {"gradients": gradients, "loss": loss, "sums": sums, "buffers": buffers, "scale": scale}

    def apply(self, hyper: Hyper, active: Tensor, gradients: dict[str, Tree]) -> None:
        """Update the member by what `gradients` returned."""
        member = self._member
        member.use(hyper)
        if not self._takes_part(active):
            return
        loss, self._skipped = gradients["loss"], True
        for name, gradient in member.stored({"gradients": gradients["gradients"]})["gradients"].items():
            member.params[name].grad = gradient[0].clone()
        member.trouble = self._update(gradients["scale"]) if math.isfinite(loss) else LOSS
        if not self._skipped:
            member.write_weights({"buffers": gradients["buffers"]})
            member.count(loss, gradients["sums"])

    def _takes_part(self, active: Tensor) -> bool:
        if active is not self._active[0]:
            self._active = active, bool(active[0])
        return self._active[1] and self._member.trouble == FINE

    def _loss_scale(self) -> float | None:
        return self._member.scale if self.task.precision == "fp16" else None

    def _take_step(self, batch: Tree, weights: Tensor | None) -> None:
        """Do what a plain loop does: forward, backward, clip, update."""
        member = self._member
        saved = member.save_buffers()
        member.drop_gradients()
        scale = self._loss_scale()
        self._skipped = True
        try:
            with KeepingModes(self.device.type):
                loss, sums = self._backward(batch, weights, scale)
            if self.record is not None:
                self.record(np.array([loss]), None)
            member.trouble = self._update(scale) if math.isfinite(loss) else LOSS
        finally:
            if self._skipped:
                member.undo(saved)
        if not self._skipped:
            member.count(loss, sums)

    def _backward(
        self, batch: Tree, weights: Tensor | None, scale: float | None
    ) -> tuple[float, dict[str, Tensor | float]]:
        """Give the parameters their gradients. Return the loss, and what it adds to the sums of the epoch."""
        member, contexts = self._member, self._contexts
        if self._group is not None:
            with contexts.mode(train=True), contexts.autocast():
                return plain_parallel.backward(
                    self._group,
                    self.task,
                    self.model,
                    member.params,
                    (member.seed, member.step),
                    self._row_draws(batch),
                    batch,
                    weights,
                    scale,
                )
        with contexts.mode(train=True), contexts.draws("train"):
            with contexts.autocast():
                loss, sums, rows = self.task.measured(self.model, batch, weights)
            value = loss.item()
            if math.isfinite(value):
                (loss if scale is None else loss * scale).backward()
        return value, {**sums, "rows": rows}

    def _update(self, scale: float | None) -> int:
        """Update the parameters if all gradients are finite, and return the member's trouble."""
        member = self._member
        gradients = [p.grad for p in member.params.values() if p.grad is not None]
        if scale is not None and self._group is None:
            torch._foreach_div_(gradients, scale)
        if not plain_optimizer.finite(gradients):
            if scale is None:
                return GRADIENT
            member.scale, member.finite_steps = scale * 0.5, 0
            return SCALE if member.scale < SMALLEST_SCALE else FINE
        if self.task.clip:
            nn.utils.clip_grad_norm_(member.params.values(), member.hyper["clip_norm"])
        plain_optimizer.step(member.optimizer, member.params.values())
        self._skipped = False
        if scale is not None:
            member.finite_steps += 1
            if member.finite_steps >= GROWTH_STEPS:
                member.scale, member.finite_steps = scale * 2.0, 0
        return FINE

    # --- rows ----------------------------------------------------------------------------------------------------

    def split_rows_over(self, group: ProcessGroup | None) -> None:
        """Compute only this rank's rows of every train batch from now on. None for whole batches again."""
        self._group = group

    def why_rows_stay_together(self, batch: Batch) -> str | None:
        """Return why the rows of batches like this one can't be computed on several devices, or None."""
        rows = batch.member(0)
        found = self._trials.divide(rows, batch_parts.weighted_inputs(rows))
        return found if isinstance(found, str) else None

    def _row_draws(self, rows: Tree) -> DrawShapes:
        found = self._trials.divide(rows, batch_parts.weighted_inputs(rows))
        if isinstance(found, str):
            name = self._member.name
            raise StrategyError(f"member {name!r} can't be spread over several devices: {found}.")
        return found

    def can_mask_padding(self, batch: Batch) -> bool:
        """Return False: one member needs no padding."""
        return False

    def rows_are_independent(self, inputs: Tree) -> bool:
        """Return True if the output for a row depends on that row alone."""
        size = len(leaves(inputs)[0])
        if size not in self._independent_rows:
            self._independent_rows[size] = self._trials.are_independent(inputs)
        return self._independent_rows[size]

    # --- evaluating and predicting -------------------------------------------------------------------------------

    def epoch_values(self) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` since the last call. The next epoch starts at zero."""
        sums, self._member.sums = self._member.sums, {}
        if not sums:
            return dict.fromkeys(("loss", *(metric.name for metric in self.task.metrics)), np.array([np.nan]))
        return self.values(sums)

    def evaluate(self, totals: dict[str, Tensor | float] | None, batch: Batch) -> dict[str, Tensor | float]:
        """Return the sums of the loss and the metrics so far, with a batch added."""
        totals = {} if totals is None else totals
        if not batch.counts[0]:
            return totals
        weights = None if batch.weights is None else batch.weights[0]
        sums = self._contexts.evaluate(lambda: self.task.run(self.model, _own_copy(batch), weights)[1])
        return {name: totals.get(name, 0.0) + exact(total) for name, total in sums.items()}

    def values(self, totals: Mapping[str, Tensor | float]) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` of what `evaluate` added up."""
        tensors = {name: total.reshape(1) for name, total in totals.items() if isinstance(total, Tensor)}
        numbers = {name: np.array([total]) for name, total in totals.items() if name not in tensors}
        found = self._to_host(tensors) | numbers
        return self.task.values({name: found[name] for name in totals})

    def predict(self, batch: Batch, positions: Positions | None = None) -> Tree:
        """Return the outputs on the member's real rows, as NumPy arrays `(1, row, …)`."""
        count = int(batch.counts[0])

        def outputs() -> Tree:
            return logits(call(self.model, map_tree(lambda leaf: leaf[:count], _own_copy(batch))))

        return map_tree(lambda tensor: on_host(tensor)[None], self._contexts.evaluate(outputs))

    def undoing_changes(self) -> AbstractContextManager[None]:
        """Return a context that undoes what evaluating and predicting change in the model."""
        return undoing_own_changes(self.model)

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Return the state as a fused lane of this one member has it. Weights are views of the model's."""
        return self._member.state

    def read(self, positions: Positions, parts: Collection[str] | None = None) -> State:
        """Return a copy of the member's state, `(1, …)`."""
        return self._member.read(parts)

    def write(self, positions: Positions, state: Given) -> None:
        """Replace the member's state by part and name."""
        self._member.write(state)

    def adopt(self, positions: Positions, other: Engine, sources: Positions) -> None:
        """Copy the member's optimizer state and step count from another engine, as far as they still fit."""
        assert isinstance(other, TorchEngine)
        ((_, state),) = other.carried(sources)
        self._member.adopt(state)

    def carried(self, positions: Positions) -> list[tuple[list[int], State]]:
        """Return the optimizer's state and the step count for another engine to adopt."""
        # Several for a member that was cloned: each gets a copy of its own.
        return [([row], self._member.carried()) for row in range(len(positions))]

    def trouble(self) -> np.ndarray:
        """Return `(slot,)`: the member's trouble by the codes of `errors.REASONS`, 0 for none."""
        return np.array([self._member.trouble])

    def steps_taken(self) -> np.ndarray:
        """Return `(slot,)`: the number of steps that changed the weights."""
        return np.array([self._member.step], dtype=np.float64)

    def clear_trouble(self) -> None:
        """Clear the member's trouble at the start of a fit, and look at the model as it is now."""
        self._member.trouble = FINE
        self._contexts.reset()
        self._member.rebind()
        self._member.find_buffers()

    def give_slots(self, positions: Positions) -> None:
        """Do nothing: there is one member."""

    def still_shared(self, members: Sequence[Member]) -> bool:
        """Return True: one member shares nothing."""
        return True

    def objects(self) -> Iterable[tuple[str, nn.Module]]:
        """Return the modules of the model that is stepped."""
        return self.model.named_modules()

    def scatter(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the weights into the member's model, unless that is the one that is stepped."""
        if self.model is not members[0].model:
            copy_weights(self.model, members[0].model)

    def gather(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the weights from the member's model, unless that is the one that is stepped."""
        if self.model is not members[0].model:
            copy_weights(members[0].model, self.model)
        self._member.rebind()

    # --- checks --------------------------------------------------------------------------------------------------

    def ready(self, kind: Kind, hyper: Hyper, active: Tensor, batch: Batch) -> None:
        """Raise InputError if there is nothing to train, and StrategyError if the rows can't be divided."""
        if kind == "train" and not states.trained(self.model):
            raise InputError(
                f"member {self._member.name!r} has no parameter that takes a gradient. "
                f"Set requires_grad=True on what is to be trained."
            )
        if kind == "train" and self._group is not None:
            self._row_draws(batch.member(0))

    def check(self, batch: Batch, name: str) -> None:
        """Try a copy of the model on a batch before anything is trained.

        An objective is not called: it may count its calls, and the first step will show what is wrong with it.
        """
        if self.task.objective is None:
            self._trials.run(name, batch.member(0), lambda model, few: self.task.run(model, few, None))

    def output_shape(self, batch: Batch, name: str) -> tuple[int, ...] | None:
        """Return the shape `(row, …)` of the output for a batch, or None if it is no single tensor."""
        output = self._trials.run(name, self.inputs(batch.member(0)), lambda model, few: logits(call(model, few)))
        return tuple(output.shape) if isinstance(output, Tensor) else None

    def working_bytes(self, batch: Batch) -> int | None:
        """Return None: the memory of a plain step is not known before it runs."""
        return None


def _own_copy(batch: Batch, step: int | None = None) -> Tree:
    """Return a copy of the member's rows: a forward may write into its input."""
    shared = batch.shared
    if step is None:
        return map_tree(lambda leaf: leaf.clone() if shared else leaf[0].clone(), batch.data)
    return map_tree(lambda leaf: (leaf[step] if shared else leaf[step, 0]).clone(), batch.data)
