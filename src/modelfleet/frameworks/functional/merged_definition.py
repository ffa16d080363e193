"""Steps of several variants, which differ in numbers and optimizers, as pure functions of one member."""

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from modelfleet.frameworks.batch import Batch
from modelfleet.frameworks.engine import Hyper
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.functional.contract import Definition, Function
from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.members import Member
from modelfleet.trees import map_tree
from modelfleet.types import Arrays, State, Tensor, Tree

Own = TypeVar("Own", bound=Definition)
Step = Literal["gradients", "apply", "train", "evaluate", "predict", "results"]

_NAMES: dict[Step, str] = {  # of steps, for messages
    "gradients": "train step",
    "apply": "train step",
    "train": "train step",
    "evaluate": "evaluate step",
    "predict": "predict step",
    "results": "metrics",
}


class DifferenceError(Exception):
    """Raised if two traced functions differ in more than numbers. The message is a part of a sentence."""


class Merged(Protocol):
    """Function of one of several variants, merged from what was traced of each."""

    tables: list[np.ndarray]
    """Numbers that differ, each `(variant, …)`."""


class Merger(Protocol):
    """What a framework traces functions to, and how it merges what was traced."""

    def shapes(self, args: tuple[Tree, ...]) -> tuple[tuple[Tree, ...], Hashable]:
        """Return arguments to trace with, and a key that arguments of other shapes do not have."""
        ...

    def trace(self, function: Function, shapes: tuple[Tree, ...]) -> tuple[Any, Hashable]:
        """Return a traced function, and the form of its results."""
        ...

    def merge(self, traced: Sequence[Any]) -> Merged:
        """Return traced functions as one.

        Raises:
            DifferenceError: They differ in more than numbers.
        """
        ...

    def run(self, merged: Any, form: Any, variant: Tensor, args: tuple[Tree, ...]) -> Tree:
        """Return the results of a variant, by its number, in the form that `trace` returned."""
        ...

    def pick(self, numbers: np.ndarray, variant: Tensor) -> Tensor:
        """Return the number that an array `(variant,)` has for a variant."""
        ...


def classes(merger: Merger, traced: Sequence[Any]) -> tuple[list[list[int]], str]:
    """Return the numbers of variants that can be merged with each other, and how the second class differs."""
    found: list[list[int]] = []
    reasons: list[str] = []
    for number, own in enumerate(traced):
        for together in found:
            try:
                merger.merge([traced[together[0]], own])
            except DifferenceError as error:
                reasons.append(str(error))
                continue
            together.append(number)
            break
        else:
            found.append([number])
    return found, reasons[0] if reasons else "together they have too many numbers"


