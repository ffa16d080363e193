"""Lanes: members of one group that take their steps together on one device."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from modelfleet.errors import FleetError, GroupError, InputError, StrategyError
from modelfleet.feeds import Batch, Feed
from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.errors import StepError
from modelfleet.frameworks.predict_rows import predict_rows
from modelfleet.frameworks.stacked import WEIGHTS
from modelfleet.lanes.outputs import join_batches, member_rows
from modelfleet.lanes.padding import pieces, prediction_pieces
from modelfleet.lanes.spec import LaneSpec
from modelfleet.lanes.step_times import StepTimes
from modelfleet.lanes.work import Work
from modelfleet.members import Member
from modelfleet.trees import leaves
from modelfleet.types import Arrays, Json, Kind, Model, Signature, State, Tensor, Tree
from modelfleet.words import without_period

Columns = Mapping[str, np.ndarray]
"""Hyperparameters by name, `(member,)` each."""


class Lane:
    """Members of one group that step together on one device.

    The framework's `engine` stacks the members' state and runs programs. The lane decides which members take part
    in a step, keeps padded rows out of it, and frees the slots of members that are done.

    Slots are the rows of the stacked state. A member that stops taking part is masked. When half of the slots or
    more are idle, `compact` moves the others into a narrower state. `expand` moves them back at the end.
    """

    def __init__(
        self,
        members: Sequence[Member],
        engine: Engine,
        signature: Signature,
        columns: Columns,
        schedules: Sequence[Any],
        spec: LaneSpec,
    ) -> None:
        self.members = list(members)
        self.engine = engine
        self.signature = signature
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
        self._active: tuple[bytes, Tensor] | None = None  # the last mask, by its bytes
        self._hyper: tuple[Columns, dict[str, Tensor]] | None = None  # the last columns, and their tensors

    @property
    def names(self) -> list[str]:
        """Return the names of all members, in their order."""
        return [member.name for member in self.members]

    @property
    def positions(self) -> dict[str, int]:
        """Return every member's position, by name."""
        return self._positions

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
        """Return the time of a step in the last run after its first epoch, or None if the run was too short."""
        return self._times.steady

    def record_time(self, steps: int, seconds: float, *, first: bool) -> None:
        """Record how long the steps of an epoch took, with everything around them."""
        self._times.add_epoch(steps, seconds, first=first)

    def on(self) -> np.ndarray:
        """Return `(member,)`: True for each member that takes part."""
        on = np.zeros(len(self.members), dtype=bool)
        on[self.slots[self._on]] = True
        return on

    def rest(self, positions: Sequence[int] | np.ndarray, *, failed: bool = False) -> None:
        """Take members out of all further steps. Their state stays as it is.

        The slot of a member that failed is never freed. So the width stays the same, and the other members' steps
        are rounded as if the member had not failed.
        """
        gone = np.isin(self.slots, np.asarray(positions, dtype=int))
        if failed:
            self._failed |= gone & self._on
        self._on &= ~gone

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
            causes.update(self._train(piece, live, hyper, steps_left))
            live[list(causes)] = False
            self.steps[self.slots[live]] += piece.steps or 1
        self._times.add_call((time.perf_counter() - begun) / (batch.steps or 1))
        if causes:
            raise StepError(causes)

    def _train(
        self, batch: Batch, live: np.ndarray, hyper: dict[str, Tensor], steps_left: int
    ) -> dict[int, Exception]:
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
                if self.engine.out_of_memory(error) or isinstance(error, StrategyError | GroupError):
                    raise
                slots = np.flatnonzero(live) if piece.slots is None else piece.slots
                causes.update(self._train_singly(batch, slots, hyper, error))
        return causes

    def _train_singly(
        self, batch: Batch, slots: np.ndarray, hyper: dict[str, Tensor], error: Exception
    ) -> dict[int, Exception]:
        """Repeat a step that raised one member at a time, so that only the members that raise are set aside.

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
        for whole in feed.epoch(0):
            for batch in whole.by_shape:
                for piece in prediction_pieces(self.engine, batch):
                    with self._explained(piece.data):
                        outputs = self.engine.predict(piece)
                    for slot, count in enumerate(piece.counts.tolist()):
                        if count:
                            name = self.members[self.slots[slot]].name
                            parts[slot].append(member_rows(outputs, slot, name, count, piece.size))
            yield
        self.refuse_failures(feed)
        return [join_batches(name, own) for name, own in zip(self.names, parts, strict=True)]

    def predict_rows(self, rows: Mapping[str, Tree]) -> dict[str, Tree]:
        """Return the outputs of some members, each on rows of its own, in one call where that is possible.

        Args:
            rows: By member, a tree of NumPy arrays `(row, …)` with one row or more.

        Returns:
            By member, its model's outputs as NumPy arrays. They equal the outputs of the member alone.

        Raises:
            InputError: A member has no rows, or its model can't take them.
        """
        for name, tree in rows.items():
            lengths = {len(leaf) for leaf in leaves(tree)}
            if len(lengths) != 1 or 0 in lengths:
                raise InputError(
                    f"member {name!r}: its arrays have {sorted(lengths)} rows; expected the same number for all, "
                    f"and one at least. Give each member the rows that it is to predict, or leave the member out."
                )
        positions = [self._positions[name] for name in rows]
        trees, arrays = list(rows.values()), self.members[0].framework.arrays
        with self._explained(trees):
            outputs = predict_rows(self.engine, arrays, positions, trees)
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
            name = self.members[self.slots[slot]].name
            raise InputError(f"the data of member {name!r} raised {type(error).__name__}: {error}") from error

    def compact(self, feeds: Sequence[Feed]) -> list[Feed]:
        """Free the idle slots if half or more are idle, and return the feeds for the slots that are left."""
        kept = self._on | self._failed
        if not self._on.any() or kept.sum() > len(kept) // 2:
            return list(feeds)
        slots, failed = self.slots[kept], self._failed[kept]
        self.expand()
        self.narrow(slots)
        self._failed = failed
        self._on = ~failed
        return [feed.select(np.flatnonzero(kept).tolist()) for feed in feeds]

    def narrow(self, positions: np.ndarray) -> None:
        """Give slots to the members at these positions only."""
        if len(positions) < len(self.members):
            self.engine.narrow(positions)
        self._on = np.ones(len(positions), dtype=bool)
        self._failed = np.zeros(len(positions), dtype=bool)
        self._active = self._hyper = None

    def expand(self) -> None:
        """Give every member its slot again."""
        self.engine.widen()
        self.narrow(np.arange(len(self.members)))

    def read(self, names: Sequence[str], parts: Collection[str] | None = None) -> State:
        """Return a copy of the state of some members.

        Args:
            names: Members of the lane, with or without a slot.
            parts: The parts to read, such as `frameworks.stacked.WEIGHTS`; None for all.

        Returns:
            By part and name, tensors `(member, …)` in the order of `names`.
        """
        return self.engine.read([self._positions[name] for name in names], parts)

    def write(self, names: Sequence[str], state: State) -> None:
        """Replace the state of some members by what `read` returned.

        Args:
            names: Members of the lane, with or without a slot.
            state: By part and name, tensors or host arrays `(member, …)` in the order of `names`. Tensors that
                are not given stay as they are.
        """
        self.engine.write([self._positions[name] for name in names], state)

    def snapshot(self, position: int) -> State:
        """Return a copy of one member's weights."""
        return self.engine.read([position], WEIGHTS)

    def restore(self, position: int, snapshot: State) -> None:
        """Give a member the weights of a snapshot."""
        self.engine.write([position], snapshot)

    def sync(self, position: int) -> Model:
        """Copy a member's state into its model, and return the model."""
        member = self.members[position]
        self.engine.scatter([position], [member])
        return member.model

    def take(self, position: int) -> None:
        """Replace a member's state by what its model holds now."""
        self.engine.refresh([position], [self.members[position]])

    def arrays(self) -> Arrays:
        """Return the whole state of all members, on the host. The arrays may share the engine's memory."""
        host = self.members[0].framework.arrays.host
        return {name: host(tensor) for name, tensor in self.engine.tensors().items()}

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace the whole state by what `arrays` returned."""
        self.engine.load(arrays)

    def progress(self) -> dict[str, Json]:
        """Return how far each member is and which slots are in use, as JSON. `arrays` has the tensors."""
        return {
            "members": self.names,
            "steps": self.steps.tolist(),
            "epochs": self.epochs.tolist(),
            "slots": self.slots.tolist(),
            "on": self._on.tolist(),
            "failed": self._failed.tolist(),
        }

    def resume(self, progress: Mapping[str, Json]) -> np.ndarray:
        """Continue from what `progress` returned, and return the positions of the members that have slots."""
        self.steps = np.array(progress["steps"], dtype=np.int64)
        self.epochs = np.array(progress["epochs"], dtype=np.int64)
        self.narrow(np.array(progress["slots"], dtype=np.int64))
        self._on = np.array(progress["on"], dtype=bool)
        self._failed = np.array(progress["failed"], dtype=bool)
        return self.slots

    def refresh(self, names: Collection[str]) -> None:
        """Replace the weights of these members by those that their models hold now."""
        positions = [position for position, name in enumerate(self.names) if name in names]
        if positions:
            self.engine.refresh(positions, [self.members[position] for position in positions])

    def adopt(self, position: int, other: "Lane", source: int) -> None:
        """Copy a member's optimizer state, steps and epochs from another lane."""
        self.engine.adopt(position, other.engine, source)
        self.steps[position] = other.steps[source]
        self.epochs[position] = other.epochs[source]

    def _mask(self, live: np.ndarray) -> Tensor:
        key = live.tobytes()
        if self._active is None or self._active[0] != key:
            self._active = key, self.engine.tensor(live)
        return self._active[1]

    def _hyper_tensors(self, columns: Columns) -> dict[str, Tensor]:
        if self._hyper is None or self._hyper[0] is not columns:
            tensors = {name: self.engine.tensor(column[self.slots]) for name, column in columns.items()}
            self._hyper = columns, tensors
        return self._hyper[1]
