"""Engine of a fused lane of torch modules: their stacked state on a device, and the programs that step it."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.errors import InputError, StrategyError
from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.stacked import CARRIED, WEIGHTS, Positions, StackedState, fitting
from modelfleet.frameworks.torch import state as states
from modelfleet.frameworks.torch.base import Batch, TorchEngine, on_host
from modelfleet.frameworks.torch.compiling.compiler import compile_mode
from modelfleet.frameworks.torch.model_locks import borrowed, held
from modelfleet.frameworks.torch.program_engine import ProgramEngine, batch_form, batch_layout
from modelfleet.frameworks.torch.programs import Programs, readable
from modelfleet.frameworks.torch.python_state.checks import DivergenceCheck
from modelfleet.frameworks.torch.row_independence import ignores_padding, rows_are_independent
from modelfleet.frameworks.torch.structure import shared_parameters
from modelfleet.frameworks.torch.task import Task
from modelfleet.frameworks.torch.updating import INITIAL_SCALE
from modelfleet.members import Member
from modelfleet.trees import leaves, map_tree, map_trees
from modelfleet.types import Kind, State, Tree


class FusedEngine(ProgramEngine):
    """Engine of a lane of torch members that are stepped by one program (see `frameworks.engine.Engine`)."""

    def __init__(
        self,
        members: Sequence[Member],
        task: Task,
        columns: Mapping[str, np.ndarray],
        device: torch.device,
        *,
        fused: bool,
        programs: Programs | None = None,
    ) -> None:
        models = [member.model for member in members]
        if programs is None:
            programs = Programs(models[0], task, fused=fused)
        programs.serve(models[0])
        named = [(member.name, member.model) for member in members]
        divergence = DivergenceCheck(named) if len(named) > 1 else None
        super().__init__(members[0].name, programs, device, divergence=divergence)
        shared = shared_parameters(models) if len(models) > 1 else set()
        first = {**dict(models[0].named_parameters()), **dict(models[0].named_buffers())}
        self.shared = {
            name: states.placed(first[name], device, transpose=name in self.layout) for name in sorted(shared)
        }
        self.stacked = StackedState(self._initial_state(members, columns), len(members), states.Rows(device))
        self._columns = dict(columns)
        # By position: the model, and the parameters that were stacked.
        self._sources = [(model, self._trained(model)) for model in models]
        self._frozen_optimizer: dict[int, dict[str, Tensor]] = {}  # by position: state of parameters frozen now

    def _initial_state(self, members: Sequence[Member], columns: Mapping[str, np.ndarray]) -> State:
        """Return the state of members at the start: the weights of their models, and everything else initial."""
        state = self._weights_of(members)
        hyper = {name: self.tensor(column) for name, column in columns.items()}
        made = {name: self.task.optimizer.initial(p, hyper) for name, p in state["params"].items()}
        state["optimizer"] = {
            f"{slot}/{name}": tensors[slot] for slot in self.task.optimizer.slots for name, tensors in made.items()
        }
        width = len(members)
        state["member"] = {
            "seed": torch.tensor([member.seed for member in members], device=self.device),
            "step": torch.zeros(width, dtype=states.exact(self.device), device=self.device),
            "trouble": torch.zeros(width, dtype=torch.int64, device=self.device),
        }
        if self.task.precision == "fp16":
            state["member"]["scale"] = torch.full((width,), INITIAL_SCALE, device=self.device)
            state["member"]["good"] = torch.zeros(width, dtype=torch.int64, device=self.device)
        state["sums"] = {}
        return state

    # --- programs ------------------------------------------------------------------------------------------------

    def ready(self, kind: Kind, hyper: Mapping[str, Tensor], active: Tensor, data: Tree, *, shared: bool) -> None:
        """Trace a step for batches like this one, if that has not been done.

        Raises:
            CannotFuseError: The step can't be fused.
            InputError: There is nothing to train.
            StrategyError: The rows of the batch can't be divided over the ranks of the group.
        """
        self._check_members()
        if kind == "train":
            compile_mode()  # raises for a misspelt mode before the first step
            if not self.state["params"]:
                raise InputError(
                    f"member {self._first!r} has no parameter that takes a gradient. "
                    f"Set requires_grad=True on what is to be trained."
                )
            if self._group is not None:
                self._check_divisible(data, shared=shared)
                # A rank without rows traces one row, so that all ranks find the same.
                part = self._division.own_rows(self._group, data, None, shared=shared)
                part = part or self._division.cut(data, None, (0, 1), shared=shared)
                self.programs.program("row_gradients", (self.state, self.shared, *part), shared)
                return
            rest: tuple[Tree, ...] = (self._coefficients_for(self.state, hyper), active, data, None)
            self.programs.program("train", (self.state, self.shared, *rest), shared)
            return
        rest = (data,)
        if kind == "evaluate":
            size = leaves(data)[0].shape[0 if shared else 1]
            rest = data, self.row_weights(np.full(len(active), size), size)
        self.programs.program(kind, (readable(self.state), self.shared, *rest), shared)

    def _run(self, kind: Kind, state: State, data: Tree, *weights: Tensor, shared: bool) -> Tree:
        """Evaluate or predict: all members at once, or one after the other if a batch can't be fused."""
        try:
            self._refuse_unfusable(kind, data, shared=shared)
            with self._refusing_state():
                return getattr(self.programs, kind)((state, self.shared, data, *weights), shared_data=shared)
        except CannotFuseError as error:
            self._unfusable[kind, batch_form(data, shared)] = error
        steps, found = self.programs.steps, []
        for slot in range(len(state["member"]["seed"])):
            rows = torch.tensor([slot], device=self.device)
            one = states.select(state, rows)
            own = data if shared else map_tree(lambda leaf, slot=slot: leaf[slot : slot + 1], data)
            with borrowed(steps, train=False):
                rest = [weight[slot : slot + 1] for weight in weights]
                found.append(getattr(steps, kind)(one, self.shared, own, *rest, shared_data=shared, fused=False))
            states.put(state["buffers"], rows, one["buffers"])
        return map_trees(torch.cat, found)

    def epoch_values(self) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` since the last call. The next epoch starts at zero."""
        self._checked = False
        sums = self._to_host(self.state["sums"])
        for total in self.state["sums"].values():
            total.zero_()
        return self.task.values(sums)

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
        """Return the sums `(slot,)` of the loss and the metrics so far, with a batch added."""
        sums = self._sums(slots, data, weights, counts, size, shared=shared)
        return sums if totals is None else {name: totals[name] + value for name, value in sums.items()}

    def values(self, totals: dict[str, Tensor]) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` of what `evaluate` added up."""
        return self.task.values(self._to_host(totals))

    def _sums(
        self,
        slots: np.ndarray | None,
        data: Tree,
        weights: Tensor | None,
        counts: np.ndarray,
        size: int,
        *,
        shared: bool,
    ) -> dict[str, Tensor]:
        """Return the sums of one batch, zero for members without rows in it."""
        if slots is None:
            if weights is None:
                weights = self.row_weights(np.where(counts > 0, size, 0), size)
            sums = self._run("evaluate", self.state, data, weights, shared=shared)
            has_rows = self.tensor(counts > 0)
            return {name: torch.where(has_rows, value, 0.0).double() for name, value in sums.items()}
        rows = self.tensor(slots)
        part = states.select(self.state, rows)
        weights = torch.ones(len(slots), int(counts[slots[0]]), device=self.device)
        sums = self._run("evaluate", part, data, weights, shared=shared)
        empty = torch.zeros(len(counts), dtype=torch.float64, device=self.device)
        return {name: empty.index_copy(0, rows, value.double()) for name, value in sums.items()}

    def predict(self, data: Tree, *, shared: bool, counts: np.ndarray | None = None) -> Tree:
        """Return the outputs `(slot, row, …)` on a batch of inputs."""
        return self._run("predict", self.state, data, shared=shared)

    def predict_some(self, positions: Positions, data: Tree, counts: np.ndarray) -> Tree:
        """Return the outputs of some members, each on rows of its own, as NumPy arrays `(member, row, …)`."""
        state = self.read(positions, (*WEIGHTS, "member"))
        outputs = self._run("predict", state, data, shared=False)
        if self.programs.steps.counting is not None:
            own = np.flatnonzero(counts)
            buffers = states.select({"buffers": state["buffers"]}, self.tensor(own))
            self.write(np.asarray(positions)[own], buffers)
        return map_tree(on_host, outputs)

    # --- rows and checks -----------------------------------------------------------------------------------------

    def maskable(self, batch: Batch) -> bool:
        """Return True if padded rows can be weighted out without changing the result.

        BatchNorm, for example, depends on every row of a batch. So for one member, a step on a padded batch is
        compared with a step on the real rows alone.
        """
        if not self.task.maskable:
            return False
        real = int(batch.counts[batch.counts > 0].min())
        key = (real, batch.size)
        if key not in self._ignores_padding:
            data = batch.data
            if not batch.shared:
                data = map_tree(lambda leaf: leaf[int(np.flatnonzero(batch.counts == real)[0])], data)
            self._ignores_padding[key] = ignores_padding(self.programs.steps, self.state, self.shared, data, real)
        return self._ignores_padding[key]

    def _rows_are_independent(self, inputs: Tree) -> bool:
        return rows_are_independent(self.programs.steps, self.state, self.shared, inputs)

    def check(self, batch: Batch, name: str) -> None:
        """Try one member on a batch before anything is trained, and allocate the sums of its metrics.

        Raises:
            InputError: The model can't take the batch. The message has the shapes, and what the model raised.
        """

        def sums() -> list[str]:
            with self._trying(batch, batch.data, name) as (one, few):
                weights = torch.ones(1, len(leaves(few)[0]), device=self.device)
                steps = self.programs.steps
                return list(steps.evaluate(one, self.shared, few, weights, shared_data=True, fused=False))

        names = self.programs.found(("sums", *batch_layout(batch.data, batch.shared)), sums)
        width, dtype = len(self.state["member"]["seed"]), states.exact(self.device)
        zeros = {name: torch.zeros(width, dtype=dtype, device=self.device) for name in names}
        self.state = {**self.state, "sums": zeros}  # a new dict: programs list the tensors of each only once

    # --- state ---------------------------------------------------------------------------------------------------

    def _weights_of(self, members: Sequence[Member]) -> State:
        """Return the weights that the models of some members hold."""
        parts = {"params": states.trained, "frozen": states.kept, "buffers": states.buffers}
        state: State = {}
        for part, find in parts.items():
            found = [find(member.model) for member in members]
            state[part] = {
                name: states.stack(
                    [tensors[name] for tensors in found], self.device, transpose=name in self.layout
                )
                for name in found[0]
                if name not in self.shared
            }
        return state

    def scatter(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the weights of some members into their models."""
        state = self.stacked.read(positions, WEIGHTS, copy=False)
        with held(self.programs.steps.model):
            states.write_back([member.model for member in members], state, self.layout)

    def gather(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the weights of some members' models into the state here.

        The optimizer's state of a parameter that the user has replaced starts again.

        Raises:
            StrategyError: A parameter was frozen or unfrozen since the members were stacked.
        """
        for member in members:
            switched = self._trained(member.model).keys() ^ self.state["params"].keys()
            if switched:
                raise StrategyError(
                    f"member {member.name!r}: {min(switched)!r} was frozen or unfrozen in the middle of a fit, "
                    f'and the member is fused with others. Use strategy="interleaved", or do it between two fits.'
                )
        with held(self.programs.steps.model):
            weights = self._weights_of(members)
        self.write(positions, weights)
        for row, (position, member) in enumerate(zip(positions, members, strict=True)):
            hyper = {key: self.tensor(column[[position]]) for key, column in self._columns.items()}
            for name in self._replaced(position):
                initial = self.task.optimizer.initial(weights["params"][name][row : row + 1], hyper)
                state = {"optimizer": {f"{slot}/{name}": tensor for slot, tensor in initial.items()}}
                self.write([position], state)
            self._sources[position] = member.model, self._trained(member.model)
        own = {**dict(members[0].model.named_parameters()), **dict(members[0].model.named_buffers())}
        for name, tensor in self.shared.items():
            tensor.copy_(states.placed(own[name], self.device, transpose=name in self.layout))

    def adopt(self, positions: Positions, other: Engine, sources: Positions) -> None:
        """Copy optimizer state and step counts of some members from another engine, as far as they still fit.

        The state of a parameter that is frozen now is kept until the parameter is trained again, as `torch.optim`
        does. A parameter that has another shape now starts at its initial state.
        """
        assert isinstance(other, TorchEngine)
        for position, source in zip(positions, sources, strict=True):
            theirs = other.carried(source)
            stored = {**theirs, "optimizer": self._transposed(theirs["optimizer"])}
            self.write([position], fitting(stored, self.state, parts=CARRIED))
            self._frozen_optimizer[position] = {
                name: tensor for name, tensor in theirs["optimizer"].items() if name not in self.state["optimizer"]
            }

    def carried(self, position: int) -> State:
        """Return a member's optimizer state and step count for another engine to adopt.

        The tensors have the layout of the model's parameters, not the one that they are stored in here. Parameters
        that are frozen now are included. Parameters that the user has replaced are not.
        """
        own = self.read([position], tuple(CARRIED))
        optimizer = {**self._frozen_optimizer.get(position, {}), **self._transposed(own["optimizer"])}
        replaced = self._replaced(position)
        own["optimizer"] = {name: t for name, t in optimizer.items() if name.partition("/")[2] not in replaced}
        return own

    def _transposed(self, optimizer: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return an optimizer's tensors in the layout of the model's parameters, or back from it."""
        return {name: states.turned(name.partition("/")[2], t, self.layout) for name, t in optimizer.items()}

    def _trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters that a step changes. Parameters that all members share are only read."""
        return {name: parameter for name, parameter in states.trained(model).items() if name not in self.shared}

    def _replaced(self, position: int) -> set[str]:
        """Return the parameters of a member's model that the user has replaced since they were stacked."""
        model, before = self._sources[position]
        current = dict(model.named_parameters())
        return {name for name, parameter in before.items() if current.get(name) is not parameter}

    def still_shared(self, members: Sequence[Member]) -> bool:
        """Return True if the tensors that all members shared are still the same in all of them."""
        if not self.shared:
            return True
        return self.shared.keys() <= shared_parameters([member.model for member in members])

    def clear_trouble(self) -> None:
        """Clear every member's trouble at the start of a fit, and the gradients of an earlier backward."""
        for _, parameters in self._sources:
            for parameter in parameters.values():
                parameter.grad = None
        super().clear_trouble()
