"""Engine of a lane of Keras models on torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from modelfleet.errors import InputError
from modelfleet.frameworks import batches
from modelfleet.frameworks.engine import Hyper
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.keras.custom_objects import own_python
from modelfleet.frameworks.keras.losses import label_check
from modelfleet.frameworks.keras.own_functions import evaluation_offset
from modelfleet.frameworks.keras.plain import become_plain
from modelfleet.frameworks.keras.task import Task, task_of
from modelfleet.frameworks.keras.torch.steps import TorchSteps
from modelfleet.frameworks.stacked import Positions, StackedState, stack
from modelfleet.frameworks.torch import programs
from modelfleet.frameworks.torch import state as states
from modelfleet.frameworks.torch.base import on_host
from modelfleet.frameworks.torch.counting import Coefficients
from modelfleet.frameworks.torch.program_engine import ProgramEngine
from modelfleet.members import Member
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Kind, Model, State, Tree

if TYPE_CHECKING:
    from modelfleet.feeds import Batch


class KerasTorchEngine(ProgramEngine):
    """A fused torch engine that steps Keras models (see `frameworks.engine.Engine`)."""

    held = ("params", "buffers", "optimizer")

    def __init__(
        self,
        members: Sequence[Member],
        task: Task,
        columns: Mapping[str, np.ndarray],
        device: torch.device,
        *,
        fused: bool,
        programs: Any = None,
    ) -> None:
        if programs is None:
            programs = _programs(members[0].model, task, fused=fused)
        elif programs.steps.own.stale:  # in place: other engines use these programs, too
            vars(programs).update(vars(_programs(members[0].model, task, fused=fused)))
        self._members = list(members)
        self._batch = 0  # the number of the next batch to evaluate or predict
        # Nothing is `shared`: every Keras model has its own variables.
        super().__init__(members[0].name, programs, device)
        self.stacked = StackedState(self._from_models(members), len(members), states.Rows(device))

    @property
    def _steps(self) -> TorchSteps:
        found = self.programs.steps
        assert isinstance(found, TorchSteps)
        return found

    # --- steps ---------------------------------------------------------------------------------------------------

    def ready(self, kind: Kind, hyper: Hyper, active: Tensor, data: Tree, *, shared: bool) -> None:
        """Trace a step for batches like this one, if that has not been done."""
        if kind == "train" and not self.state["params"]:
            raise InputError(
                f"member {self._first!r} has no trainable variable. Set trainable=True on what is to be trained."
            )
        own = self._steps.own
        self._batch = 0
        if kind != "predict":
            self._try_results()
        args = {
            "train": (self.state, self.shared, {}, active, data, None),
            "evaluate": (self._reading(self.state, self.state["metrics"]), self.shared, data, None),
            "predict": (self._reading(self.state), self.shared, data),
        }
        try:
            self.programs.program(kind, args[kind], shared)
        except CannotFuseError as error:
            error.shared = False  # in a step, Keras writes only to its own tensors
            raise
        if own.apart is not None and len(self._members) > 1:
            raise CannotFuseError(own.apart)
        self._run_plainly()

    def _run_plainly(self) -> None:
        """Become an engine that calls the model's own functions, if its steps are not pure functions."""
        reason = self._steps.own.apart
        if reason is not None and len(self._members) == 1:
            become_plain(self, self._members, reason)

    def objects(self) -> Iterable[tuple[str, Any]]:
        """Return the layers of the model that is traced for all members; none if no Python runs."""
        return () if self.untraced is None else super().objects()

    def epoch_values(self) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` since the last call, and start a new epoch."""
        found = self.values(self.state["metrics"])
        for name, fresh in self._steps.own.fresh_metrics().items():
            self.state["metrics"][name].copy_(fresh.detach())
        return found

    def evaluate(
        self,
        totals: dict[str, Tensor] | None,
        slots: np.ndarray | None,
        data: Tree,
        weights: Tensor | None,
        counts: np.ndarray,
        size: int,
        *,
        shared: bool,
    ) -> dict[str, Tensor]:
        """Return the metrics `(slot, …)` so far with a batch added."""
        if totals is None:
            totals = self._fresh_metrics(len(counts))
            self._batch = 0
        self._batch += 1
        there = self.tensor(np.flatnonzero(counts > 0) if slots is None else slots)
        if slots is None:
            added = self._added(self.state, totals, data, weights, shared=shared)
            if len(there) == len(counts):
                return added
            added = map_tree(lambda t: t.index_select(0, there), added)
        else:
            some = map_tree(lambda t: t.index_select(0, there), totals)
            added = self._added(states.select(self.state, there), some, data, None, shared=shared)
        return {name: total.index_copy(0, there, added[name]) for name, total in totals.items()}

    def values(self, totals: dict[str, Tensor]) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` from the sums of `evaluate`, by the names of Keras's logs."""
        return self._to_host(self._steps.results(totals, fused=self.fused))

    def predict(self, data: Tree, *, shared: bool, counts: np.ndarray | None = None) -> Tree:
        """Return the outputs `(slot, row, …)` on a batch of inputs."""
        self._batch += 1
        args = (self._reading(self.state), self.shared, data)
        return self.programs.program("predict", args, shared)[0](leaves(args))

    def predict_some(self, positions: Positions, data: Tree, counts: np.ndarray) -> Tree:
        """Return the outputs of some members, each on its own rows, as NumPy arrays `(member, row, …)`."""
        self._batch += 1
        args = (self._reading(self.read(positions, ("params", "buffers", "member"))), self.shared, data)
        return map_tree(on_host, self.programs.program("predict", args, False)[0](leaves(args)))

    @staticmethod
    def inputs(data: Tree) -> Tree:
        """Return the x of (x,), (x, y) and (x, y, sample_weight), or the batch itself."""
        return batches.weighted_inputs(data)

    def maskable(self, batch: "Batch") -> bool:
        """Return True if row weights can remove the influence of padding, by a trial on one member."""
        if not self._steps.own.maskable:
            return False
        real = int(batch.counts[batch.counts > 0].min())
        key = (real, batch.size)
        if key not in self._ignores_padding:
            slot = int(np.flatnonzero(batch.counts == real)[0])
            data = batch.data if batch.shared else map_tree(lambda leaf: leaf[slot], batch.data)
            one = states.select(self.state, self.tensor(np.array([slot])))
            self._ignores_padding[key] = self._steps.ignores_padding(one, data, real)
        return self._ignores_padding[key]

    def _rows_are_independent(self, inputs: Tree) -> bool:
        return self._steps.rows_apart(states.select(self.state, self.tensor(np.array([0]))), inputs)

    # --- state ---------------------------------------------------------------------------------------------------

    def still_shared(self, members: Sequence[Member]) -> bool:
        """Return True if all members are compiled as they were when the lane was made."""
        return not self._steps.own.stale and all(task_of(member.model) is self.task for member in members)

    def _held_by(self, members: Sequence[Member]) -> State:
        """Return the weights and the optimizer's variables that the models of some members hold."""
        found = [self._steps.own.state(member.model) for member in members]
        return stack(
            [{part: own[part] for part in self.held} for own in found],
            lambda tensors: states.stack(tensors, self.device),
        )

    def scatter(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the state of some members into their models and optimizers."""
        state = self.stacked.read(positions, self.held, copy=False)
        for row, member in enumerate(members):
            self._steps.own.write_back(member.model, map_tree(lambda tensor, row=row: tensor[row], state))

    def gather(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the state that the models of some members hold into the state here."""
        self.write(positions, self._held_by(members))

    # --- checks --------------------------------------------------------------------------------------------------

    def check(self, batch: "Batch", name: str) -> None:
        """Try one member on two rows before the training, and allocate its metrics.

        Raises:
            InputError: The batch does not fit. The message has the shapes and the model's own error.
        """
        with self._trying(batch, batch.data, name) as (one, few):
            self._steps.own.build(few)
            one["metrics"] = self._fresh_metrics(1)
            self._steps.evaluate(one, self.shared, few, None, shared_data=True, fused=False)
            with suppress(Exception):  # a forward pass for training may assign values that the other does not
                self._steps.find_unused(one, self.shared, few, None, shared_data=True)
        width = len(self.state["member"]["seed"])
        self.state = {**self.state, "metrics": self._fresh_metrics(width)}
        self._run_plainly()

    @property
    def checks_targets(self) -> bool:  # pyrefly: ignore
        """Return True: a Keras model is called on x, whatever its loss is."""
        return True

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
        try:
            self.values(self.state["metrics"])
        except Exception as error:  # a metric may raise anything
            if self.fused:
                raise CannotFuseError(f"a metric can't be computed for all members at once: {error}") from error
            raise

    def _added(
        self, state: State, totals: dict[str, Tensor], data: Tree, weights: Tensor | None, *, shared: bool
    ) -> dict[str, Tensor]:
        args = (self._reading(state, totals), self.shared, data, weights)
        return self.programs.program("evaluate", args, shared)[0](leaves(args))

    def _fresh_metrics(self, width: int) -> dict[str, Tensor]:
        fresh = self._steps.own.fresh_metrics()
        return {name: states.stack([value] * width, self.device) for name, value in fresh.items()}

    def _next_coefficients(self, hyper: Mapping[str, Tensor], active: Tensor) -> Coefficients:
        return {}  # a Keras optimizer keeps its numbers in variables

    def _coefficients_for(self, state: State, hyper: Mapping[str, Tensor]) -> Coefficients:
        return {}

    def _from_models(self, members: Sequence[Member]) -> State:
        state = self._held_by(members)
        width = len(members)
        state["metrics"] = self._fresh_metrics(width)
        state["member"] = {
            "seed": torch.tensor([member.seed for member in members], device=self.device),
            "step": torch.zeros(width, dtype=states.exact(self.device), device=self.device),
            "trouble": torch.zeros(width, dtype=torch.int64, device=self.device),
        }
        return state

    def _reading(self, state: State, metrics: dict[str, Tensor] | None = None) -> State:
        """Return the parts of a state that a forward pass reads, and the metrics to add to, if given.

        Every batch of an evaluation draws its own random numbers, which differ from those of the steps.
        """
        seed = (state["member"]["seed"] + evaluation_offset(self._batch)) & (2**63 - 1)
        member = {"seed": seed, "step": state["member"]["step"]}
        found = {"params": state["params"], "buffers": state["buffers"], "member": member}
        return found if metrics is None else {**found, "metrics": metrics}


class _Programs(programs.Programs):
    """Programs of a lane of Keras models."""

    def _roots(self) -> list[tuple[str, Any]]:
        return own_python(self.steps.model)

    def _refuse_other_parameters(self, kind: str, args: tuple[Any, ...]) -> None:
        """Do nothing: a layer frozen in the middle of a fit counts from the next compile on, as in Keras."""

    def serve(self, model: Model) -> None:
        """Do nothing: the steps keep the model that they were made of, until it is stale."""


def _programs(model: Model, task: Any, *, fused: bool) -> programs.Programs:
    made = _Programs(model, task, fused=fused)
    made.steps = TorchSteps(model, task)
    return made
