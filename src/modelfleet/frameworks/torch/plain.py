"""Engine of a lane of one torch member: its own module, eager autograd and `torch.optim`, as in a plain loop.

Models that can't be fused run here, and so does a fleet of one. The model itself runs: its hooks are called, its
Python state advances, its parameters are updated in place. Only two things differ from a loop written by hand.
Random draws come from the member's own stream, if the model draws any. And a step whose loss or gradient is not
finite is not taken: the member keeps its last good weights and buffers.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.errors import InputError, StrategyError
from modelfleet.frameworks import batches
from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.errors import FINE, GRADIENT, LOSS, SCALE
from modelfleet.frameworks.stacked import Given, Positions
from modelfleet.frameworks.torch import plain_optimizer, plain_parallel
from modelfleet.frameworks.torch import state as states
from modelfleet.frameworks.torch.base import Batch, TorchEngine, on_host
from modelfleet.frameworks.torch.plain_contexts import PlainContexts
from modelfleet.frameworks.torch.plain_member import PlainMember, copy_weights, exact
from modelfleet.frameworks.torch.plain_trials import PlainTrials
from modelfleet.frameworks.torch.process_group import ProcessGroup
from modelfleet.frameworks.torch.random.streams import DrawShapes
from modelfleet.frameworks.torch.task import Task, call, logits
from modelfleet.frameworks.torch.updating import GROWTH_STEPS, SMALLEST_SCALE
from modelfleet.members import Member
from modelfleet.trees import map_tree
from modelfleet.types import Kind, State, Tree


class PlainEngine(TorchEngine):
    """Engine of a lane of one torch member (see `frameworks.engine.Engine`)."""

    programs = None
    undoes_steps = True
    steps_per_call = 8  # steps a call: the overhead of a call costs as much as a small model's forward
    fused = False
    prospect = 1.0
    compiling = False
    untraced = None
    program = "plain torch"
    positions = slots = np.zeros(1, dtype=np.int64)

    def __init__(
        self, members: Sequence[Member], task: Task, columns: Mapping[str, np.ndarray], device: torch.device
    ) -> None:
        (member,) = members
        self.device = device
        self._member = PlainMember(member, task, columns, device)
        self._contexts = PlainContexts(self._member)
        self._trials = PlainTrials(self._member, self._contexts)
        self._group: ProcessGroup | None = None
        self._active: tuple[Tensor | None, bool] = None, True  # the last mask, and its value
        self._skipped = False  # True if the last step was not taken

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
        return weights + trained * len(self.task.optimizer.slots)

    def stop(self) -> None:
        """Drop the last step's gradients."""
        self._member.optimizer.zero_grad(set_to_none=True)

    # --- steps ---------------------------------------------------------------------------------------------------

    def train(
        self,
        hyper: Mapping[str, Tensor],
        active: Tensor,
        data: Tree,
        weights: Tensor | None,
        *,
        shared: bool,
        pace: tuple[int, float | None],
        steps: int | None = None,
    ) -> None:
        """Take one step, or several on data with a step axis."""
        self._member.use(hyper)
        weights = None if weights is None else weights[0]
        for step in range(steps or 1):
            if self._takes_part(active):
                self._take_step(_own_copy(data, shared, None if steps is None else step), weights)

    def train_some(
        self,
        slots: np.ndarray,
        hyper: Mapping[str, Tensor],
        data: Tree,
        *,
        shared: bool,
        pace: tuple[int, float | None],
    ) -> None:
        """Take one step on data that `cut` returned."""
        if self._member.trouble == FINE:
            self._member.use(hyper)
            self._take_step(_own_copy(data, shared), None)

    def gradients(self, data: Tree, weights: Tensor | None = None, *, shared: bool) -> dict[str, Tree]:
        """Return what `apply` needs of a batch. The model's buffers stay as they are."""
        member = self._member
        saved = member.save_buffers()
        member.optimizer.zero_grad(set_to_none=True)
        scale = self._loss_scale()
        try:
            loss, sums = self._backward(_own_copy(data, shared), None if weights is None else weights[0], scale)
            gradients = {name: p.grad.unsqueeze(0) for name, p in member.params.items() if p.grad is not None}
            buffers = {name: tensor.clone().unsqueeze(0) for name, tensor in self.model.named_buffers()}
        finally:
            member.undo(saved)
        gradients = member.stored({"gradients": gradients})["gradients"]
        return {"gradients": gradients, "loss": loss, "sums": sums, "buffers": buffers, "scale": scale}

    def apply(self, hyper: Mapping[str, Tensor], active: Tensor, gradients: dict[str, Tree]) -> None:
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
        member.optimizer.zero_grad(set_to_none=True)
        scale = self._loss_scale()
        self._skipped = True
        try:
            loss, sums = self._backward(batch, weights, scale)
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
            member.scale, member.good = scale * 0.5, 0
            return SCALE if member.scale < SMALLEST_SCALE else FINE
        if self.task.clip:
            nn.utils.clip_grad_norm_(member.params.values(), member.hyper["clip_norm"])
        member.optimizer.step()
        self._skipped = False
        if scale is not None:
            member.good += 1
            if member.good >= GROWTH_STEPS:
                member.scale, member.good = scale * 2.0, 0
        return FINE

    # --- rows ----------------------------------------------------------------------------------------------------

    def spread(self, group: ProcessGroup | None) -> None:
        """Compute only this rank's rows of every train batch from now on. None for whole batches again."""
        self._group = group

    def indivisible(self, data: Tree, *, shared: bool) -> str | None:
        """Return why the rows of batches like this one can't be computed on several devices, or None."""
        rows = _one_member(data, shared)
        found = self._trials.divide(rows, batches.weighted_inputs(rows))
        return found if isinstance(found, str) else None

    def _row_draws(self, rows: Tree) -> DrawShapes:
        found = self._trials.divide(rows, batches.weighted_inputs(rows))
        if isinstance(found, str):
            name = self._member.name
            raise StrategyError(f"member {name!r} can't be spread over several devices: {found}.")
        return found

    def maskable(self, batch: Batch) -> bool:
        """Return False: one member needs no padding."""
        return False

    def rows_apart(self, inputs: Tree) -> bool:
        """Return False: this is not known, and one member needs no padding."""
        return False

    # --- evaluating and predicting -------------------------------------------------------------------------------

    def epoch_values(self) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` since the last call. The next epoch starts at zero."""
        sums, self._member.sums = self._member.sums, {}
        if not sums:
            return dict.fromkeys(("loss", *(metric.name for metric in self.task.metrics)), np.array([np.nan]))
        return self.values(sums)

    def evaluate(
        self,
        totals: dict[str, Tensor | float] | None,
        slots: np.ndarray | None,
        data: Tree,
        weights: Tensor | None,
        counts: np.ndarray,
        size: int,
        *,
        shared: bool,
    ) -> dict[str, Tensor | float]:
        """Return the sums of the loss and the metrics so far, with a batch added."""
        totals = {} if totals is None else totals
        if not counts[0]:
            return totals
        weights = None if weights is None or slots is not None else weights[0]
        sums = self._contexts.evaluate(lambda: self.task.run(self.model, _own_copy(data, shared), weights)[1])
        return {name: totals.get(name, 0.0) + exact(total) for name, total in sums.items()}

    def values(self, totals: Mapping[str, Tensor | float]) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` of what `evaluate` added up."""
        return self.task.values({name: np.array([float(total)]) for name, total in totals.items()})

    def predict(self, data: Tree, *, shared: bool, counts: np.ndarray | None = None) -> Tree:
        """Return the outputs on a batch of inputs, without the slot axis."""
        return self._contexts.evaluate(lambda: logits(call(self.model, _own_copy(data, shared))))

    def predict_some(self, positions: Positions, data: Tree, counts: np.ndarray) -> Tree:
        """Return the outputs on the member's rows, as NumPy arrays `(1, row, …)`."""
        outputs = self.predict(map_tree(lambda leaf: leaf[:, : counts[0]], data), shared=False)
        return map_tree(lambda tensor: on_host(tensor)[None], outputs)

    def rows(self, outputs: Tree, slot: int, count: int) -> Tree:
        """Return the real rows of a batch of outputs, on the host."""
        return map_tree(lambda t: on_host(t[:count]), outputs)

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
        self._member.adopt(other.carried(sources[0]))

    def carried(self, position: int) -> State:
        """Return the optimizer's state and the step count for another engine to adopt."""
        return self._member.carried()

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

    def ready(self, kind: Kind, hyper: Mapping[str, Tensor], active: Tensor, data: Tree, *, shared: bool) -> None:
        """Raise InputError if there is nothing to train, and StrategyError if the rows can't be divided."""
        if kind == "train" and not states.trained(self.model):
            raise InputError(
                f"member {self._member.name!r} has no parameter that takes a gradient. "
                f"Set requires_grad=True on what is to be trained."
            )
        if kind == "train" and self._group is not None:
            self._row_draws(_one_member(data, shared))

    def check(self, batch: Batch, name: str) -> None:
        """Try a copy of the model on a batch before anything is trained.

        An objective is not called: it may count its calls, and the first step will show what is wrong with it.
        """
        if self.task.objective is None:
            data = _one_member(batch.data, batch.shared)
            self._trials.run(name, data, lambda model, few: self.task.run(model, few, None))

    def output_shape(self, batch: Batch, name: str) -> tuple[int, ...] | None:
        """Return the shape `(row, …)` of the output for a batch, or None if it is no single tensor."""
        inputs = _one_member(self.inputs(batch.data), batch.shared)
        output = self._trials.run(name, inputs, lambda model, few: logits(call(model, few)))
        return tuple(output.shape) if isinstance(output, Tensor) else None

    def working_bytes(self, batch: Batch) -> int | None:
        """Return None: the memory of a plain step is not known before it runs."""
        return None


def _one_member(data: Tree, shared: bool) -> Tree:
    return data if shared else map_tree(lambda leaf: leaf[0], data)


def _own_copy(data: Tree, shared: bool, step: int | None = None) -> Tree:
    """Return a copy of the member's batch: a forward may write into its input."""
    if step is None:
        return map_tree(lambda leaf: leaf.clone() if shared else leaf[0].clone(), data)
    return map_tree(lambda leaf: (leaf[step] if shared else leaf[step, 0]).clone(), data)
