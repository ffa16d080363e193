"""Engine of a fused lane of torch modules: their stacked state on a device, and the programs that step it."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.errors import InputError, StrategyError
from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.engine import Engine, Hyper
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.frameworks.stacked import CARRIED, WEIGHTS, Given, Positions, StackedState, fitting
from modelfleet.frameworks.torch import arrays
from modelfleet.frameworks.torch.base import ModuleEngine, TorchEngine, on_host
from modelfleet.frameworks.torch.compiling.decision import compile_mode
from modelfleet.frameworks.torch.fused import packing
from modelfleet.frameworks.torch.fused import state as states
from modelfleet.frameworks.torch.fused.arguments import readable
from modelfleet.frameworks.torch.fused.capture import capture_on
from modelfleet.frameworks.torch.fused.program_engine import ProgramEngine, RowTrials, batch_layout
from modelfleet.frameworks.torch.fused.programs import Programs
from modelfleet.frameworks.torch.fused.stepping import Stepper
from modelfleet.frameworks.torch.fused.steps import Steps
from modelfleet.frameworks.torch.fused.steps_protocol import ALONE, How, Tensors
from modelfleet.frameworks.torch.fused.updating import INITIAL_SCALE
from modelfleet.frameworks.torch.fused.variants import Variants
from modelfleet.frameworks.torch.model_locks import lock_of, locked_in_mode
from modelfleet.frameworks.torch.optimizers.counting import CoefficientsAhead
from modelfleet.frameworks.torch.optimizers.slices import Rules
from modelfleet.frameworks.torch.parallel.fused import RowDivision
from modelfleet.frameworks.torch.parallel.process_group import ProcessGroup
from modelfleet.frameworks.torch.parallel.row_independence import ignores_padding, rows_are_independent
from modelfleet.frameworks.torch.structure import shared_parameters
from modelfleet.frameworks.torch.task import Task
from modelfleet.frameworks.torch.walking import places_of, tensors_at
from modelfleet.frameworks.torch.widths.widths import Widths
from modelfleet.members import Member
from modelfleet.trees import leaves, map_tree, map_trees
from modelfleet.types import Kind, State, Tree


class FusedEngine(ProgramEngine[Steps], ModuleEngine):
    """Engine of a lane of torch members that are stepped by one program (see `frameworks.engine.Engine`)."""

    def __init__(self, context: LaneContext[Task, Programs[Steps]]) -> None:
        """Stack the members' state, or use the programs of another engine."""
        members, columns, device = context.members, context.columns, context.device
        models = [member.model for member in members]
        programs = context.programs
        self._rules = Rules(context.tasks, () if programs is None else programs.steps.rules)
        named = [(member.name, member.model) for member in members]
        widths = Widths(named, context.variants) if max(context.variants) else None
        self._widths = widths if widths is not None and widths.several else None
        template = 0 if self._widths is None else self._widths.template
        if self._widths is not None and "eps" in columns and not (columns["eps"] != 0).all():
            raise CannotFuseError("its optimizer has an eps of 0, which would divide the zeros of padding by zero")
        if programs is None:
            layout = states.transposed(models[template])
            steps = Steps(models[template], context.tasks[template], layout, self._rules.all)
            programs = Programs(steps, fused=context.fused)
        programs.serve(models[template])
        self._first = members[0].name
        self.layout = self.transposed = programs.steps.layout
        common = shared_parameters(models) if len(models) > 1 else set()
        first = {**dict(models[0].named_parameters()), **dict(models[0].named_buffers())}
        shared = {
            name: states.placed(first[name], device, transpose=name in self.layout) for name in sorted(common)
        }
        self._variants = variants = Variants(
            named,
            context.tasks,
            context.variants,
            programs.steps,
            shared,
            lambda position: self._weights_of([members[position]]),
            device,
            self._widths,
        )
        self._division = RowDivision(self._first, programs, variants, device)
        self._coefficients = CoefficientsAhead(self._rules, skips=context.task.precision == "fp16")
        stepper = Stepper(
            self._first,
            programs,
            shared,
            self._coefficients,
            division=self._division,
            variants=variants,
            capture=capture_on(device),
        )
        trials = RowTrials(
            lambda one, data, real: all(
                ignores_padding(steps, variants.cut(one, at), shared, data, real) for steps, at in variants.trials
            ),
            lambda one, inputs: all(
                rows_are_independent(steps, variants.cut(one, at), shared, inputs) for steps, at in variants.trials
            ),
        )
        super().__init__(programs, stepper, trials, device)
        self.stacked = StackedState(self._initial_state(members, columns), len(members), states.Rows(device))
        self._columns = dict(columns)
        # By position: the model, and the parameters that were stacked.
        trained = [name for name in states.trained(models[0]) if name not in self.shared]
        self._places = places_of(trained)
        self._sources: list[tuple[nn.Module, dict[str, Tensor]]] = [
            (model, dict(zip(trained, tensors_at(model, self._places), strict=True))) for model in models
        ]
        self._frozen_optimizer: dict[int, dict[str, Tensor]] = {}  # by position: state of parameters frozen now

    @property
    def task(self) -> Task:
        """Return the members' task. Its optimizer is that of the first member."""
        return self.programs.steps.task

    def _initial_state(self, members: Sequence[Member], columns: Mapping[str, np.ndarray]) -> State:
        """Allocate the stacked tensors: the weights of the members' models, and everything else initial.

        All tensors that a step changes are made here, so this is the place to lay them out in memory.
        """
        state = self._weights_of(members, range(len(members)))
        hyper = {name: self.tensor(column) for name, column in columns.items()}
        state["optimizer"] = self._rules.initial(state["params"], hyper)
        width = len(members)
        state["member"] = {
            "seed": torch.tensor([member.seed for member in members], device=self.device),
            "step": torch.zeros(width, dtype=states.exact(self.device), device=self.device),
            "trouble": torch.zeros(width, dtype=torch.int64, device=self.device),
        }
        if self.task.precision == "fp16":
            state["member"]["scale"] = torch.full((width,), INITIAL_SCALE, device=self.device)
            state["member"]["finite_steps"] = torch.zeros(width, dtype=torch.int64, device=self.device)
        state["sums"] = {}
        return packing.pack(state)

    def give_slots(self, positions: Positions) -> None:
        """Give slots to these members from now on. The others rest."""
        super().give_slots(positions)
        self._variants.slots = self.slots
        if packing.buffers_of(self.state) is None:
            self.state = packing.pack(self.state)

    looks_ahead = True

    def upcoming(self, columns: Sequence[Mapping[str, np.ndarray]]) -> list[Hyper]:
        """Return the hyperparameters of the next steps as tensors, which go to the device in one copy."""
        distinct = {id(one): one for one in columns}
        table = np.stack([np.stack(list(one.values())) for one in distinct.values()])
        rows = [row.unbind(0) for row in self.tensor(table).unbind(0)]
        known: dict[int, Hyper] = {
            key: dict(zip(one, row, strict=True)) for (key, one), row in zip(distinct.items(), rows, strict=True)
        }
        found = [known[id(one)] for one in columns]
        self._coefficients.expect(found)
        return found

    # --- programs ------------------------------------------------------------------------------------------------

    def ready(self, kind: Kind, hyper: Hyper, active: Tensor, batch: Batch) -> None:
        """Trace a step for batches like this one, if that has not been done.

        Raises:
            CannotFuseError: The step can't be fused.
            InputError: There is nothing to train.
            StrategyError: The rows of the batch can't be divided over the ranks of the group.
        """
        self.stepper.check_members()
        rest = (batch.data,)
        if kind == "train":
            compile_mode()  # raises for a misspelt mode before the first step
            if not self.state["params"]:
                raise InputError(
                    f"member {self._first!r} has no parameter that takes a gradient. "
                    f"Set requires_grad=True on what is to be trained."
                )
            if self._division.group is not None:
                self._division.ready((self.state, self.shared), batch)
                return
            rest = (self.stepper.coefficients.one(self.state, hyper), active, batch.data, None)
            lead = self.stepper.with_numbers(kind, self.state, batch, None), self.shared
            self.programs.ready_to_train(lead, rest, shared_data=batch.shared)
            return
        weights = None
        if kind == "evaluate":
            weights = self.row_weights(np.full(len(active), batch.size), batch.size)
            rest = batch.data, weights
        state = self.stepper.with_numbers(kind, self.state, batch, weights)
        self.programs.program(kind, (readable(state), self.shared, *rest), batch.shared)

    def _run(
        self, kind: Kind, state: State, batch: Batch, *weights: Tensor, positions: np.ndarray | None = None
    ) -> Tree:
        """Evaluate or predict: all members at once, or one after the other if a batch can't be fused.

        `positions` are those of the members that the state is for; None for those in the slots.
        """
        try:
            self.stepper.refuse_unfusable(kind, batch)
            with self.stepper.refusing_state():
                numbers = self.stepper.with_numbers(kind, state, batch, next(iter(weights), None), positions)
                args = (readable(numbers), self.shared, batch.data, *weights)
                return getattr(self.programs, kind)(args, shared_data=batch.shared)
        except CannotFuseError as error:
            self.stepper.remember_unfusable(kind, batch, error)
        found = self._run_singly(kind, state, batch, self.slots if positions is None else positions, *weights)
        return map_tree(on_host, found) if kind == "predict" else found

    def _run_singly(self, kind: Kind, state: State, batch: Batch, positions: np.ndarray, *weights: Tensor) -> Tree:
        """Evaluate or predict one member after the other. The model may change buffers of those with rows."""
        found = []
        for slot, count in enumerate(batch.counts.tolist()):
            steps = self._variants.steps_of(positions[slot])
            rows = torch.tensor([slot], device=self.device)
            one = states.select(state, rows)
            alone = self._variants.cut(one, positions[slot])
            own = (
                batch.data if batch.shared else map_tree(lambda leaf, slot=slot: leaf[slot : slot + 1], batch.data)
            )
            with locked_in_mode(steps, train=False):
                rest = [weight[slot : slot + 1] for weight in weights]
                found.append(getattr(steps, kind)(alone, self.shared, own, *rest, How(batch.shared, fused=False)))
            if count:
                states.put(state["buffers"], rows, one["buffers"])
        return map_trees(torch.cat, found)

    def epoch_values(self) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` since the last call. The next epoch starts at zero."""
        self.stepper.checked = False
        sums = self._to_host(self.state["sums"])
        for total in self.state["sums"].values():
            total.zero_()
        return self.task.values(sums)

    def evaluate(self, totals: Tensors | None, batch: Batch) -> Tensors:
        """Return the sums `(slot,)` of the loss and the metrics so far, with a batch added."""
        sums = self._sums(batch)
        return sums if totals is None else {name: totals[name] + value for name, value in sums.items()}

    def values(self, totals: Tensors) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` of what `evaluate` added up."""
        return self.task.values(self._to_host(totals))

    def _sums(self, batch: Batch) -> Tensors:
        """Return the sums of one batch, zero for members without rows in it."""
        counts, size, weights = batch.counts, batch.size, batch.weights
        if weights is None:
            weights = self.row_weights(np.where(counts > 0, size, 0), size)
        if batch.slots is None:
            sums, has_rows = self._run("evaluate", self.state, batch, weights), self.constant(counts > 0)
            return {name: torch.where(has_rows, value, 0.0).double() for name, value in sums.items()}
        rows = self.constant(batch.slots)
        own = self.slots[batch.slots]
        sums = self._run("evaluate", states.select(self.state, rows), batch, weights, positions=own)
        empty = torch.zeros(self.stacked.width, dtype=torch.float64, device=self.device)
        return {name: empty.index_copy(0, rows, value.double()) for name, value in sums.items()}

    def predict(self, batch: Batch, positions: Positions | None = None) -> Tree:
        """Return the outputs of some members, or of all, as NumPy arrays `(member, row, …)`."""
        if positions is None:
            return self._run("predict", self.state, batch)
        state = self.read(positions, (*WEIGHTS, "member"))
        outputs = self._run("predict", state, batch, positions=np.asarray(positions))
        if self.programs.steps.counting is not None:
            own = np.flatnonzero(batch.counts)
            buffers = states.select({"buffers": state["buffers"]}, self.tensor(own))
            self.write(np.asarray(positions)[own], buffers)
        return outputs

    # --- rows and checks -----------------------------------------------------------------------------------------

    def split_rows_over(self, group: ProcessGroup | None) -> None:
        """Compute only this rank's rows of every train batch from now on, together with the group's other ranks.

        Each rank is given the whole batch and takes the same steps. Evaluating and predicting stay whole on every
        rank. A loss that is not computed row by row (a function, an objective, the output's own `.loss`) must be
        the mean over the rows it sees. `ready` and the first step raise `StrategyError` for a model that can't be
        divided by rows. None for whole batches again.
        """
        self._division.group = group

    def why_rows_stay_together(self, batch: Batch) -> str | None:
        """Return why the rows of such batches can't be computed on several devices, and what to do; or None."""
        return self._division.reason_against((self.state, self.shared), batch)

    def check(self, batch: Batch, name: str) -> None:
        """Try one member on a batch before anything is trained, and allocate the sums of its metrics.

        Raises:
            InputError: The model can't take the batch. The message has the shapes, and what the model raised.
        """

        def sums() -> list[str]:
            with self._trying(batch, name) as (one, few):
                weights = torch.ones(1, len(leaves(few)[0]), device=self.device)
                return list(self.programs.steps.evaluate(one, self.shared, few, weights, ALONE))

        names = self.programs.found(("sums", *batch_layout(batch)), sums)
        width, dtype = len(self.state["member"]["seed"]), states.exact(self.device)
        zeros = {name: torch.zeros(width, dtype=dtype, device=self.device) for name in names}
        self.state = {**self.state, "sums": zeros}  # a new dict: programs list the tensors of each only once

    # --- state ---------------------------------------------------------------------------------------------------

    def _weights_of(self, members: Sequence[Member], positions: Positions | None = None) -> State:
        """Return the weights that the models of some members hold, padded to the widest.

        Members of one lane have the same names. Without positions, they are of one width, which is not padded.
        """
        parts = {"params": states.trained, "frozen": states.kept, "buffers": states.buffers}
        state: State = {}
        for part, find in parts.items():
            names = [name for name in find(members[0].model) if name not in self.shared]
            places = places_of(names)
            found = [tensors_at(member.model, places) for member in members]
            state[part] = {
                name: self._stacked(column, name, positions)
                for name, column in zip(names, zip(*found, strict=True), strict=True)
            }
        return state

    def _stacked(self, tensors: Sequence[Tensor], name: str, positions: Positions | None) -> Tensor:
        if self._widths is None or positions is None:
            return states.stack(tensors, self.device, transpose=name in self.layout)
        return self._widths.stack(tensors, name, positions, self.device)

    def scatter(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the weights of some members into their models."""
        state = self.stacked.read(positions, WEIGHTS, copy=False)
        with lock_of(self.programs.steps.model):
            for rows, own in self._in_own_shapes(positions, state):
                states.write_back([members[row].model for row in rows], own, self.layout)

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
        with lock_of(self.programs.steps.model):
            weights = self._weights_of(members, positions)
        self.write(positions, weights)
        for row, (position, member) in enumerate(zip(positions, members, strict=True)):
            hyper = {key: self.tensor(column[[position]]) for key, column in self._columns.items()}
            for name in self._replaced(position):
                initial = self._rules.of(position).optimizer.initial(weights["params"][name][row : row + 1], hyper)
                state = {"optimizer": {f"{key}/{name}": tensor for key, tensor in initial.items()}}
                self.write([position], state)
            trained: dict[str, Tensor] = {**self._trained(member.model)}
            self._sources[position] = member.model, trained
        own = {**dict(members[0].model.named_parameters()), **dict(members[0].model.named_buffers())}
        for name, tensor in self.shared.items():
            tensor.copy_(states.placed(own[name], self.device, transpose=name in self.layout))

    def adopt(self, positions: Positions, other: Engine, sources: Positions) -> None:
        """Copy optimizer state and step counts of some members from another engine, as far as they still fit.

        The state of a parameter that is frozen now is kept until the parameter is trained again, as `torch.optim`
        does. A parameter that has another shape now starts at its initial state.
        """
        assert isinstance(other, TorchEngine)
        for rows, theirs in other.carried(sources):
            here = [positions[row] for row in rows]
            for part in self._alike(here):
                some = theirs if len(part) == len(rows) else states.select(theirs, self.tensor(np.array(part)))
                self._adopt([here[row] for row in part], some)

    def _adopt(self, positions: Positions, theirs: State) -> None:
        """Take over a state of members of one width and rule. What their optimizer does not have is kept aside."""
        known = self.optimizer_tensors(positions[0])
        optimizer = {name: tensor for name, tensor in theirs["optimizer"].items() if name in known}
        stored = {**theirs, "optimizer": self._transposed(optimizer)}
        own = self.state if self._widths is None else self._widths.cut(self.state, self._widths.of(positions[0]))
        self.write(positions, fitting(stored, own, parts=CARRIED))
        frozen = {name: t for name, t in theirs["optimizer"].items() if name not in known}
        for row, position in enumerate(positions):
            self._frozen_optimizer[position] = {name: t[row : row + 1] for name, t in frozen.items()}

    def _alike(self, positions: Positions) -> list[list[int]]:
        """Return the rows of some positions, those of one width and one rule together."""
        found: dict[tuple[int, int], list[int]] = {}
        for row, position in enumerate(positions):
            width = 0 if self._widths is None else self._widths.of(position)
            found.setdefault((width, int(self._rules.numbers[position])), []).append(row)
        return list(found.values())

    def carried(self, positions: Positions) -> list[tuple[list[int], State]]:
        """Return the optimizer state and step counts of some members for another engine to adopt.

        The tensors have the layout of the model's parameters, not the one that they are stored in here. Parameters
        that are frozen now are included. Parameters that the user has replaced are not.
        """
        replaced = [self._replaced(position) for position in positions]
        # Members with such parameters have states of their own. The others of one rule are read at once.
        special = [
            row for row, position in enumerate(positions) if replaced[row] or self._frozen_optimizer.get(position)
        ]
        others = sorted(set(range(len(positions))) - set(special))
        together = [[others[row] for row in rows] for rows in self._alike([positions[row] for row in others])]
        found: list[tuple[list[int], State]] = []
        for rows in together + [[row] for row in special]:
            first = positions[rows[0]]
            ((_, own),) = self.read_apart([positions[row] for row in rows], tuple(CARRIED))
            known = self.optimizer_tensors(first)
            current = {name: tensor for name, tensor in own["optimizer"].items() if name in known}
            optimizer = {**self._frozen_optimizer.get(first, {}), **self._transposed(current)}
            gone = replaced[rows[0]]
            own["optimizer"] = {name: t for name, t in optimizer.items() if name.partition("/")[2] not in gone}
            found.append((rows, own))
        return found

    def optimizer_tensors(self, position: int) -> Collection[str]:
        """Return the names of those of the optimizer's tensors that a member's own optimizer has."""
        keys = self._rules.of(position).optimizer.tensor_names
        return {f"{key}/{name}" for key in keys for name in self.state["params"]}

    def write(self, positions: Positions, state: Given) -> None:
        """Replace the state of some members by part and name. They may be given in their own shapes."""
        if self._widths is None:
            return super().write(positions, state)
        given: State = {part: dict(own) for part, own in state.items()}
        for part, own in given.items():
            for name in own.keys() & self.state.get(part, {}).keys():
                value, like = own[name], self.state[part][name]
                tensor = arrays.from_host(value, like) if isinstance(value, np.ndarray) else value
                own[name] = self._widths.padded(name, tensor)
        return super().write(positions, given)

    def by_width(self, positions: Positions) -> list[list[int]]:
        """Return the rows of some positions by what shapes the members' tensors have."""
        return [rows for _, rows in self._by_width(positions)]

    def read_apart(
        self, positions: Positions, parts: Collection[str] | None = None
    ) -> list[tuple[list[int], State]]:
        """Return the state of some members in their own shapes, those of one width together."""
        return self._in_own_shapes(positions, self.read(positions, parts))

    def _in_own_shapes(self, positions: Positions, state: State) -> list[tuple[list[int], State]]:
        """Return a state of some members by width: the rows, and their state in their own shapes."""
        if self._widths is None:
            return [(list(range(len(positions))), state)]
        found: list[tuple[list[int], State]] = []
        for width, rows in self._widths.by_width(positions):
            some = state if len(rows) == len(positions) else states.select(state, self.tensor(np.array(rows)))
            found.append((rows, self._widths.cut(some, width)))
        return found

    def _by_width(self, positions: Positions) -> list[tuple[int, list[int]]]:
        """Return the rows of some positions by width; all together if the widths are equal."""
        if self._widths is None:
            return [(0, list(range(len(positions))))] if len(positions) else []
        return self._widths.by_width(positions)

    def _transposed(self, optimizer: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return an optimizer's tensors in the layout of the model's parameters, or back from it."""
        return {name: states.turned(name.partition("/")[2], t, self.layout) for name, t in optimizer.items()}

    def _trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters that a step changes. Parameters that all members share are only read."""
        return {name: parameter for name, parameter in states.trained(model).items() if name not in self.shared}

    def _replaced(self, position: int) -> set[str]:
        """Return the parameters of a member's model that the user has replaced since they were stacked."""
        model, before = self._sources[position]
        try:
            current = tensors_at(model, self._places)
        except KeyError:  # a part of the model is gone
            named = dict(model.named_parameters())
            current = [named.get(name) for name in before]
        return {name for (name, own), now in zip(before.items(), current, strict=True) if now is not own}

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
