"""The engine of a fused lane: the stacked state of its members on a device, and the programs that step it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.errors import InputError, StrategyError
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.stacked import WEIGHTS, Positions, StackedState, fitting
from modelfleet.frameworks.stacked_engine import StackedEngine
from modelfleet.frameworks.torch import malloc
from modelfleet.frameworks.torch import state as states
from modelfleet.frameworks.torch.base import CARRIED, TorchEngine, explained, on_host
from modelfleet.frameworks.torch.compiling.compiler import compile_mode
from modelfleet.frameworks.torch.counting import Ahead, Coefficients
from modelfleet.frameworks.torch.process_group import ProcessGroup
from modelfleet.frameworks.torch.programs import Programs, borrowed, held, readable
from modelfleet.frameworks.torch.python_state.checks import DivergenceCheck, StatefulError
from modelfleet.frameworks.torch.random.streams import DrawShapes
from modelfleet.frameworks.torch.row_independence import divide_by_rows, ignores_padding, rows_are_independent
from modelfleet.frameworks.torch.structure import shared_parameters
from modelfleet.frameworks.torch.task import Task
from modelfleet.members import Member
from modelfleet.trees import leaves, map_tree, map_trees, paths
from modelfleet.types import State

FIRST_SCALE = 65536.0  # torch.amp.GradScaler's


class FusedEngine(TorchEngine, StackedEngine):
    """The engine of a lane of torch members that are stepped by one program (see `frameworks.engine.Engine`)."""

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
        self._begin(members[0].name, programs, device)
        named = [(member.name, member.model) for member in members]
        self._alike = DivergenceCheck(named) if len(named) > 1 else None
        shared = shared_parameters(models) if len(models) > 1 else set()
        first = {**dict(models[0].named_parameters()), **dict(models[0].named_buffers())}
        self.shared = {
            name: states.placed(first[name], device, transpose=name in self.layout) for name in sorted(shared)
        }
        self.stacked = StackedState(self._stacked(members, columns), len(members), states.Rows(device))
        self._columns = dict(columns)
        self._owned = [(member.model, self._trained(member.model)) for member in members]

    def _begin(self, first: str, programs: Programs, device: torch.device) -> None:
        """Everything but the members' numbers, which `state` and `shared` will hold."""
        malloc.keep_pages_for(device)
        self.device = device
        self.programs = programs
        self.layout = programs.steps.layout
        self.shared: dict[str, Tensor] = {}
        self._owned: list[tuple[nn.Module, dict[str, nn.Parameter]]] = []  # the parameters that were stacked
        self._first = first
        self._ahead = Ahead(programs.task)
        self._resting: dict[int, dict[str, Tensor]] = {}  # by member: the optimizer's state of what is frozen now
        self.steps_per_call = 1
        self._begun = False  # whether a step was taken since the members were last looked at
        self._bears_padding: dict[tuple[int, int], bool] = {}
        self._rows_apart: dict[int, bool] = {}  # by the size of a batch
        self._group: ProcessGroup | None = None
        self._divided: dict[Any, DrawShapes] = {}  # by the form of a batch: what its rows draw
        self._places: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._unfusable: dict[Any, CannotFuseError] = {}  # by kind and form of a batch

    @property
    def parameters(self) -> int:
        """Trained numbers per member."""
        return sum(tensor[0].numel() for tensor in self.state["params"].values())

    @property
    def bytes(self) -> int:
        """What the state takes on the device."""
        own = sum(tensor.nbytes for tensor in states.tensors(self.state))
        return own + sum(tensor.nbytes for tensor in self.shared.values())

    @property
    def task(self) -> Task:
        """What the members are to do."""
        return self.programs.task

    @property
    def fused(self) -> bool:
        """Whether a step is one program for all members."""
        return self.programs.fused

    @property
    def program(self) -> str:
        """How the train steps run, in a word."""
        return self.programs.description

    @property
    def untraced(self) -> str | None:
        """Why every step runs its Python, if it does."""
        return self.programs.untraced

    @property
    def compiling(self) -> bool:
        """Whether a program is being compiled beside the training now."""
        return self.programs.compiling

    @property
    def prospect(self) -> float:
        """What compiling will leave of a step's time, if it is still to come."""
        return self.programs.prospect

    def stop(self) -> None:
        """End every compiler that is still at work."""
        self.programs.stop()

    # --- steps ---------------------------------------------------------------------------------------------------

    def train(
        self,
        hyper: Any,
        active: Tensor,
        data: Any,
        weights: Tensor | None,
        *,
        shared: bool,
        pace: Any,
        steps: int | None = None,
    ) -> None:
        """One step of the active members, or several on data with a step axis."""
        for step in range(steps or 0):
            self.train(
                hyper, active, map_tree(lambda t, step=step: t[step], data), weights, shared=shared, pace=pace
            )
        if steps is not None:
            return
        rest = (self._next_coefficients(hyper, active), active, data, weights)
        self._step(self.state, rest, shared=shared, pace=pace)

    def gradients(self, data: Any, weights: Tensor | None = None, *, shared: bool) -> dict[str, Any]:
        """Return what a step of every member makes of a batch before its optimizer does."""
        lead = (self.state, self.shared)
        with self._unfused_too_late():
            return self.programs.gradients(lead, (data, weights), shared_data=shared)

    def apply(self, hyper: Any, active: Tensor, gradients: dict[str, Any]) -> None:
        """Update the active members by what `gradients` returned."""
        rest = (self._next_coefficients(hyper, active), active, gradients)
        with self._unfused_too_late():
            self.programs.apply("apply", (self.state, self.shared), rest)
        self._ahead.stepped(None)

    def train_some(self, slots: np.ndarray, hyper: Any, data: Any, *, shared: bool, pace: Any) -> None:
        """One step of the members in some slots, on data cut for them."""
        rows = self.tensor(slots)
        part = states.select(self.state, rows)
        some = {name: column.index_select(0, rows) for name, column in hyper.items()}
        active = torch.ones(len(slots), dtype=torch.bool, device=self.device)
        self._ahead.forget()
        rest = (self._coefficients(part, some), active, data, None)
        self._step(part, rest, shared=shared, pace=pace)
        states.put(self.state, rows, part)

    def spread(self, group: ProcessGroup | None) -> None:
        """Compute only this rank's rows of every train batch from now on, together with the group's other ranks.

        Each rank is given the whole batch and takes the same steps. Evaluating and predicting stay whole on every
        rank. A loss that can't be told row by row (a function, an objective, the output's own `.loss`) must be
        the mean over the rows it sees. `ready` and the first step raise `StrategyError` for a model that can't be
        cut by rows. None: whole batches again.
        """
        self._group = group
        self._places = {}

    def indivisible(self, data: Any, *, shared: bool) -> str | None:
        """Why the rows of batches like this one can't be spread over devices, and what to do; None if they can."""
        rows = data if shared else map_tree(lambda leaf: leaf[0], data)
        form = len(leaves(rows)[0]) == 1, *(leaf.shape[1:] for leaf in leaves(rows))  # a single row tells little
        if form not in self._divided:
            found = divide_by_rows(self.programs.steps, self.state, self.shared, rows, self.inputs(rows))
            if isinstance(found, str):
                return found
            self._divided[form] = found
        self.programs.steps.draws = self._divided[form]
        return None

    def _step(self, state: State, rest: tuple[Any, ...], *, shared: bool, pace: Any) -> None:
        """One train step of a state, alone or with the other ranks.

        A batch of a form that can't be fused raises `CannotFuseError`, unless it is for one member alone.
        """
        if not self._begun:
            with self._unfused_too_late():
                self._look_at_members()
        lead = (state, self.shared)
        if self._group is None:
            try:
                self._refuse_unfusable("train", rest[2], shared=shared)
                with self._unfused_too_late():
                    unused = self.programs.train(lead, rest, shared_data=shared, pace=pace)
                self._ahead.stepped(unused if self.fused else None)
                return
            except CannotFuseError as error:
                self._unfusable["train", _form(rest[2], shared)] = error
                if len(state["member"]["seed"]) > 1:
                    raise
            steps = self.programs.steps
            with borrowed(steps, train=True):
                steps.train(*lead, *rest, shared_data=shared, fused=False)
            self._ahead.stepped(None)
            return
        coefficients, active, data, weights = rest
        self._check_divisible(data, shared=shared)
        part = self._own_rows(data, weights, shared=shared)
        if part is None:
            flat, columns = self.programs.steps.nothing(state)
        else:
            flat, columns = self.programs.row_gradients(lead, part, shared_data=shared, pace=pace)
        self._group.sum([flat, columns])
        self.programs.apply("row_apply", lead, (coefficients, active, flat, columns))
        self._ahead.stepped(None)

    def _refuse_unfusable(self, kind: str, data: Any, *, shared: bool) -> None:
        """Raise `CannotFuseError` for batches of a form that was found not to fuse: they are not traced again."""
        known = self._unfusable.get((kind, _form(data, shared))) if self._unfusable else None
        if known is not None:
            raise known

    def _looked(self, kind: str, state: State, data: Any, *weights: Tensor, shared: bool) -> Any:
        """Evaluate or predict: all members at once, or one after the other where a batch can't be fused."""
        try:
            self._refuse_unfusable(kind, data, shared=shared)
            with self._unfused_too_late():
                return getattr(self.programs, kind)((state, self.shared, data, *weights), shared_data=shared)
        except CannotFuseError as error:
            self._unfusable[kind, _form(data, shared)] = error
        steps, found = self.programs.steps, []
        for row in range(len(state["member"]["seed"])):
            one = states.select(state, torch.tensor([row], device=self.device))
            own = data if shared else map_tree(lambda leaf, row=row: leaf[row : row + 1], data)
            with borrowed(steps, train=False):
                rest = [weight[row : row + 1] for weight in weights]
                found.append(getattr(steps, kind)(one, self.shared, own, *rest, shared_data=shared, fused=False))
            states.put(state["buffers"], torch.tensor([row], device=self.device), one["buffers"])
        return map_trees(torch.cat, found)

    def _own_rows(self, data: Any, weights: Tensor | None, *, shared: bool) -> tuple[Any, ...] | None:
        """This rank's rows of a batch, their weights, and their place in it; None if it has no rows."""
        assert self._group is not None
        start, end = self._group.rows(leaves(data)[0].shape[0 if shared else 1])
        return None if start == end else self._cut(data, weights, (start, end), shared=shared)

    def _cut(
        self, data: Any, weights: Tensor | None, rows: tuple[int, int], *, shared: bool
    ) -> tuple[Any, Tensor | None, dict[str, Tensor]]:
        axis, (start, end) = 0 if shared else 1, rows
        count = leaves(data)[0].shape[axis]
        if (start, count) not in self._places:
            self._places[start, count] = {
                "start": torch.tensor(start, device=self.device),
                "count": torch.tensor(count, device=self.device),
                "share": torch.tensor((end - start) / count, dtype=torch.float32, device=self.device),
            }
        own = map_tree(lambda leaf: leaf.narrow(axis, start, end - start).contiguous(), data)
        weights = None if weights is None else weights[:, start:end].contiguous()
        return own, weights, self._places[start, count]

    def _check_divisible(self, data: Any, *, shared: bool) -> None:
        reason = self.indivisible(data, shared=shared)
        if reason is not None:
            raise StrategyError(f"member {self._first!r} can't be spread over several devices: {reason}.")

    def ready(self, kind: str, hyper: Any, active: Tensor, data: Any, *, shared: bool) -> None:
        """Trace a step for batches like this one, if that has not been done."""
        self._look_at_members()
        if kind == "train":
            compile_mode()  # a misspelt one is told before the first step
            if not self.state["params"]:
                raise InputError(
                    f"member {self._first!r} has no parameter that takes a gradient. "
                    f"Set requires_grad=True on what is to be trained."
                )
            if self._group is not None:
                self._check_divisible(data, shared=shared)
                # A rank without rows tries one, so that all ranks find the same.
                part = self._own_rows(data, None, shared=shared) or self._cut(data, None, (0, 1), shared=shared)
                self.programs.program("row_gradients", (self.state, self.shared, *part), shared)
                return
            rest: tuple[Any, ...] = (self._coefficients(self.state, hyper), active, data, None)
            self.programs.program("train", (self.state, self.shared, *rest), shared)
            return
        rest = (data,)
        if kind == "evaluate":
            size = leaves(data)[0].shape[0 if shared else 1]
            rest = data, self.row_weights(np.full(len(active), size), size)
        self.programs.program(kind, (readable(self.state), self.shared, *rest), shared)

    @contextmanager
    def _unfused_too_late(self) -> Iterator[None]:
        """Raise `StrategyError` for Python state that shows only now: no member may run another's Python."""
        try:
            yield
        except StatefulError as error:
            raise StrategyError(
                f"member {self._first!r} and those like it can't go on as one: {error}. "
                f'Use strategy="interleaved", where each member runs its own model.'
            ) from error

    def _look_at_members(self) -> None:
        """See whether the members' Python still does what it did when the last epoch or verb began."""
        self._begun = True
        self.programs.look_again()
        if self._alike is not None:
            self._alike.check()

    def epoch_values(self) -> dict[str, np.ndarray]:
        """The loss and the metrics `(slot,)` since the last call; the next epoch begins at zero."""
        self._begun = False
        taken = self._to_host(self.state["sums"])
        for total in self.state["sums"].values():
            total.zero_()
        return self.task.values(taken)

    def evaluate(
        self,
        totals: dict[str, Tensor] | None,
        slots: np.ndarray | None,
        data: Any,
        weights: Tensor | None,
        counts: np.ndarray,
        size: int,
        *,
        shared: bool,
    ) -> dict[str, Tensor]:
        """The sums `(slot,)` of the loss and the metrics so far with those of a batch added."""
        sums = self._sums(slots, data, weights, counts, size, shared=shared)
        return sums if totals is None else {name: totals[name] + value for name, value in sums.items()}

    def values(self, totals: dict[str, Tensor]) -> dict[str, np.ndarray]:
        """The loss and the metrics `(slot,)` of what `evaluate` added up."""
        return self.task.values(self._to_host(totals))

    def _sums(
        self,
        slots: np.ndarray | None,
        data: Any,
        weights: Tensor | None,
        counts: np.ndarray,
        size: int,
        *,
        shared: bool,
    ) -> dict[str, Tensor]:
        """The sums of one batch, zero for members without rows in it."""
        if slots is None:
            if weights is None:
                weights = self.row_weights(np.where(counts > 0, size, 0), size)
            sums = self._looked("evaluate", self.state, data, weights, shared=shared)
            there = self.tensor(counts > 0)
            return {name: torch.where(there, value, 0.0).double() for name, value in sums.items()}
        rows = self.tensor(slots)
        part = states.select(self.state, rows)
        weights = torch.ones(len(slots), int(counts[slots[0]]), device=self.device)
        sums = self._looked("evaluate", part, data, weights, shared=shared)
        empty = torch.zeros(len(counts), dtype=torch.float64, device=self.device)
        return {name: empty.index_copy(0, rows, value.double()) for name, value in sums.items()}

    def predict(self, data: Any, *, shared: bool, counts: np.ndarray | None = None) -> Any:
        """The outputs `(slot, row, …)` on a batch of inputs."""
        return self._looked("predict", self.state, data, shared=shared)

    def predict_some(self, positions: Positions, data: Any, counts: np.ndarray) -> Any:
        """Return the outputs of some members, each on rows of its own, as NumPy arrays `(member, row, …)`."""
        state = self.read(positions, (*WEIGHTS, "member"))
        outputs = self._looked("predict", state, data, shared=False)
        if self.programs.steps.counting is not None:
            own = np.flatnonzero(counts)
            buffers = states.select({"buffers": state["buffers"]}, self.tensor(own))
            self.write(np.asarray(positions)[own], buffers)
        return map_tree(on_host, outputs)

    # --- which rows count ----------------------------------------------------------------------------------------

    def maskable(self, batch: Any) -> bool:
        """Whether padded rows can be weighted out without being felt, found by trying on one member.

        BatchNorm, say, feels every row of a batch. So a step on a padded batch is compared with one on its own
        rows alone.
        """
        if not self.task.maskable:
            return False
        real = int(batch.counts[batch.counts > 0].min())
        key = (real, batch.size)
        if key not in self._bears_padding:
            data = batch.data
            if not batch.shared:
                data = map_tree(lambda leaf: leaf[int(np.flatnonzero(batch.counts == real)[0])], data)
            self._bears_padding[key] = ignores_padding(self.programs.steps, self.state, self.shared, data, real)
        return self._bears_padding[key]

    def rows_apart(self, inputs: Any) -> bool:
        """Return True if the output for a row depends on that row alone, as one member shows."""
        size = len(leaves(inputs)[0])
        if size not in self._rows_apart:
            self._rows_apart[size] = self._are_apart(inputs)
        return self._rows_apart[size]

    def _are_apart(self, inputs: Any) -> bool:
        return rows_are_independent(self.programs.steps, self.state, self.shared, inputs)

    # --- state ---------------------------------------------------------------------------------------------------

    def _open_sums(self, names: Sequence[str]) -> None:
        """Make room for an epoch's sums of these names."""
        width = len(self.state["member"]["seed"])
        dtype = states.exact(self.device)
        sums = {name: torch.zeros(width, dtype=dtype, device=self.device) for name in names}
        self.state = {**self.state, "sums": sums}  # a new state: programs list the tensors of one only once

    def trouble(self) -> np.ndarray:
        """`(slot,)`: what went wrong, by the codes of `state.REASONS`; 0 where nothing did."""
        return self.state["member"]["trouble"].cpu().numpy()

    def narrow(self, positions: np.ndarray) -> None:
        """Give slots only to these members from now on. The others rest."""
        super().narrow(positions)
        self._ahead.forget()

    def widen(self) -> None:
        """Give every member its slot again."""
        super().widen()
        self._ahead.forget()

    def write(self, positions: Positions, state: State) -> None:
        """Replace the state of some members by part and name."""
        super().write(positions, state)
        self._ahead.forget()

    def adopt(self, position: int, other: Any, source: int) -> None:
        """Write what still fits of the optimizer state and the step count that a member has in another engine.

        The state of a parameter that is frozen now is kept until the parameter is trained again, as `torch.optim`
        does. A parameter that was given another shape meanwhile begins at its initial state.
        """
        theirs = other.carried(source)
        stored = {**theirs, "optimizer": self._transposed(theirs["optimizer"])}
        self.write([position], fitting(stored, self.state, parts=CARRIED))
        self._resting[position] = {
            name: tensor for name, tensor in theirs["optimizer"].items() if name not in self.state["optimizer"]
        }

    def carried(self, position: int) -> State:
        """Return a member's optimizer state and step count for another engine to adopt.

        The tensors have the layout of the model's parameters, not the one that they are stored in here. Parameters
        that are frozen now are among them. Parameters that the user has replaced are not.
        """
        own = self.read([position], tuple(CARRIED))
        optimizer = {**self._resting.get(position, {}), **self._transposed(own["optimizer"])}
        replaced = self._replaced(position)
        own["optimizer"] = {name: t for name, t in optimizer.items() if name.partition("/")[2] not in replaced}
        return own

    def _transposed(self, optimizer: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return an optimizer's tensors in the layout of the model's parameters, or back from it."""
        return {name: states.turned(name.partition("/")[2], t, self.layout) for name, t in optimizer.items()}

    def _trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters that a step would change: none that all members share, which are only read."""
        return {name: parameter for name, parameter in states.trained(model).items() if name not in self.shared}

    def _replaced(self, position: int) -> set[str]:
        """Return the parameters of a member's model that the user has replaced since they were stacked."""
        model, before = self._owned[position]
        current = dict(model.named_parameters())
        return {name for name, parameter in before.items() if current.get(name) is not parameter}

    def still_shared(self, members: Sequence[Member]) -> bool:
        """Whether the tensors that all members shared are still the same in all of them."""
        if not self.shared:
            return True
        return self.shared.keys() <= shared_parameters([member.model for member in members])

    def objects(self) -> Iterable[tuple[str, nn.Module]]:
        """The modules of the model that is traced for all members."""
        return self.programs.steps.model.named_modules()

    def gather(self, members: Sequence[Member]) -> State:
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

    def refresh(self, positions: Positions, members: Sequence[Member]) -> None:
        """Replace the weights of some members by those of their models.

        The optimizer's state of a parameter that the user has replaced begins at its initial state.
        """
        for member in members:
            switched = self._trained(member.model).keys() ^ self.state["params"].keys()
            if switched:
                raise StrategyError(
                    f"member {member.name!r}: {min(switched)!r} was frozen or unfrozen in the middle of a fit, "
                    f'and the member is fused with others. Use strategy="interleaved", or do it between two fits.'
                )
        with held(self.programs.steps.model):
            weights = self.gather(members)
        self.write(positions, weights)
        for row, (position, member) in enumerate(zip(positions, members, strict=True)):
            hyper = {key: self.tensor(column[[position]]) for key, column in self._columns.items()}
            for name in self._replaced(position):
                fresh = self.task.optimizer.initial(weights["params"][name][row : row + 1], hyper)
                self.write([position], {"optimizer": {f"{slot}/{name}": tensor for slot, tensor in fresh.items()}})
            self._owned[position] = member.model, self._trained(member.model)
        own = {**dict(members[0].model.named_parameters()), **dict(members[0].model.named_buffers())}
        for name, tensor in self.shared.items():
            tensor.copy_(states.placed(own[name], self.device, transpose=name in self.layout))

    def steps_taken(self) -> np.ndarray:
        """`(slot,)`: the steps that changed each member's weights."""
        return self.state["member"]["step"].cpu().numpy()

    def clear_trouble(self) -> None:
        """Begin a fit with nobody in trouble, and without the gradients of an earlier backward."""
        for _, parameters in self._owned:
            for parameter in parameters.values():
                parameter.grad = None
        self.state["member"]["trouble"].zero_()
        self._ahead.forget()

    # --- checks --------------------------------------------------------------------------------------------------

    def check(self, batch: Any, name: str) -> None:
        """Try one member on a batch, before anything is trained, and make room for the sums it makes.

        What does not fit raises `InputError`, with the shapes that came and what the model said of them.
        """

        def sums() -> list[str]:
            with self._trying(batch, batch.data, name) as (one, few):
                weights = torch.ones(1, len(leaves(few)[0]), device=self.device)
                steps = self.programs.steps
                return list(steps.evaluate(one, self.shared, few, weights, shared_data=True, fused=False))

        self._open_sums(self.programs.found(("sums", *_layout(batch.data, batch.shared)), sums))

    def output_shape(self, batch: Any, name: str) -> tuple[int, ...] | None:
        """The shape `(row, …)` of a member's output for a batch; None if it is no single tensor.

        What does not fit raises `InputError`, as in `check`.
        """
        data = self.inputs(batch.data)

        def shape() -> tuple[int, ...] | None:
            with self._trying(batch, data, name) as (one, few):
                output = self.programs.steps.predict(one, self.shared, few, shared_data=True, fused=False)
            return tuple(output.shape[1:]) if isinstance(output, Tensor) else None

        return self.programs.found(("shape", *_layout(data, batch.shared)), shape)

    @contextmanager
    def _trying(self, batch: Any, data: Any, name: str) -> Iterator[tuple[State, Any]]:
        """One member and a batch of its data to try it on, with a clear error for what does not fit."""
        data = data if batch.shared else map_tree(lambda leaf: leaf[0], data)
        few = map_tree(torch.clone, data)  # a forward may write to its input
        model = self.programs.steps.model
        one = states.select(self.state, torch.zeros(1, dtype=torch.int64, device=self.device))
        with explained(name, model, data), self.programs.trial(train=False), torch.random.fork_rng(devices=[]):
            yield one, few

    def _next_coefficients(self, hyper: dict[str, Tensor], active: Tensor) -> Coefficients:
        return self._ahead.next(self.state, hyper, active)

    def _coefficients(self, state: State, hyper: dict[str, Tensor]) -> Coefficients:
        return self._ahead.one(state, hyper)

    def working_bytes(self, batch: Any) -> int | None:
        """What a train step takes beside the state, by the tensors that live at once in its program."""
        return self.programs.working_bytes

    # --- helpers -------------------------------------------------------------------------------------------------

    def _stacked(self, members: Sequence[Member], columns: Mapping[str, np.ndarray]) -> State:
        """Return the state of members at the beginning: the weights of their models, and all else initial."""
        state = self.gather(members)
        hyper = {name: self.tensor(column) for name, column in columns.items()}
        made = {name: self.task.optimizer.initial(p, hyper) for name, p in state["params"].items()}
        state["optimizer"] = {
            f"{slot}/{name}": tensors[slot] for slot in self.task.optimizer.slots for name, tensors in made.items()
        }
        width = len(members)
        exact = states.exact(self.device)
        state["member"] = {
            "seed": torch.tensor([member.seed for member in members], device=self.device),
            "step": torch.zeros(width, dtype=exact, device=self.device),
            "trouble": torch.zeros(width, dtype=torch.int64, device=self.device),
        }
        if self.task.precision == "fp16":
            state["member"]["scale"] = torch.full((width,), FIRST_SCALE, device=self.device)
            state["member"]["good"] = torch.zeros(width, dtype=torch.int64, device=self.device)
        state["sums"] = {}
        return state


def _layout(data: Any, shared: bool) -> tuple[Any, ...]:
    """What a model's Python can tell of a batch without its values: its form, and where its leaves are."""
    return tuple(path for path, _ in paths(data)), _form(data, shared)


def _form(data: Any, shared: bool) -> tuple[Any, ...]:
    """Return the shapes and dtypes of a member's batch."""
    return tuple((leaf.shape[0 if shared else 1 :], leaf.dtype) for leaf in leaves(data))
