"""A lane: what takes steps on a device. One program, and the stacked state of the members of one group."""

import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from modelfleet.errors import FleetError, GroupError, InputError, StrategyError
from modelfleet.feeds import Batch, Feed
from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.errors import StepError
from modelfleet.frameworks.rows import predict_rows
from modelfleet.frameworks.stacked import WEIGHTS
from modelfleet.lanes.spec import LaneSpec
from modelfleet.members import Member
from modelfleet.trees import leaves, map_tree, paths
from modelfleet.types import Kind, Model, State, Tree
from modelfleet.words import without_period

T = TypeVar("T")
Work = Generator[None, None, T]
"""Work that yields after every batch, and returns what came of it."""

_ROWS = (
    "predict joins the outputs of batches row by row. Have the model return only what has one row for each input, "
    "or call fleet[name] yourself."
)
STEADY = 50  # steps after the first epoch, from which on the pace of a run is believed


class Lane:
    """The members of one group, stepping together on one device.

    `engine` is the framework's side of it: it stacks the members' state and runs programs. A lane decides which
    members take part in a step and how padded rows are kept out of it, and frees the slots of those that are done.

    Slots are the rows of the stacked state. Members that stop taking part are masked; when half of the slots or
    more are idle, the rest move together into a narrower state (`compact`), and back at the end (`expand`).
    """

    def __init__(
        self,
        members: Sequence[Member],
        engine: Engine,
        signature: Any,
        columns: Mapping[str, np.ndarray],
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
        self._on = np.ones(len(members), dtype=bool)  # by slot: who takes part
        self._failed = np.zeros(len(members), dtype=bool)  # by slot: who was set aside
        self._positions = {member.name: position for position, member in enumerate(members)}
        self._seconds: float | None = None
        self._steady: float | None = None
        self._steady_steps = 0
        self._calls = 0
        self._active: tuple[bytes, Any] | None = None
        self._hyper: tuple[Any, Any] | None = None

    @property
    def names(self) -> list[str]:
        """The names of all members, in their order."""
        return [member.name for member in self.members]

    @property
    def positions(self) -> dict[str, int]:
        """Every member's position, by name."""
        return self._positions

    @property
    def width(self) -> int:
        """How many slots the state has now."""
        return len(self.slots)

    @property
    def seconds_per_step(self) -> float | None:
        """The recent time of a step, once a few have been taken."""
        return self._seconds

    def record_time(self, steps: int, seconds: float, *, first: bool) -> None:
        """Note how long the steps of an epoch took, with all that belongs to them.

        The first epoch of a fit, in which things are traced, compiled and warmed up, says nothing of the next run.
        """
        if not steps:
            return
        self._seconds = seconds / steps
        if first:
            self._steady, self._steady_steps = None, 0
        else:
            self._steady = min(self._seconds, self._steady or self._seconds)
            self._steady_steps += steps

    @property
    def steady_seconds_per_step(self) -> float | None:
        """The time of a step in the last run once it was under way; None if that was too short to tell."""
        return self._steady if self._steady_steps >= STEADY else None

    def on(self) -> np.ndarray:
        """`(member,)`: who is taking part."""
        on = np.zeros(len(self.members), dtype=bool)
        on[self.slots[self._on]] = True
        return on

    def rest(self, positions: Sequence[int] | np.ndarray, *, failed: bool = False) -> None:
        """Take members out of the steps to come. Their state stays as it is.

        The slot of a member that failed is never freed: so the others' steps, and the rounding in them, are what
        they would have been had it not failed.
        """
        gone = np.isin(self.slots, np.asarray(positions, dtype=int))
        if failed:
            self._failed |= gone & self._on
        self._on &= ~gone

    def train(self, batch: Batch, columns: Mapping[str, np.ndarray], steps_left: int) -> None:
        """One step, or as many as the batch has, of every member that takes part and has rows in it.

        `columns` are the hyperparameters of this step, `(member,)` each. Raises `StepError` if the steps of some
        members raised; those of the others were taken.
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
        self._clock((time.perf_counter() - begun) / (batch.steps or 1))
        if causes:
            raise StepError(causes)

    def _train(self, batch: Batch, live: np.ndarray, hyper: Any, steps_left: int) -> dict[int, Exception]:
        """Train on rows of one form; gives what the steps of members raised, by slot."""
        causes: dict[int, Exception] = {}
        for rows, data, weights in self._pieces(batch, live):
            try:
                if rows is None:
                    self.engine.train(
                        hyper,
                        self._mask(live),
                        data,
                        weights,
                        shared=batch.shared,
                        pace=(steps_left, self._seconds),
                        steps=batch.steps,
                    )
                else:
                    self.engine.train_some(rows, hyper, data, shared=batch.shared, pace=(steps_left, None))
            except StepError as error:
                causes.update(error.causes)
            except Exception as error:
                if self.engine.out_of_memory(error) or isinstance(error, StrategyError | GroupError):
                    raise
                slots = np.flatnonzero(live) if rows is None else rows
                causes.update(self._train_singly(batch, slots, hyper, error))
        return causes

    def _train_singly(self, batch: Batch, slots: np.ndarray, hyper: Any, error: Exception) -> dict[int, Exception]:
        """After an error of a step of several members: one at a time, so that only those are harmed that raise it.

        A step that raises leaves the state as it was.
        """
        if self.width == 1:
            return {0: error}
        causes: dict[int, Exception] = {}
        for slot in slots.tolist():
            try:
                for step in range(batch.steps or 1):
                    data = batch.data if batch.steps is None else map_tree(lambda t, s=step: t[s], batch.data)
                    own = self.engine.cut(data, np.array([slot]), int(batch.counts[slot]), shared=batch.shared)
                    self.engine.train_some(np.array([slot]), hyper, own, shared=batch.shared, pace=(0, None))
            except Exception as raised:
                if self.engine.out_of_memory(raised):
                    raise
                causes[slot] = raised
        return causes

    def ready(self, batch: Batch, kind: Kind) -> None:
        """Have the program for batches like this one; raises `CannotFuseError` if a fused lane can't have it."""
        data = self.engine.inputs(batch.data) if kind == "predict" else batch.data
        hyper = self._hyper_tensors(self.columns)
        self.engine.ready(kind, hyper, self._mask(self._on), data, shared=batch.shared)

    def epoch_values(self) -> dict[str, np.ndarray]:
        """The loss and the metrics of the epoch so far `(slot,)`; the next epoch begins at nothing."""
        return self.engine.epoch_values()

    @property
    def slots(self) -> np.ndarray:
        """`(slot,)`: the position of the member in each slot."""
        return self.engine.slots

    def evaluating(self, feed: Feed) -> "Work[dict[str, np.ndarray]]":
        """The loss and the metrics `(slot,)` over a whole feed; batch by batch, for `finish_in_step`."""
        totals = None
        for whole in feed.epoch(0):
            for batch in whole.by_shape:
                for rows, data, weights in self._pieces(batch, batch.counts > 0):
                    with self._explained(data):
                        totals = self.engine.evaluate(
                            totals, rows, data, weights, batch.counts, batch.size, shared=batch.shared
                        )
            yield
        return {} if totals is None else self.engine.values(totals)

    def predicting(self, feed: Feed) -> "Work[list[Any]]":
        """Every member's outputs over a whole feed, as arrays of its own rows in their order; batch by batch."""
        parts: list[list[Any]] = [[] for _ in self.members]
        for whole in feed.epoch(0):
            for batch in whole.by_shape:
                for inputs, counts, size in self._asked(batch):
                    with self._explained(inputs):
                        outputs = self.engine.predict(inputs, shared=batch.shared, counts=counts)
                    for slot, count in enumerate(counts.tolist()):
                        if count:
                            parts[slot].append(self._rows(outputs, slot, count, size))
            yield
        self.refuse_failures(feed)
        return [self._joined(name, part) for name, part in zip(self.names, parts, strict=True)]

    def predict_rows(self, rows: Mapping[str, Tree]) -> dict[str, Tree]:
        """Return the outputs of some members, each on rows of its own, in one call where that is possible.

        Args:
            rows: By member, a tree of NumPy arrays `(row, …)` with one row or more.

        Returns:
            By member, its model's outputs as NumPy arrays. They equal those of the member alone on these rows.

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
    def _explained(self, data: Any) -> Iterator[None]:
        """Raise `InputError` for what a model says of a batch: only a feed's first one was tried before."""
        try:
            yield
        except Exception as error:
            if isinstance(error, FleetError | OSError) or self.engine.out_of_memory(error):
                raise
            shapes = ", ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in leaves(data))
            who = f"member {self.names[0]!r}" if self.width == 1 else f"one of {self.width} members"
            raise InputError(
                f"{who} can't take a batch of {shapes}: "
                f"{type(error).__name__}: {without_period(error)}. "
                f"Check its values against what the model expects."
            ) from error

    def _rows(self, outputs: Any, slot: int, count: int, size: int) -> Any:
        """A member's rows of the outputs of a batch; raises `InputError` if some output has not one per input."""
        name = self.members[self.slots[slot]].name
        try:
            own = self.engine.rows(outputs, slot, size + 1)  # one more than there should be
        except IndexError as error:
            raise InputError(
                f"member {name!r}: a part of the output is a single number for a batch of {size} rows. {_ROWS}"
            ) from error
        for path, leaf in paths(own):
            if len(leaf) not in (size, count):
                what = f"{path} of the output" if path else "the output"
                raise InputError(
                    f"member {name!r}: {what} has the shape {leaf.shape} for a batch of {size} rows. {_ROWS}"
                )
        return map_tree(lambda leaf: leaf[:count], own)

    def _joined(self, name: str, parts: Sequence[Any]) -> Any:
        """One member's outputs of all batches."""
        forms = [{path: tuple(leaf.shape[1:]) for path, leaf in paths(part)} for part in parts]
        for form in forms:
            for path, first in forms[0].items():
                shape = form.get(path, first)
                if shape != first:
                    what = f"{path} of the output" if path else "the output"
                    raise InputError(
                        f"member {name!r}: a row of {what} is {first} in one batch and {shape} in another, which "
                        f"can't be one array. Pad the inputs to one length, or predict them one length at a time."
                    )
        try:
            return self.engine.concatenate(parts)
        except (ValueError, TypeError) as error:
            raise InputError(
                f"member {name!r}: its outputs for {len(parts)} batches can't be joined: {without_period(error)}. "
                f"Let the model give the same tree of arrays for every batch."
            ) from error

    def refuse_failures(self, feed: Feed) -> None:
        """Raise `InputError` if a member's data could not be read."""
        for slot, error in feed.failures.items():
            name = self.members[self.slots[slot]].name
            raise InputError(f"the data of member {name!r} raised {type(error).__name__}: {error}") from error

    def compact(self, feeds: Sequence[Feed]) -> list[Feed]:
        """Free the idle slots if half or more are idle; gives the feeds for the slots that are left."""
        kept = self._on | self._failed
        if not self._on.any() or kept.sum() > len(kept) // 2:
            return list(feeds)
        slots, failed = self.slots[kept], self._failed[kept]
        self.expand()
        self.narrow(slots)
        self._failed = failed
        self._on = ~failed
        return [feed.select(np.flatnonzero(kept).tolist()) for feed in feeds]

    def narrow(self, members: np.ndarray) -> None:
        """Give slots to these members only."""
        if len(members) < len(self.members):
            self.engine.narrow(members)
        self._on = np.ones(len(members), dtype=bool)
        self._failed = np.zeros(len(members), dtype=bool)
        self._active = self._hyper = None

    def expand(self) -> None:
        """Give every member its slot again."""
        self.engine.widen()
        self.narrow(np.arange(len(self.members)))

    def read(self, names: Sequence[str], parts: Collection[str] | None = None) -> State:
        """Return a copy of the state of some members.

        Args:
            names: Members of the lane, whether they have a slot now or not.
            parts: The parts to read, such as `frameworks.stacked.WEIGHTS`; None for all.

        Returns:
            By part and name, tensors `(member, …)` in the order of `names`.
        """
        return self.engine.read([self._positions[name] for name in names], parts)

    def write(self, names: Sequence[str], state: State) -> None:
        """Replace the state of some members by what `read` returned.

        Args:
            names: Members of the lane, whether they have a slot now or not.
            state: By part and name, tensors or host arrays `(member, …)` in the order of `names`. All else stays
                as it is.
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

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all of the state of all members, on the host. It may be the very memory of the engine's."""
        host = self.members[0].framework.arrays.host
        return {name: host(tensor) for name, tensor in self.engine.tensors().items()}

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take up the state that `arrays` returned."""
        self.engine.load(arrays)

    def standing(self) -> dict[str, Any]:
        """Where the lane is, in JSON's terms; its tensors are the engine's."""
        return {
            "members": self.names,
            "steps": self.steps.tolist(),
            "epochs": self.epochs.tolist(),
            "slots": self.slots.tolist(),
            "on": self._on.tolist(),
            "failed": self._failed.tolist(),
        }

    def take_up(self, standing: dict[str, Any]) -> np.ndarray:
        """Go on from where `standing` was taken; gives the members that have slots."""
        self.steps = np.array(standing["steps"], dtype=np.int64)
        self.epochs = np.array(standing["epochs"], dtype=np.int64)
        self.narrow(np.array(standing["slots"], dtype=np.int64))
        self._on = np.array(standing["on"], dtype=bool)
        self._failed = np.array(standing["failed"], dtype=bool)
        return self.slots

    def refresh(self, names: Collection[str]) -> None:
        """Take in the weights that the models of these members have now."""
        positions = [position for position, name in enumerate(self.names) if name in names]
        if positions:
            self.engine.refresh(positions, [self.members[position] for position in positions])

    def adopt(self, position: int, other: "Lane", source: int) -> None:
        """Take over what a member had in another lane: its optimizer state, steps and epochs."""
        self.engine.adopt(position, other.engine, source)
        self.steps[position] = other.steps[source]
        self.epochs[position] = other.epochs[source]

    def _pieces(self, batch: Batch, live: np.ndarray) -> Iterator[tuple[Any, Any, Any]]:
        """What to step together: (slots or None for all, data, row weights or None)."""
        if batch.full:
            yield None, batch.data, None
            return
        counts = batch.counts[live]
        if not len(counts):
            return
        if (counts == batch.size).all():
            yield None, batch.data, None
        elif self.engine.maskable(batch):
            yield None, batch.data, self.engine.row_weights(batch.counts, batch.size)
        else:
            # A padded row would be felt (BatchNorm, a loss that is not known): exactness before speed.
            for count in np.unique(counts):
                slots = np.flatnonzero(live & (batch.counts == count))
                yield slots, self.engine.cut(batch.data, slots, int(count), shared=batch.shared), None

    def _asked(self, batch: Batch) -> Iterator[tuple[Any, np.ndarray, int]]:
        """What to predict together: (inputs, the rows of each slot, the rows of all)."""
        inputs, counts = self.engine.inputs(batch.data), batch.counts[batch.counts > 0]
        one = inputs if batch.shared else map_tree(lambda leaf: leaf[int(batch.counts.argmax())], inputs)
        if batch.full or (counts == batch.size).all() or self.engine.rows_apart(one):
            yield inputs, batch.counts, batch.size
            return
        slots = np.arange(len(batch.counts))
        for count in np.unique(counts).tolist():  # a padded row would be felt: those that have as many rows
            own = np.where(batch.counts == count, count, 0)
            yield self.engine.cut(inputs, slots, count, shared=batch.shared), own, count

    def _mask(self, live: np.ndarray) -> Any:
        key = live.tobytes()
        if self._active is None or self._active[0] != key:
            self._active = key, self.engine.tensor(live)
        return self._active[1]

    def _hyper_tensors(self, columns: Mapping[str, np.ndarray]) -> Any:
        if self._hyper is None or self._hyper[0] is not columns:
            tensors = {name: self.engine.tensor(column[self.slots]) for name, column in columns.items()}
            self._hyper = columns, tensors
        return self._hyper[1]

    def _clock(self, seconds: float) -> None:
        # The first steps trace, allocate and warm up; after them a moving average follows the pace.
        self._calls += 1
        if self._calls > 3:
            self._seconds = seconds if self._seconds is None else 0.9 * self._seconds + 0.1 * seconds


def finish_in_step(works: Sequence[Work[T]]) -> list[T]:
    """Do several works, a batch of each after the other: so lanes that read one loader read it once."""
    found: dict[int, T] = {}
    while len(found) < len(works):
        for number, work in enumerate(works):
            if number not in found:
                try:
                    next(work)
                except StopIteration as end:
                    found[number] = end.value
    return [found[number] for number in range(len(works))]
