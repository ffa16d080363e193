"""Engine of a lane of Keras models on torch."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.errors import InputError
from modelfleet.frameworks import batch_parts
from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.engine import Hyper
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.keras.losses import label_check
from modelfleet.frameworks.keras.optimizers import hyperparameters_in
from modelfleet.frameworks.keras.own_functions import evaluation_offset
from modelfleet.frameworks.keras.plain import become_plain
from modelfleet.frameworks.keras.task import Task, task_of
from modelfleet.frameworks.keras.torch.numbers import Numbers
from modelfleet.frameworks.keras.torch.steps import TorchSteps
from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.frameworks.stacked import Positions, StackedState, stack, with_all_names
from modelfleet.frameworks.torch.fused import state as states
from modelfleet.frameworks.torch.fused.program_engine import ProgramEngine, RowTrials
from modelfleet.frameworks.torch.fused.programs import Programs
from modelfleet.frameworks.torch.fused.stepping import Stepper
from modelfleet.frameworks.torch.fused.steps_protocol import ALONE, Tensors
from modelfleet.frameworks.torch.optimizers.counting import CoefficientsBySlice
from modelfleet.frameworks.torch.optimizers.slices import slices_of
from modelfleet.members import Member
from modelfleet.trees import map_tree
from modelfleet.types import Kind, Model, State, Tree


class KerasTorchEngine(ProgramEngine[TorchSteps]):
    """A fused torch engine that steps Keras models (see `frameworks.engine.Engine`)."""

    parts_in_models = ("params", "buffers", "optimizer")

    def __init__(self, context: LaneContext[Task, Programs[TorchSteps]]) -> None:
        """Stack the members' state, or use the programs of another engine."""
        members, programs = context.members, context.programs
        if programs is None or programs.steps.stale:
            made = Programs(TorchSteps(_first_models(context)), fused=context.fused)
            if programs is None:
                programs = made
            else:  # in place: other engines use these programs, too
                vars(programs).update(vars(made))
        steps = programs.steps
        self._members = list(members)
        self._first = members[0].name
        self._batch = 0  # the number of the next batch to evaluate or predict
        # Nothing is shared: every Keras model has its own variables.
        self._member_tasks = list(context.tasks)
        self._updates = np.array([steps.update_of[variant] for variant in context.variants], np.int64)
        self._numbers = Numbers(steps, context.variants, context.device)
        names = [tuple(own.keys["optimizer"]) for own in steps.updates]
        updates = _UpdateSlices(self._updates, names)
        stepper = Stepper(self._first, programs, {}, updates, variants=self._numbers)
        trials = RowTrials(steps.ignores_padding, steps.rows_are_independent)
        super().__init__(programs, stepper, trials, context.device)
        self.stacked = StackedState(self._from_models(members), len(members), states.Rows(context.device))

    def hyperparameters_in(self, tensors: Collection[str]) -> dict[str, str]:
        """Return the hyperparameters that are variables of the optimizer."""
        return hyperparameters_in(tensors)

    @property
    def task(self) -> Task:
        """Return the task of the first member."""
        return self._steps.task

    @property
    def _steps(self) -> TorchSteps:
        return self.programs.steps

    # --- steps ---------------------------------------------------------------------------------------------------

    def ready(self, kind: Kind, hyper: Hyper, active: Tensor, batch: Batch) -> None:
        """Trace a step for batches like this one, if that has not been done."""
        if kind == "train" and not self.state["params"]:
            raise InputError(
                f"member {self._first!r} has no trainable variable. Set trainable=True on what is to be trained."
            )
        self._batch = 0
        if kind != "predict":
            self._try_results()
        try:
            if kind == "train":
                self._compare_reading(batch)
                rest = (self.stepper.coefficients.one(self.state, hyper), active, batch.data, None)
                state = self.stepper.with_numbers(kind, self.state, batch, None)
                self.programs.ready_to_train((state, self.shared), rest, shared_data=batch.shared)
            else:
                state = self._reading(self.state, self.state["metrics"] if kind == "evaluate" else None)
                rest = (batch.data, None) if kind == "evaluate" else (batch.data,)
                state = self.stepper.with_numbers(kind, state, batch, None)
                self.programs.program(kind, (state, self.shared, *rest), batch.shared)
        except CannotFuseError as error:
            error.shared = False  # in a step, Keras writes only to its own tensors
            raise
        reason = self._steps.apart
        if reason is not None and len(self._members) > 1:
            raise CannotFuseError(reason)
        self._run_plainly()

    def _compare_reading(self, batch: Batch) -> None:
        """Raise `CannotFuseError` if members could be trained together, but not evaluated or asked to predict."""
        self.stepper.with_numbers("evaluate", self._reading(self.state, self.state["metrics"]), batch, None)
        inputs = replace(batch, data=self.inputs(batch.data))
        self.stepper.with_numbers("predict", self._reading(self.state), inputs, None)

    def _run_plainly(self) -> None:
        """Become an engine that calls the model's own functions, if its steps are not pure functions."""
        reason = self._steps.apart
        if reason is not None and len(self._members) == 1:
            become_plain(self, self._members, reason)

    def objects(self) -> Iterable[tuple[str, nn.Module]]:
        """Return the layers of the model that is traced for all members; none if no Python runs."""
        return () if self.untraced is None else super().objects()

    def epoch_values(self) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` since the last call, and start a new epoch."""
        found = self.values(self.state["metrics"])
        for name, fresh in self._steps.own.fresh_metrics().items():
            self.state["metrics"][name].copy_(fresh.detach())
        return found

    def evaluate(self, totals: Tensors | None, batch: Batch) -> Tensors:
        """Return the metrics `(slot, …)` so far with a batch added."""
        if totals is None:
            totals = self._fresh_metrics(self.stacked.width)
            self._batch = 0
        self._batch += 1
        there = self.tensor(np.flatnonzero(batch.counts > 0) if batch.slots is None else batch.slots)
        if batch.slots is None:
            added = self._added(self.state, totals, batch, None)
            if len(there) == self.stacked.width:
                return added
            added = map_tree(lambda t: t.index_select(0, there), added)
        else:
            some = map_tree(lambda t: t.index_select(0, there), totals)
            added = self._added(states.select(self.state, there), some, batch, self.slots[batch.slots])
        return {name: total.index_copy(0, there, added[name]) for name, total in totals.items()}

    def values(self, totals: Tensors) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` from the sums of `evaluate`, by the names of Keras's logs."""
        return self._to_host(self._steps.results(totals, fused=self.fused))

    def predict(self, batch: Batch, positions: Positions | None = None) -> Tree:
        """Return the outputs of some members, or of all, as NumPy arrays `(member, row, …)`."""
        self._batch += 1
        state = self.state if positions is None else self.read(positions, ("params", "buffers", "member"))
        rows = None if positions is None else np.asarray(positions)
        reading = self.stepper.with_numbers("predict", self._reading(state), batch, None, rows)
        return self.programs.predict((reading, self.shared, batch.data), shared_data=batch.shared)

    def inputs(self, data: Tree) -> Tree:
        """Return the x of (x,), (x, y) and (x, y, sample_weight), or the data themselves."""
        return batch_parts.weighted_inputs(data)

    # --- state ---------------------------------------------------------------------------------------------------

    def still_shared(self, members: Sequence[Member]) -> bool:
        """Return True if all members are compiled as they were when the lane was made."""
        if self._steps.stale:
            return False
        return all(task_of(m.model) is task for m, task in zip(members, self._member_tasks, strict=True))

    def optimizer_tensors(self, position: int) -> Collection[str] | None:
        """Return the names of the variables that a member's own optimizer has."""
        return self._steps.updates[self._updates[position]].keys["optimizer"]

    def _held_by(self, positions: Positions, members: Sequence[Member]) -> State:
        """Return the weights and the optimizer's variables that the models of some members hold.

        A member whose own optimizer does not have a variable has zeros there.
        """
        numbers = self._updates[np.asarray(positions, np.int64)]
        found = [self._steps.updates[own].state(m.model) for own, m in zip(numbers, members, strict=True)]
        if self._updates.any():
            found = with_all_names(found, torch.zeros_like)
        return stack(
            [{part: own[part] for part in self.parts_in_models} for own in found],
            lambda tensors: states.stack(tensors, self.device),
        )

    def scatter(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the state of some members into their models and optimizers."""
        state = self.stacked.read(positions, self.parts_in_models, copy=False)
        for row, (position, member) in enumerate(zip(positions, members, strict=True)):
            own = self._steps.updates[self._updates[position]]
            own.write_back(member.model, map_tree(lambda tensor, row=row: tensor[row], state))

    def give_slots(self, positions: Positions) -> None:
        """Give slots to these members from now on. The others rest."""
        super().give_slots(positions)
        self._numbers.slots = self.slots

    def gather(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the state that the models of some members hold into the state here."""
        self.write(positions, self._held_by(positions, members))

    # --- checks --------------------------------------------------------------------------------------------------

    def check(self, batch: Batch, name: str) -> None:
        """Try one member on two rows before the training, and allocate its metrics.

        Raises:
            InputError: The batch does not fit. The message has the shapes and the model's own error.
        """
        with self._trying(batch, name) as (one, few):
            for own in self._steps.by_variant:
                own.build(few)
            one["metrics"] = self._fresh_metrics(1)
            self._steps.evaluate(one, self.shared, few, None, ALONE)
            with suppress(Exception):  # a forward pass for training may assign values that the other does not
                self._steps.find_unused(one, self.shared, few, None, ALONE)
        width = len(self.state["member"]["seed"])
        self.state = {**self.state, "metrics": self._fresh_metrics(width)}
        self._run_plainly()

    def check_targets(self, output_shape: tuple[int, ...] | None, target: Tree, name: str | None) -> None:
        """Check all labels of a data set, if the loss takes labels."""
        whose = "" if name is None else f"member {name!r}: "
        check = None if output_shape is None else label_check(self._steps.model, output_shape, whose)
        if check is not None:
            check(target)

    def label_check(self, output_shape: tuple[int, ...] | None) -> Callable[[Tree], None] | None:
        """Return a function that raises for a batch with labels out of range; None if the loss takes none."""
        check = None if output_shape is None else label_check(self._steps.model, output_shape)
        if check is None:
            return None
        return lambda batch: check(batch[1]) if isinstance(batch, tuple) and len(batch) > 1 else None

    # --- helpers -------------------------------------------------------------------------------------------------

    def _try_results(self) -> None:
        # Metrics are read once an epoch. If this fails for all members at once, it must be known before.
        self._numbers.refuse_other_results(self.state)
        try:
            self.values(self.state["metrics"])
        except Exception as error:  # a metric may raise anything
            if self.fused:
                raise CannotFuseError(f"a metric can't be computed for all members at once: {error}") from error
            raise

    def _added(self, state: State, totals: Tensors, batch: Batch, positions: np.ndarray | None) -> Tensors:
        reading = self._reading(state, totals)
        reading = self.stepper.with_numbers("evaluate", reading, batch, batch.weights, positions)
        args = (reading, self.shared, batch.data, batch.weights)
        return self.programs.evaluate(args, shared_data=batch.shared)

    def _fresh_metrics(self, width: int) -> Tensors:
        fresh = self._steps.own.fresh_metrics()
        return {name: states.stack([value] * width, self.device) for name, value in fresh.items()}

    def _from_models(self, members: Sequence[Member]) -> State:
        """Allocate the stacked tensors: what the members' models hold, and everything else initial."""
        width = len(members)
        state = self._held_by(range(width), members)
        state["metrics"] = self._fresh_metrics(width)
        state["member"] = {
            "seed": torch.tensor([member.seed for member in members], device=self.device),
            "step": torch.zeros(width, dtype=states.exact(self.device), device=self.device),
            "trouble": torch.zeros(width, dtype=torch.int64, device=self.device),
        }
        return state

    def _reading(self, state: State, metrics: Tensors | None = None) -> State:
        """Return the parts of a state that a forward pass reads, and the metrics to add to, if given.

        Every batch of an evaluation draws its own random numbers, which differ from those of the steps.
        """
        seed = (state["member"]["seed"] + evaluation_offset(self._batch)) & (2**63 - 1)
        member = {"seed": seed, "step": state["member"]["step"]}
        found = {"params": state["params"], "buffers": state["buffers"], "member": member}
        return found if metrics is None else {**found, "metrics": metrics}


def apart(programs: Programs[TorchSteps]) -> str | None:
    """Return why a lane of these programs runs plainly, as far as is known."""
    return programs.steps.apart


def _first_models(context: LaneContext[Task, Programs[TorchSteps]]) -> list[tuple[Model, Task]]:
    """Return the model and the task of the first member of each variant."""
    return [(context.members[position].model, context.tasks[position]) for position in context.firsts]


class _UpdateSlices:
    """Slices of members with the same update, without numbers: a Keras optimizer keeps its numbers in variables.

    See `stepping.CoefficientSource`.
    """

    def __init__(self, numbers: np.ndarray, tensor_names: Sequence[tuple[str, ...]]) -> None:
        self._all, self._names = numbers, tensor_names
        self.give_slots(np.arange(len(numbers)))

    def next(self, state: State, hyper: Hyper, active: Tensor) -> CoefficientsBySlice:
        return self._current

    def one(self, state: State, hyper: Hyper, slots: np.ndarray | None = None) -> CoefficientsBySlice:
        return self._current if slots is None else self._of(self._numbers[slots])

    def _of(self, numbers: np.ndarray) -> CoefficientsBySlice:
        return {own: {} for own in slices_of(numbers, self._names)} if len(self._names) > 1 else {}

    def stepped(self, unused: frozenset[str] | None) -> None:
        pass

    def forget(self) -> None:
        pass

    def give_slots(self, positions: Positions) -> None:
        self._numbers = self._all[np.asarray(positions, np.int64)]
        self._current = self._of(self._numbers)