class MergedDefinition(Definition, Generic[Own]):
    """Definitions of several variants as one (see `functional.Definition`).

    Each step is traced for every variant and merged: numbers that differ are read from tables by the member's
    variant. Updates are merged for each kind of optimizer on its own: see `by_task`.

    Args:
        merger: Traces and merges the steps.
        definitions: The definition of each variant.
        numbers: The variant of each member of a lane, by the member's name.
        difference: A function of the numbers of two variants that returns what differs between them.
    """

    def __init__(
        self,
        merger: Merger,
        definitions: Sequence[Own],
        numbers: Mapping[str, int],
        difference: Callable[[int, int], str],
    ) -> None:
        self._merger = merger
        self.definitions: list[Own] = list(definitions)
        self.variants = len(definitions)
        self.task = definitions[0].task
        self._numbers = numbers
        self._difference = difference
        self._known: dict[Hashable, tuple[Merged, Any]] = {}
        self._forms: dict[Hashable, Any] = {}  # names, shapes and dtypes of members' states, by kind of optimizer
        self._among: Sequence[int] = range(len(definitions))  # variants whose steps these are
        # As the models are now: they may be changed later, and these definitions still be in use.
        self._kinds = [self._kind(own) for own in self.definitions]
        self._forwards = [self._forward(own) for own in self.definitions]
        self._updates = [self._update(own) for own in self.definitions]
        kinds: dict[Hashable, list[int]] = {}
        for number, kind in enumerate(self._kinds):
            kinds.setdefault(kind, []).append(number)
        self._by_kind = list(kinds.values())
        self._by_task = [self] if len(kinds) == 1 else [self._only(own) for own in self._by_kind]

    def _only(self, among: Sequence[int]) -> "MergedDefinition[Own]":
        """Return the definition of some variants, which all have one kind of optimizer."""
        found = copy.copy(self)
        found._among, found._by_kind, found._by_task, found._known = among, [list(among)], [found], {}
        return found

    @property
    def by_task(self) -> "Sequence[MergedDefinition[Own]]":
        """Return a definition for each kind of optimizer."""
        return self._by_task

    def task_numbers(self, context: LaneContext[Any, Any]) -> np.ndarray:
        """Return `(member,)`: the number of each member's kind of optimizer."""
        kinds = {variant: number for number, own in enumerate(self._by_kind) for variant in own}
        return np.array([kinds[variant] for variant in context.variants], np.int64)

    # --- what variants have in common ----------------------------------------------------------------------------

    def _kind(self, own: Own) -> Hashable:
        """Return a key that is equal for variants whose updates may be merged: those of one kind of optimizer."""
        raise NotImplementedError

    def _forward(self, own: Own) -> Hashable:
        """Return a key that is equal for variants which differ in their optimizers only."""
        raise NotImplementedError

    def _update(self, own: Own) -> Hashable:
        """Return a key that is equal for variants with equal updates."""
        raise NotImplementedError

    def _different(self, step: Step) -> list[list[int]]:
        """Return the variants by what they do in a step: those with equal keys together."""
        found: dict[Hashable, list[int]] = {}
        for number in self._among:
            forward = None if step == "apply" else self._forwards[number]
            update = self._updates[number] if step in ("apply", "train") else None
            found.setdefault((forward, update), []).append(number)
        return list(found.values())

    # --- members -------------------------------------------------------------------------------------------------

    @property
    def can_mask_rows(self) -> bool:  # type: ignore[override]
        """Return True if a row of weight 0 has no influence."""
        return self.first.can_mask_rows

    @property
    def first(self) -> Own:
        """Return the definition of the first variant."""
        return self.definitions[self._among[0]]

    def of(self, member: Member) -> Own:
        """Return the definition of a member's own variant."""
        return self.definitions[self._numbers[member.name]]

    def state(self, member: Member) -> State:
        """Return a member's state, with the number of its variant."""
        number = self._numbers[member.name]
        state = {**self.of(member).state(member), "numbers": {"variant": np.int32(number)}}
        forms = {
            part: {name: (array.shape, array.dtype) for name, array in own.items()} for part, own in state.items()
        }
        optimizer = forms.pop("optimizer")
        known = [self._forms.setdefault(part, form) == form for part, form in forms.items()]
        known.append(self._forms.setdefault(("optimizer", self._kinds[number]), optimizer) == optimizer)
        if not all(known):
            raise CannotFuseError(f"{self._difference(number, 0)}, with which it has other variables")
        return state

    def write_back(self, member: Member, state: State) -> None:
        """Copy a member's own NumPy arrays into its model."""
        self.of(member).write_back(member, state)

    def try_out(self, state: State, batch: Tree) -> None:
        """Try a member on a few rows. Whether the other variants do the same is known when steps are merged."""
        self.first.try_out(state, batch)
        self._try_step(self.results, self.fresh_metrics())

    def fresh_metrics(self) -> Arrays:
        """Return a member's metrics before the first batch."""
        return self.first.fresh_metrics()

    def check_all(self, stacked: State, batch: Batch) -> None:
        """Raise `CannotFuseError` if members could be trained together, but not evaluated or asked to predict."""
        state = map_tree(lambda t: t[0], stacked)
        data = batch.data if batch.shared else map_tree(lambda t: t[0], batch.data)
        own = {part: state[part] for part in ("params", "buffers", "member", "numbers")}
        self._try_step(self.evaluate, own, state["metrics"], data, None)
        try:
            self._try_step(self.predict, own, self.inputs(data))
        except CannotFuseError:
            raise
        except Exception:  # an objective may take batches that the model itself does not
            return

    def _try_step(self, step: Function, *args: Tree) -> None:
        """Trace a step, and raise what that raises."""
        self._merger.trace(step, self._merger.shapes(args)[0])

    # --- steps -----------------------------------------------------------------------------------------------

    def gradients(self, state: State, batch: Tree, weights: Tensor | None) -> dict[str, Tree]:
        """Return what `apply` needs to finish a step on a batch."""
        return self._run("gradients", state, batch, weights)

    def apply(
        self, state: State, hyper: Mapping[str, Tensor], found: dict[str, Tree]
    ) -> tuple[State, Tensor, Tensor]:
        """Return the state after an update by what `gradients` returned."""
        return self._run("apply", state, hyper, found)

    def train(
        self, state: State, hyper: Hyper, batch: Tree, weights: Tensor | None
    ) -> tuple[State, Tensor, Tensor]:
        """Return what `apply` returns after a whole step."""
        return self._run("train", state, hyper, batch, weights)

    def evaluate(
        self, state: State, metrics: dict[str, Tensor], batch: Tree, weights: Tensor | None
    ) -> tuple[dict[str, Tensor], State]:
        """Return the metrics with a batch added, and what the model has changed."""
        return self._run("evaluate", state, metrics, batch, weights)

    def predict(self, state: State, x: Tree) -> tuple[Tree, State]:
        """Return the outputs on inputs, and what the model has changed."""
        return self._run("predict", state, x)

    def results(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of the loss and the metrics."""
        found = self._merged("results", (metrics,))
        if found is not None and found[0].tables:  # which sums these are is known, but not whose
            raise CannotFuseError(f"{self._difference(1, 0)}, on which the value of a metric depends")
        return self.first.results(metrics)  # which has them in their order

    def _run(self, step: Step, *args: Tree) -> Any:
        found = self._merged(step, args)
        if found is None:
            return getattr(self.first, step)(*args)
        merged, form = found
        rows = np.zeros(len(self.definitions), np.int32)  # of the tables, by variant
        for row, own in enumerate(self._different(step)):
            rows[own] = row
        variant = args[0]["numbers"]["variant"]
        if (rows != np.arange(len(rows))).any():
            variant = self._merger.pick(rows, variant)
        return self._merger.run(merged, form, variant, args)

    def _merged(self, step: Step, args: tuple[Tree, ...]) -> tuple[Merged, Any] | None:
        """Return a step for arguments like these, and the form of its results; None if all do the same."""
        different = self._different(step)
        if len(different) == 1:
            return None
        shapes, form = self._merger.shapes(args)
        key = step, form
        if key not in self._known:
            self._known[key] = self._merge(step, shapes, different)
        return self._known[key]

    def _merge(
        self, step: Step, shapes: tuple[Tree, ...], different: Sequence[Sequence[int]]
    ) -> tuple[Merged, Any]:
        firsts = [own[0] for own in different]
        steps = [getattr(self.definitions[number], step) for number in firsts]
        found = [self._merger.trace(own, shapes) for own in steps]
        traced, forms = [own for own, _ in found], [form for _, form in found]
        other = next((number for number, form in enumerate(forms) if form != forms[0]), None)
        if other is not None:
            what = self._difference(firsts[other], firsts[0])
            raise CannotFuseError(f"{what}, with which its {_NAMES[step]} returns other parts")
        try:
            return self._merger.merge(traced), forms[0]
        except DifferenceError:
            alike, reason = classes(self._merger, traced)
        what = self._difference(firsts[alike[-1][0] or 1], firsts[0])
        together = [[number for row in rows for number in different[row]] for rows in alike]
        # Variants of other kinds of optimizers may stay with the first of these.
        together[0] += [number for number in range(len(self.definitions)) if number not in self._among]
        raise CannotFuseError(
            f"{what}, which changes more than a number in its {_NAMES[step]} ({reason})",
            together=[sorted(own) for own in together] if len(together) > 1 else None,
        )

    # --- data --------------------------------------------------------------------------------------------------

    def inputs(self, data: Tree) -> Tree:
        """Return the inputs of a batch."""
        return self.first.inputs(data)

    def check_targets(self, output_shape: tuple[int, ...], target: Tree, name: str | None) -> None:
        """Raise InputError for targets of a whole data set that the loss can't take."""
        self.first.check_targets(output_shape, target, name)

    def label_check(self, output_shape: tuple[int, ...]) -> Callable[[Tree], None] | None:
        """Return a function that raises for a batch with targets out of range; None if nothing can be checked."""
        return self.first.label_check(output_shape)
