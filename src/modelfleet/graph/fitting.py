"""One fit of a graph: epochs, history, callbacks, checkpoints. Callbacks see it as `run`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from modelfleet.callbacks import Callback, refuse_missing_validation, wrap_callbacks
from modelfleet.errors import RankLostError
from modelfleet.failures import Failure, all_failed
from modelfleet.feeds import Batch, Feed
from modelfleet.frameworks import global_generators
from modelfleet.frameworks.adapter_protocol import Schedules
from modelfleet.frameworks.errors import GRADIENT, LOSS, REASONS
from modelfleet.frameworks.stacked import WEIGHTS
from modelfleet.graph import checkpoints
from modelfleet.graph.failing import failed_members, stopped_by
from modelfleet.graph.losses import EpochSums, EpochValues, split_batch
from modelfleet.graph.node_models import fill, frozen_names
from modelfleet.graph.opening import Opener
from modelfleet.graph.orders import StateOrder, StepOrder, StepReport
from modelfleet.graph.plan import GraphPlan
from modelfleet.graph.reading import evaluate_orders, in_turn, joined_parts, sum_up
from modelfleet.graph.recording import by_one_clock
from modelfleet.graph.running import Ranks
from modelfleet.history import History
from modelfleet.interrupts import StopRequest
from modelfleet.progress import Reporter
from modelfleet.schedules import Timeline
from modelfleet.types import Data, Json, Model, State

if TYPE_CHECKING:
    from modelfleet.graph.graph import Graph


class GraphFit:
    """A fit that is running.

    Args:
        graph: The graph.
        opener: Opens it.
        data: The training data.
        validation: Data to evaluate after every epoch, or None.
        epochs: How many epochs to train.
        batch_size: The rows of a step.
        callbacks: The user's callbacks.
        reporter: Shows the progress.
    """

    def __init__(
        self,
        graph: "Graph",
        opener: Opener,
        data: Data,
        validation: Data,
        epochs: int,
        batch_size: int | None,
        callbacks: Sequence[object],
        reporter: Reporter,
    ) -> None:
        self.fleet = graph
        self.name = graph.kind
        self.epochs = epochs
        self.epoch = self.step = 0
        self.position = 0  # steps of the current epoch
        self._units = opener.units("train")
        self.history = History([self.name, *self._units.members])
        self.active: tuple[str, ...] = (self.name,)
        self.callbacks: list[Callback] = wrap_callbacks(callbacks)
        if validation is None:
            refuse_missing_validation(self.callbacks)
        self.states: dict[str, State] = {}
        """State of every node on the host, as of the last report."""
        self.seed, self.paths = graph.seed, graph._paths
        self.fleets = tuple(opener.fleets)
        """Nodes that are fleets."""
        self.epochs_before = graph._epochs
        """Epochs of earlier fits, on which shuffles depend."""
        self.generators = global_generators.state()
        """State of the random generators at the start of the current epoch."""
        self._graph, self._opener = graph, opener
        self._data, self._validation, self._batch_size = data, validation, batch_size
        self._reporter = reporter
        self._ranks: Ranks | None = None
        self._fresh = False  # True if `states` is the current state
        self._to_write: dict[str, State] = {}
        self._to_save: list[Path] = []
        self._stopping = False
        self._error: Exception | None = None  # ends the fit when the steps that were sent have been taken
        self._ctrl_c = StopRequest()

    # --- for callbacks -------------------------------------------------------------------------------------------

    def stop(self, name: str, reason: str = "stopped by a callback") -> None:
        """Stop at the end of this epoch."""
        self._stopping = True

    def snapshot(self, name: str) -> dict[str, State]:
        """Return a copy of the current weights of all nodes."""
        self._read()
        return {
            node: {part: dict(own) for part, own in state.items() if part in WEIGHTS}
            for node, state in self.states.items()
        }

    def restore(self, name: str, snapshot: Mapping[str, State]) -> None:
        """Replace the weights of all nodes by those of a snapshot."""
        self._to_write = {node: dict(state) for node, state in snapshot.items()}
        self._fresh = False
        self._read()

    def take(self, name: str) -> None:
        """Take the weights and buffers of the models back into the training, after a callback has changed them."""
        self.restore(name, self._graph._read_states("predict", None))

    def sync(self, name: str) -> Model:
        """Write the current weights into the models of all nodes, and return the graph."""
        self._read()
        self._write_back()
        return self.fleet

    def save(self, folder: str | Path) -> None:
        """Save a checkpoint when all callbacks of this event are done."""
        self._to_save.append(Path(folder))

    # --- the loop ------------------------------------------------------------------------------------------------

    def run(self, shuffle: bool) -> History:
        """Train to the end, until a callback stops it, or until Ctrl-C."""
        begun = time.monotonic()
        opener = self._opener
        feed = opener.feed(self._data, self._batch_size, what="data", shuffle=shuffle, epochs=self.epochs_before)
        x, targets = split_batch(feed.first().member(0), opener.losses)
        plan, _, self._draws = opener.prepare(x, targets, train=True)
        self._plans = {"train": plan}
        self._feed, self._validation_feed = feed, None
        if self._validation is not None:
            self._validation_feed = opener.feed(self._validation, self._batch_size, what="validation")
            self._plans["evaluate"] = opener.plan_untried(plan.batch_size, placed=plan)
        self._schedules = self._make_schedules(feed)
        given = None if opener.recipe is None else opener.recipe.clip_norm
        clip_norm = float(given) if isinstance(given, int | float) else None
        self.identity = checkpoints.identity_of(
            self._units,
            opener.losses,
            feed,
            self.epochs,
            clip_norm,
            self._frozen(),
            by_node=not self.paths,
        )
        self._epoch_sums = EpochSums(self._units, opener.losses)
        steps = None if feed.steps is None else int(feed.steps[0])
        self._reporter.start([self.name], self.epochs, steps, None if feed.rows is None else int(feed.rows[0]))
        cut_short_by: str | None = "an error"
        try:
            with opener.open(self._plans, "train") as ranks, self._ctrl_c.listening():
                self._ranks = ranks
                try:
                    self._train()
                except Exception:
                    if not ranks.failed:  # what was learnt so far is kept
                        with suppress(RankLostError):
                            self._read()
                    raise
                measured = self._measured(plan)
            cut_short_by = "Ctrl-C" if self._ctrl_c.pressed else None
            self._graph._plan = replace(plan, measured=measured)
        finally:
            self._ranks = None
            self._write_back()
            over = cut_short_by is None or checkpoints.folder_to_resume(self.callbacks) is None
            self._graph._epochs = self.epochs_before + (self.epoch if over else 0)  # the same call may continue it
            self._reporter.end(self.history, time.monotonic() - begun, cut_short_by)
        return self.history

    def _train(self) -> None:
        """Take all steps, from where a checkpoint has ended, and bring the state here."""
        self._resume()
        self._call("on_fit_start")
        while self.epoch < self.epochs and not self._over:
            self._train_epoch()
            if not self._ctrl_c.pressed:
                self._end_epoch()
        self._call("on_fit_end")
        self._read()

    def _frozen(self) -> list[str]:
        """Return the weights that take no gradient, by their names in the undivided model if there is one."""
        found = []
        for member in self._opener.members:
            inside = self.paths.get(member.name, {})
            for name in frozen_names(member):
                found.append(inside.get(name, f"{member.name}.{name}"))
        return found

    def _resume(self) -> None:
        """Continue from a checkpoint, if a callback's folder has one."""
        if checkpoints.folder_to_resume(self.callbacks) is None:
            return
        self._read()
        found = checkpoints.resume(self, self.states)
        if found is not None:
            self._schedules.restore(found.schedules)
            self._to_write = found.states
            self._read()

    @property
    def sums(self) -> dict[str, dict[str, float]]:
        """Return the sums of the current epoch's losses and metrics, by node, or by member of a fleet."""
        return self._epoch_sums.sums

    @sums.setter
    def sums(self, sums: dict[str, dict[str, float]]) -> None:
        self._epoch_sums.sums = sums

    @property
    def schedules_state(self) -> Json:
        """Return where the learning-rate schedules are."""
        return self._schedules.state()

    @property
    def _over(self) -> bool:
        return self._stopping or self._ctrl_c.pressed

    def _make_schedules(self, feed: Feed) -> Schedules:
        units = self._units
        count = len(units.all)
        per_epoch = None if feed.steps is None else np.repeat(feed.steps, count)
        schedules, tasks = [unit.schedule for unit in units.all], [unit.task for unit in units.all]
        epochs = np.full(count, self.epochs)
        return self._opener.adapter.Schedules(
            schedules, units.columns, tasks, per_epoch, epochs, names=units.names
        )

    def _train_epoch(self) -> None:
        batches = self._feed.epoch(self.epoch, start=self.position)
        try:
            assert self._ranks is not None
            if any(callback.wants_steps for callback in self.callbacks):
                for orders in self._orders(batches):  # each step is seen before the next one is sent
                    self._ranks.send(orders)
                    self._handle_step(self._ranks.receive())
                    if self._error is None:
                        self._call("on_step_end")
            else:
                for reports in in_turn(self._ranks, self._orders(batches)):
                    self._handle_step(reports)
        finally:
            batches.close()
        for error in self._feed.failures.values():
            raise error
        if self._error is not None:
            raise self._error

    def _orders(self, batches: Iterator[Batch]) -> Iterator[list[StepOrder]]:
        """Yield the orders of the epoch's steps, until the fit is to stop."""
        step = self.step
        while not self._ctrl_c.pressed and self._error is None:
            batch = next(batches, None)
            if batch is None:
                return
            hyper = self._units.hyper(self._schedules.at(np.full(len(self._units.all), step)))
            x, targets = split_batch(batch.member(0), self._opener.losses)
            step += 1
            yield self._opener.step_orders(
                self._plans["train"], "train", x, targets, train=True, draws=self._draws, hyper=hyper
            )

    def _handle_step(self, reports: Sequence[StepReport]) -> None:
        if self._error is not None:
            return  # a step that was sent ahead, and not taken
        self._fresh = False
        parts = joined_parts(reports, self._opener.losses)
        failed = failed_members(reports, self._units, epoch=self.epoch + 1, step=self.step + 1)
        for name, failure in failed.items():
            self.history.fail(name, failure)
        if any(report.skipped for report in reports):
            loss = sum(part.total for own in parts.values() for part in own)
            reason = REASONS[GRADIENT if np.isfinite(loss) and any(parts.values()) else LOSS]
            failure = Failure(self.epoch + 1, self.step + 1, reason)
            self.history.fail(self.name, failure)
            if failed:  # members of fleets that have caused it
                self._error = stopped_by(failed, self.history)
            else:
                self._error = all_failed({self.name: failure}, self.history, None)
            return
        self._epoch_sums.add(parts)
        for name in failed:
            self._epoch_sums.drop(name)
        if failed and self.history.failed.keys() >= self._epoch_sums.sums.keys():
            self._error = all_failed(self.history.failed, self.history, None)
            return
        self.step += 1
        self.position += 1
        self._reporter.step(self.position, self.epoch + 1)

    def _end_epoch(self) -> None:
        begun = time.monotonic()
        values = self._epoch_sums.values()
        self._epoch_sums = EpochSums(self._units, self._opener.losses)
        if self._validation_feed is not None:
            assert self._ranks is not None
            plan = self._plans["evaluate"]
            batches = (batch.member(0) for batch in self._validation_feed.epoch(0))
            orders = (evaluate_orders(self._opener, plan, batch) for batch in batches)
            values = values.beside(sum_up(self._opener, in_turn(self._ranks, orders)).named("val_"))
        self.epoch += 1
        self.position = 0
        self.generators = global_generators.state()
        self._record(values)
        self._keep_state()
        self._call("on_epoch_end")
        if self._stopping:
            self.history.stopped[self.name] = self.epoch
            self.active = ()
        self._reporter.epoch(self.epoch, self.history, self.active, time.monotonic() - begun)

    def _record(self, values: EpochValues) -> None:
        """Record the values of an epoch, and let schedules see them. Members that have failed have none."""
        self._schedules.end_epoch(
            [
                values.whole if unit.member is None else values.members.get(unit.name, {})
                for unit in self._units.all
            ]
        )
        self.history.record(self.name, values.whole)
        for name, own in values.members.items():
            if name not in self.history.failed:
                self.history.record(name, own)

    def _keep_state(self) -> None:
        """Read the state of ranks that may die, so that at most an epoch is lost."""
        if self._opener.strategy != "threads":
            self._read()

    def _call(self, event: str) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self)
        while self._to_save:
            self._read()
            checkpoints.save(self._to_save.pop(0), self)

    # --- state ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Bring the state of all nodes here, after what callbacks have replaced is written."""
        if self._ranks is None or (self._fresh and not self._to_write):
            return
        reports = self._ask(StateOrder(self._to_write))
        self._to_write, self._fresh = {}, True
        for report in reversed(reports):  # of replicas, the first one counts
            self.states.update(report.states)

    def _ask(self, order: StateOrder) -> list[StepReport]:
        assert self._ranks is not None
        count = len(self._ranks)
        orders = []
        for rank in range(count):
            here = self._ranks.nodes(rank)
            orders.append(
                StateOrder(
                    {name: own for name, own in order.write.items() if name in here}, order.read, order.events
                )
            )
        self._ranks.send(orders)
        return self._ranks.receive()

    def _measured(self, plan: GraphPlan) -> Timeline:
        """Return the mean times of the steps of this run, and what the ranks held, beside what was planned."""
        reports = self._ask(StateOrder(read=False, events="train"))
        events = [report.events for report in reports]
        if self._opener.strategy == "ray":
            events = by_one_clock(events)  # machines of a cluster have clocks of their own
        peaks = [report.peak_bytes for report in reports if report.peak_bytes is not None]
        return Timeline(
            plan.devices,
            tuple(event for own in events for event in own),
            tuple(peaks) if len(peaks) == len(reports) else None,
            plan.timeline,
        )

    def _write_back(self) -> None:
        """Write the state into the users' models, and keep that of the optimizers for the next fit."""
        for member in self._opener.members:
            state = self.states.get(member.name)
            if state is not None:
                fill(member, state)
                self._graph._states[member.name] = _for_next_fit(state)


def _for_next_fit(state: State) -> State:
    """Return the training state that the next fit begins with, in which no member has failed yet."""
    numbers = dict(state["member"])
    if "trouble" in numbers:
        numbers["trouble"] = np.zeros_like(numbers["trouble"])
    return {"optimizer": state["optimizer"], "member": numbers}
