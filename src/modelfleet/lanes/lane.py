"""Lanes: members of one group that take their steps together on one device."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from modelfleet.errors import FleetError, InputError, RankLostError, StrategyError
from modelfleet.feeds import Batch, Feed
from modelfleet.formatting import without_period
from modelfleet.frameworks.engine import Engine, Hyper
from modelfleet.frameworks.errors import StepError
from modelfleet.frameworks.lane_context import Task
from modelfleet.frameworks.predict_rows import predict_rows, refuse_unequal_rows
from modelfleet.frameworks.stacked import Given
from modelfleet.lanes.masking import pieces, prediction_pieces
from modelfleet.lanes.outputs import join_batches, slot_rows
from modelfleet.lanes.spec import LaneSpec
from modelfleet.lanes.step_losses import StepLosses
from modelfleet.lanes.step_times import StepTimes
from modelfleet.lanes.work import Work
from modelfleet.members import Member
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Json, Kind, ScheduleLike, Signature, State, Tensor, Tree

Columns = Mapping[str, np.ndarray]
"""Hyperparameters by name, `(member,)` each."""
MAX_MASKS = 4096  # kept on the device: of members that end their epochs one after the other, for example
COUNTS = "counts"
"""Part of a lane's state that has the members' steps and epochs."""


class Lane:
    """Members of one group that step together on one device.

    The framework's `engine` stacks the members' state and runs programs. The lane decides which members take part
    in a step, keeps padded rows out of it, and frees the slots of members that are done.

    Slots are the rows of the stacked state. A member that stops taking part is masked. When half of the slots or
    more are idle, `compact` gives slots to the others only.
    """

    def __init__(
        self,
        members: Sequence[Member],
        engine: Engine,
        signature: Signature,
        tasks: Sequence[Task],
        columns: Columns,
        schedules: Sequence[ScheduleLike],
        spec: LaneSpec,
    ) -> None:
        self.members = list(members)
        self.engine = engine
        self.signature = signature
        self.tasks = list(tasks)
        self.columns = dict(columns)  # the hyperparameters as compiled, (member,) each
        self.schedules = list(schedules)
        self.spec = spec
        assert spec.device is not None
        self.device: str = spec.device
        self.steps = np.zeros(len(members), dtype=np.int64)  # steps taken, by member
        self.epochs = np.zeros(len(members), dtype=np.int64)  # epochs finished, by member
        self._on = np.ones(len(members), dtype=bool)  # by slot: True if the member takes part
        self._failed = np.zeros(len(members), dtype=bool)  # by slot: True if the member was set aside
        self._positions = {member.name: position for position, member in enumerate(members)}
        self._times = StepTimes()
        self.losses: StepLosses | None = None  # of single steps, if they are recorded
        self._live = self._on  # by slot: True if the member takes the current step
        self._masks: dict[bytes, Tensor] = {}  # by their bytes
        self._hyper: tuple[Columns, Hyper] | None = None  # the last columns, and their tensors
        self._upcoming: dict[int, tuple[Columns, Hyper]] = {}  # those of the next steps, by the columns' identity

    @property
    def names(self) -> list[str]:
        """Return the names of all members, in their order."""
        return [member.name for member in self.members]

    @property
    def positions(self) -> dict[str, int]:
        """Return every member's position, by name."""
        return self._positions

    def name_in(self, slot: int) -> str:
        """Return the name of the member in a slot."""
        return self.members[self.slots[slot]].name

    @property
    def width(self) -> int:
        """Return the current number of slots."""
        return len(self.slots)

    @property
    def seconds_per_step(self) -> float | None:
        """Return the recent time of a step, or None before a few have been taken."""
        return self._times.recent

    @property
    def steady_seconds_per_step(self) -> float | None:
        """Return the time of a step in the last run, without its first epoch. None if the run was too short."""
        return self._times.steady

    def record_time(self, steps: int, seconds: float, *, first: bool) -> None:
        """Record how long an epoch took, including everything around its steps."""
        self._times.add_epoch(steps, seconds, first=first)

    def on(self) -> np.ndarray:
        """Return `(member,)`: True for each member that takes part."""
        on = np.zeros(len(self.members), dtype=bool)
        on[self.slots[self._on]] = True
        return on

    def rest(self, names: Collection[str], *, failed: bool = False) -> None:
        """Take members out of all further steps. Their state stays as it is.

        The slot of a member that failed is never freed. So the width stays the same, and the other members' steps
        are rounded as if the member had not failed.
        """
        gone = np.isin(self.slots, self._positions_of(names))
        if failed:
            self._failed |= gone & self._on
        self._on &= ~gone

    def stepping(self, batch: Batch) -> np.ndarray:
        """Return `(member,)`: True for each member that takes part in the steps of a batch."""
        rows = np.stack([piece.counts for piece in batch.by_shape]).max(axis=0)
        found = np.zeros(len(self.members), dtype=bool)
        found[self.slots[self._on & (rows > 0)]] = True
        return found

    def expect(self, columns: Sequence[Columns]) -> None:
        """Put the hyperparameters of the next steps on the device, before `train` is given them one by one."""
        by_slot = {id(one): {name: own[self.slots] for name, own in one.items()} for one in columns}
        tensors = self.engine.upcoming([by_slot[id(one)] for one in columns])
        self._upcoming = {id(one): (one, own) for one, own in zip(columns, tensors, strict=True)}

    def train(self, batch: Batch, columns: Columns, steps_left: int) -> None:
        """Take the steps of a batch for every member that takes part and has rows in it.

        Args:
            batch: The rows of one step, or of several.
            columns: The hyperparameters of this step.
            steps_left: The number of steps until the end of the fit.

        Raises:
            StepError: The steps of some members raised. The other members took theirs.
        """
        begun = time.perf_counter()
        hyper = self._hyper_tensors(columns)
        causes: dict[int, Exception] = {}
        for piece in batch.by_shape:
            live = self._on & (piece.counts > 0)
            if not live.any():
                continue
            self._live = live
            causes.update(self._train(piece, live, hyper, steps_left))
            live[list(causes)] = False
            self.steps[self.slots[live]] += piece.steps or 1
        self._times.add_call((time.perf_counter() - begun) / (batch.steps or 1))
        if causes:
            raise StepError(causes)

    def _train(self, batch: Batch, live: np.ndarray, hyper: Hyper, steps_left: int) -> dict[int, Exception]:
        """Train on rows of one shape, and return the exceptions that members raised, by slot."""
        causes: dict[int, Exception] = {}
        for piece in pieces(self.engine, batch, live):
            try:
                if piece.slots is None:
                    self.engine.train(hyper, self._mask(live), piece, (steps_left, self._times.recent))
                else:
                    self.engine.train_some(hyper, piece, (steps_left, None))
            except StepError as error:
                causes.update(error.causes)
            except Exception as error:
                if self.engine.out_of_memory(error) or isinstance(error, StrategyError | RankLostError):
                    raise
                slots = np.flatnonzero(live) if piece.slots is None else piece.slots
                causes.update(self._train_singly(batch, slots, hyper, error))
        return causes

    def _train_singly(
        self, batch: Batch, slots: np.ndarray, hyper: Hyper, error: Exception
    ) -> dict[int, Exception]:
        """Repeat a step that raised, one member at a time, so that only the members that raise are set aside.

        A step that raises leaves the state as it was.
        """
        if self.width == 1:
            return {0: error}
        causes: dict[int, Exception] = {}
        for slot in slots.tolist():
            try:
                for number in range(batch.steps or 1):
                    step = batch if batch.steps is None else batch.step(number)
                    own = self.engine.first_rows(step, np.array([slot]), int(batch.counts[slot]))
                    self.engine.train_some(hyper, own)
            except Exception as raised:
                if self.engine.out_of_memory(raised):
                    raise
                causes[slot] = raised
        return causes

    def record_losses(self, *, on: bool) -> None:
        """Record the losses of single steps from now on, or stop it."""
        self.losses = StepLosses() if on else None
        self.engine.record = self._record if on else None

    def take_losses(self) -> dict[str, list[float]]:
        """Return the losses of the steps since the last call by member, if they are recorded."""
        if not self.losses:
            return {}
        found = self.losses.take(self.members[0].framework.arrays)
        return {self.members[position].name: losses for position, losses in found.items()}

    def _record(self, losses: Tensor | np.ndarray, slots: np.ndarray | None) -> None:
        assert self.losses is not None
        columns = np.flatnonzero(self._live) if slots is None else np.arange(len(slots))
        self.losses.add(losses, columns, self.slots[columns if slots is None else slots])

    def ready(self, batch: Batch, kind: Kind) -> None:
        """Prepare the program for batches like this one, or raise `CannotFuseError` if it can't be fused."""
        if kind == "predict":
            batch = replace(batch, data=self.engine.inputs(batch.data))
        self.engine.ready(kind, self._hyper_tensors(self.columns), self._mask(self._on), batch)

    def epoch_values(self) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` of the epoch so far, and start the next epoch."""
        return self.engine.epoch_values()

    @property
    def slots(self) -> np.ndarray:
        """Return `(slot,)`: the position of the member in each slot."""
        return self.engine.slots

    def evaluating(self, feed: Feed) -> Work[dict[str, np.ndarray]]:
        """Return the loss and the metrics `(slot,)` over a whole feed."""
        totals = None
        for whole in feed.epoch(0):
            for batch in whole.by_shape:
                for piece in pieces(self.engine, batch, batch.counts > 0):
                    with self._explained(piece.data):
                        totals = self.engine.evaluate(totals, piece)
            yield
        return {} if totals is None else self.engine.values(totals)

    def predicting(self, feed: Feed) -> Work[list[Tree]]:
        """Return every member's outputs over a whole feed, as arrays of its own rows in their order."""
        parts: list[list[Tree]] = [[] for _ in self.members]
        for outputs in self.predictions(feed):
            for slots, own in outputs:
                for row, slot in enumerate(slots.tolist()):
                    parts[slot].append(map_tree(lambda leaf, row=row: leaf[row], own))
            yield
        return [join_batches(name, own) for name, own in zip(self.names, parts, strict=True)]

    def predictions(self, feed: Feed) -> Iterator[list[tuple[np.ndarray, Tree]]]:
        """Yield the outputs for one batch of a feed after the other.

        Each item has the outputs of all slots that have rows in the batch: some slots, and their outputs as arrays
        `(slot, row, …)` without padding. Slots with equally many rows come together if one program answers them.
        """
        for whole in feed.epoch(0):
            found: list[tuple[np.ndarray, Tree]] = []
            for batch in whole.by_shape:
                for piece in prediction_pieces(self.engine, batch):
                    with self._explained(piece.data):
                        outputs = self.engine.predict(piece)
                    for count in np.unique(piece.counts[piece.counts > 0]).tolist():
                        slots = np.flatnonzero(piece.counts == count)
                        index = slice(None) if len(slots) == len(piece.counts) else slots
                        found.append((slots, slot_rows(outputs, index, self.name_in(slots[0]), count, piece.size)))
                    del outputs
            yield found
        self.refuse_failures(feed)

    def predict_rows(self, rows: Mapping[str, Tree]) -> dict[str, Tree]:
        """Return the outputs of some members, each on its own rows, in one call if possible.

        Args:
            rows: By member, a tree of NumPy arrays `(row, …)` with at least one row.

        Returns:
            By member, its model's outputs as NumPy arrays. They equal the outputs of the member alone.

        Raises:
            InputError: A member has no rows, or its model can't take them.
        """
        refuse_unequal_rows(rows)
        trees, arrays = list(rows.values()), self.members[0].framework.arrays
        with self._explained(trees):
            outputs = predict_rows(self.engine, arrays, self._positions_of(rows), trees)
        return dict(zip(rows, outputs, strict=True))

    @contextmanager
    def _explained(self, data: Tree) -> Iterator[None]:
        """Raise `InputError` if a model raises on a batch. Only the first batch of a feed was tried before."""
        try:
            yield
        except Exception as error:
            if isinstance(error, FleetError | OSError) or self.engine.out_of_memory(error):
                raise
            shapes = ", ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in leaves(data))
            subject = f"member {self.names[0]!r}" if self.width == 1 else f"one of {self.width} members"
            raise InputError(
                f"{subject} can't take a batch of {shapes}: "
                f"{type(error).__name__}: {without_period(error)}. "
                f"Check its values against what the model expects."
            ) from error

    def refuse_failures(self, feed: Feed) -> None:
        """Raise `InputError` if a member's data could not be read."""
        for slot, error in feed.failures.items():
            name = self.name_in(slot)
            raise InputError(f"the data of member {name!r} raised {type(error).__name__}: {error}") from error

    def compact(self) -> list[int] | None:
        """Free the idle slots if half or more are idle. Return the slots that were kept; None if all were."""
        kept = self._on | self._failed
        if not self._on.any() or kept.sum() > len(kept) // 2:
            return None
        slots, failed = np.flatnonzero(kept).tolist(), self._failed[kept]
        self.give_slots([self.name_in(slot) for slot in slots])
        self._failed, self._on = failed, ~failed
        return slots

    def give_slots(self, names: Sequence[str]) -> None:
        """Give slots to these members only, in this order. They all take part; the others do not."""
        self.engine.give_slots(self._positions_of(names))
        self._on = np.ones(len(names), dtype=bool)
        self._failed = np.zeros(len(names), dtype=bool)
        self._masks, self._upcoming, self._hyper = {}, {}, None

    # --- state ---------------------------------------------------------------------------------------------------

    def read(self, names: Sequence[str], parts: Collection[str] | None = None, *, host: bool = False) -> State:
        """Return a copy of the state of some members.

        Args:
            names: Members of the lane, with or without a slot.
            parts: The parts to read, such as `frameworks.stacked.WEIGHTS`; None for all.
            host: True for NumPy arrays in place of tensors on the device.

        Returns:
            By part and name, tensors `(member, …)` in the order of `names`. Besides the engine's parts there is
            `COUNTS`: the steps taken and the epochs finished, always as NumPy arrays.
        """
        positions = self._positions_of(names)
        state = self.engine.read(positions, parts)
        if host:
            state = map_tree(self.members[0].framework.arrays.host, state)
        if parts is None or COUNTS in parts:
            state[COUNTS] = {"steps": self.steps[positions], "epochs": self.epochs[positions]}
        return state

    def by_width(self, names: Sequence[str]) -> list[list[str]]:
        """Return some members by what shapes their tensors have. In most lanes all are equal."""
        return [[names[row] for row in rows] for rows in self.engine.by_width(self._positions_of(names))]

    def read_apart(
        self, names: Sequence[str], parts: Collection[str] | None = None, *, host: bool = False
    ) -> list[tuple[list[str], State]]:
        """Return a copy of the state of some members for another lane, or for a file: each has its own shapes.

        Returns:
            States as of `read`, each with the names of the members that it is for.
        """
        found: list[tuple[list[str], State]] = []
        for rows, state in self.engine.read_apart(self._positions_of(names), parts):
            own = [names[row] for row in rows]
            if host:
                state = map_tree(self.members[0].framework.arrays.host, state)
            if parts is None or COUNTS in parts:
                positions = self._positions_of(own)
                state = {**state, COUNTS: {"steps": self.steps[positions], "epochs": self.epochs[positions]}}
            found.append((own, state))
        return found

    def write(self, names: Sequence[str], state: Given) -> None:
        """Replace the state of some members by what `read` or `read_apart` returned, here or in another lane.

        Args:
            names: Members of the lane, with or without a slot.
            state: By part and name, tensors or NumPy arrays `(member, …)` in the order of `names`. Whatever is not
                given stays as it is.
        """
        positions = self._positions_of(names)
        self.engine.write(positions, {part: own for part, own in state.items() if part != COUNTS})
        counts = state.get(COUNTS)
        if counts is not None:
            self.steps[positions], self.epochs[positions] = counts["steps"], counts["epochs"]

    def gather(self, names: Sequence[str]) -> None:
        """Replace the state of some members by what their models hold now."""
        if names:
            self.engine.gather(self._positions_of(names), self._members_of(names))

    def scatter(self, names: Sequence[str]) -> None:
        """Copy the state of some members into their models."""
        if names:
            self.engine.scatter(self._positions_of(names), self._members_of(names))

    def adopt(self, names: Sequence[str], other: "Lane", sources: Sequence[str]) -> None:
        """Copy the state that models do not hold from another lane: optimizer state, steps and epochs.

        Args:
            names: Members of this lane.
            other: A lane with the same optimizer. The models' structure may differ.
            sources: The names of these members there.
        """
        here, there = self._positions_of(names), other._positions_of(sources)
        self.engine.adopt(here, other.engine, there)
        self.steps[here], self.epochs[here] = other.steps[there], other.epochs[there]

    def progress(self) -> dict[str, Json]:
        """Return how far each member is and which slots are in use, as JSON. `read` has the tensors."""
        return {
            "members": self.names,
            "steps": self.steps.tolist(),
            "epochs": self.epochs.tolist(),
            "slots": self.slots.tolist(),
            "on": self._on.tolist(),
            "failed": self._failed.tolist(),
        }

    def resume(self, progress: Mapping[str, Json]) -> None:
        """Continue from what `progress` returned."""
        self.steps[:], self.epochs[:] = progress["steps"], progress["epochs"]
        self.give_slots([self.members[position].name for position in progress["slots"]])
        self._on = np.array(progress["on"], dtype=bool)
        self._failed = np.array(progress["failed"], dtype=bool)

    def _positions_of(self, names: Iterable[str]) -> list[int]:
        """Return the positions of some members."""
        return [self._positions[name] for name in names]

    def _members_of(self, names: Iterable[str]) -> list[Member]:
        return [self.members[self._positions[name]] for name in names]

    def _mask(self, live: np.ndarray) -> Tensor:
        key = live.tobytes()
        if key not in self._masks:
            if len(self._masks) >= MAX_MASKS:
                self._masks.clear()
            self._masks[key] = self.engine.tensor(live)
        return self._masks[key]

    def _hyper_tensors(self, columns: Columns) -> Hyper:
        if self._hyper is None or self._hyper[0] is not columns:
            self._hyper = self._upcoming.get(id(columns))
        if self._hyper is None:
            self._hyper = columns, {name: self.engine.tensor(own[self.slots]) for name, own in columns.items()}
        return self._hyper[1]
