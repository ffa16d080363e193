"""Steps of a lane as functions of its stacked state, compiled when they are first needed."""

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import numpy as np

from modelfleet.frameworks.engine import Hyper
from modelfleet.frameworks.errors import FINE, GRADIENT, LOSS, CannotFuseError
from modelfleet.frameworks.functional.contract import PARTS, Backend, Definition, Function, Slice, State
from modelfleet.trees import leaves, map_tree, map_trees
from modelfleet.types import Kind, Tensor, Tree

StepName = Literal[
    "train", "several", "one", "gradients", "apply", "evaluate", "evaluate_one", "predict", "results"
]

Slices = tuple[Slice, ...]
"""Slices of a lane whose members have different tasks; empty if all have the first."""
Recorded = tuple[State, Tensor]
"""A state, and the losses of the steps that led to it."""


class Programs:
    """Steps for lanes of one structure and task, compiled when they are first needed.

    Steps of a lane whose members have different optimizers are compiled for its `slices`.
    """

    def __init__(self, definition: Definition, backend: Backend, *, fused: bool) -> None:
        self.backend = backend
        self.fused = fused
        self.take = backend.compile(backend.take)
        self.put = backend.compile(backend.put, donate=True)
        self.renew(definition)

    def renew(self, definition: Definition) -> None:
        """Start again with another definition, and forget everything that was traced before."""
        self.definition = definition
        self.reads: Any = None  # the Python values that the steps were traced under, if an engine keeps them
        self.untraced: str | None = None
        self.names: list[str] = []  # the loss and the metrics, in their order
        self.ignores_padding: dict[tuple[int, int], bool] = {}
        self.independent_rows: dict[int, bool] = {}
        self.output_shapes: dict[Hashable, tuple[int, ...] | None] = {}
        self._known: dict[tuple[StepName, bool, Slices], tuple[Function, Function]] = {}
        self._plain: set[tuple[StepName, bool]] = set()  # steps that can't be traced

    def run(self, name: StepName, shared: bool, *args: Any, slices: Slices = ()) -> Any:
        """Run a step. `shared` is True if its data have no member axis."""
        compiled, plain = self._functions(name, shared, slices)
        return (plain if (name, shared) in self._plain else compiled)(*args)

    def ready(self, kind: Kind, shared: bool, *args: Any, slices: Slices = ()) -> None:
        """Trace a step, or have it run as Python.

        Raises:
            CannotFuseError: The step is of several members and can't be traced.
        """
        try:
            self.backend.trace(self._functions(kind, shared, slices)[0], args)
        except CannotFuseError:
            raise
        except Exception as error:  # a model may do anything that can't be traced
            self.refuse(kind, self.backend.reason(error), error)

    def refuse(self, kind: Kind, reason: str, error: Exception | None = None) -> None:
        """Run such steps as Python from now on.

        Raises:
            CannotFuseError: The steps are of several members.
        """
        if self.fused:
            raise CannotFuseError(reason) from error
        self.untraced = reason
        self._plain |= {(name, both) for name in _TOGETHER[kind] for both in (True, False)}

    def working_bytes(self, shared: bool, *args: Any, slices: Slices = ()) -> int | None:
        """Return the memory that a train step needs beside the state; None if not known."""
        if ("train", shared) in self._plain:
            return None
        return self.backend.working_bytes(self._functions("train", shared, slices)[0], args)

    def _functions(self, name: StepName, shared: bool, slices: Slices = ()) -> tuple[Function, Function]:
        """Return a step as a program, and as a plain function."""
        key = name, shared, slices
        if key not in self._known:
            step = getattr(self, f"_{name}")
            updates = name in ("train", "several", "one", "apply")
            given = (shared, slices) if updates else (shared,)

            def function(*args: Any) -> Any:
                return step(*given, *args)

            compiled = self.backend.compile(function, donate=updates)
            plain = function if name != "several" else self._several_plain(shared, slices)
            self._known[key] = compiled, plain
        return self._known[key]

    # --- steps, as functions of the stacked state

    def _train(
        self,
        shared: bool,
        slices: Slices,
        state: State,
        hyper: Hyper,
        active: Tensor,
        data: Tree,
        weights: Tensor | None,
        record: tuple[()] | None = None,
    ) -> State | Recorded:
        """Take a step. With `record=()`, also return the losses `(member,)`."""
        found = self._step(shared, slices, state, hyper, active, data, weights)
        return found[0] if record is None else found

    def _step(
        self,
        shared: bool,
        slices: Slices,
        state: State,
        hyper: Hyper,
        active: Tensor,
        data: Tree,
        weights: Tensor | None,
    ) -> Recorded:
        if len(slices) > 1:
            found = self._gradients(shared, state, data, weights)
            new = self._applied(slices, state, hyper, found)
        else:
            definition = self.definition.by_task[slices[0].task if slices else 0]
            args, mapped = (state, hyper, data, weights), (True, True, not shared, True)
            new = self._mapped(definition.train, args, mapped)
        return self._kept(state, active, *new), new[1]

    def _gradients(self, shared: bool, state: State, data: Tree, weights: Tensor | None) -> Tree:
        return self._mapped(self.definition.gradients, (state, data, weights), (True, not shared, True))

    def _apply(self, _: bool, slices: Slices, state: State, hyper: Hyper, active: Tensor, found: Tree) -> State:
        return self._kept(state, active, *self._applied(slices, state, hyper, found))

    def _applied(self, slices: Slices, state: State, hyper: Hyper, found: Tree) -> tuple[State, Tensor, Tensor]:
        """Return the state after an update of each slice by its own optimizer, the losses, and good gradients."""
        args, mapped = (state, hyper, found), (True, True, True)
        if len(slices) < 2:
            definition = self.definition.by_task[slices[0].task if slices else 0]
            return self._mapped(definition.apply, args, mapped)
        parts = []
        for own in slices:
            some = own.of(args)
            new, *rest = self._mapped(self.definition.by_task[own.task].apply, some, mapped)
            # Tensors of other optimizers stay as they are.
            parts.append(({**new, "optimizer": {**some[0]["optimizer"], **new["optimizer"]}}, *rest))
        return map_trees(self.backend.join, parts)

    def _kept(self, state: State, active: Tensor, new: State, loss: Tensor, good_gradient: Tensor) -> State:
        """Return the new state of active members whose loss and gradient were finite, the old of others."""
        where, member, good_loss = self.backend.where, state["member"], self.backend.is_finite(loss)
        live = active & (member["trouble"] == FINE)
        keep = live & good_loss & good_gradient
        kept = {part: self._chosen(keep, {**state[part], **new[part]}, state[part]) for part in PARTS}
        trouble = where(good_loss, where(good_gradient, FINE, GRADIENT), LOSS)
        kept["member"] = {
            **member,
            "step": where(keep, member["step"] + 1, member["step"]),
            "trouble": where(live, trouble, member["trouble"]),
        }
        kept["numbers"] = state["numbers"]
        return kept

    def _several(
        self,
        shared: bool,
        slices: Slices,
        state: State,
        hyper: Hyper,
        active: Tensor,
        data: Tree,
        weights: Tensor | None,
        count: Tensor,
        losses: Tensor | None = None,
    ) -> State | Recorded:
        """Take several steps. With `losses` `(step, member)`, also return the losses in its place."""
        train = self.backend.within(*self._functions("train", shared, slices))

        def step(state: State, xs: tuple[Tree, Tree], _: Tensor) -> State:
            return train(state, hyper, active, *xs)

        def recorded(carried: Recorded, xs: tuple[Tree, Tree], number: Tensor) -> Recorded:
            state, loss = train(carried[0], hyper, active, *xs, ())
            return state, self.backend.put(carried[1], number[None], loss[None])

        if losses is None:
            return self.backend.loop(step, state, (data, weights), count)
        return self.backend.loop(recorded, (state, losses), (data, weights), count)

    def _several_plain(self, shared: bool, slices: Slices) -> Function:
        def run(
            state: State,
            hyper: Hyper,
            active: Tensor,
            data: Tree,
            weights: Tensor | None,
            count: int,
            losses: Tensor | None = None,
        ) -> State | Recorded:
            for number in range(count):
                xs = map_tree(lambda leaf, number=number: leaf[number], (data, weights))
                state, loss = self._step(shared, slices, state, hyper, active, *xs)
                if losses is not None:
                    losses = self.backend.put(losses, np.array([number]), loss[None])
            return state if losses is None else (state, losses)

        return run

    def _one(
        self,
        _: bool,
        slices: Slices,
        state: State,
        rows: Tensor,
        hyper: Hyper,
        active: Tensor,
        data: Tree,
        record: tuple[()] | None = None,
    ) -> State | Recorded:
        take = self.backend.take
        part, loss = self._step(True, slices, take(state, rows), take(hyper, rows), active, data, None)
        new = self.backend.put(state, rows, part)
        return new if record is None else (new, loss)

    def _evaluate(
        self, shared: bool, state: State, totals: Tree, present: Tensor, data: Tree, weights: Tensor | None
    ) -> tuple[Tree, State]:
        args, mapped = (state, totals, data, weights), (True, True, not shared, True)
        new, changed = self._mapped(self.definition.evaluate, args, mapped)
        old = _same_names(state, changed)
        return self._chosen(present, new, totals), self._chosen(present, changed, old)

    def _evaluate_one(
        self, _: bool, state: State, totals: Tree, rows: Tensor, present: Tensor, data: Tree
    ) -> tuple[Tree, State]:
        take = self.backend.take
        part, changed = self._evaluate(True, take(state, rows), take(totals, rows), present, data, None)
        put = self.backend.put
        return put(totals, rows, part), put(_same_names(state, changed), rows, changed)

    def _predict(self, shared: bool, state: State, present: Tensor, data: Tree) -> tuple[Tree, State]:
        outputs, changed = self._mapped(self.definition.predict, (state, data), (True, not shared))
        return outputs, self._chosen(present, changed, _same_names(state, changed))

    def _results(self, _: bool, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        def results(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
            found = self.definition.results(metrics)
            self.names = list(found)  # a program sorts the keys of a dict; the loss should come first
            return found

        return self._mapped(results, (metrics,), (True,))

    def _chosen(self, chosen: Tensor, new: Tree, old: Tree) -> Tree:
        """Return the new tensors of the members that are chosen, and the old of others, in the order of `old`."""
        if isinstance(old, dict):
            return {name: self._chosen(chosen, new[name], value) for name, value in old.items()}
        return self.backend.where(chosen, new, old)

    def _mapped(self, function: Function, args: Sequence[Any], mapped: Sequence[bool]) -> Any:
        # A single member is not mapped: plain operations are faster, and some operations can't be mapped.
        if leaves(args[0])[0].shape[0] > 1:
            return self.backend.map(function, args, mapped)
        rows = [self.backend.without_axis(arg) if own else arg for arg, own in zip(args, mapped, strict=True)]
        return self.backend.with_axis(function(*rows))


# Steps that run as Python if one of them can't be traced: a model that branches as it trains also does elsewhere.
_TOGETHER: dict[Kind, tuple[StepName, ...]] = {
    "train": ("train", "several", "one", "gradients", "apply", "evaluate", "evaluate_one", "predict"),
    "evaluate": ("evaluate", "evaluate_one"),
    "predict": ("predict",),
}


def _same_names(state: State, changed: State) -> State:
    """Return the tensors of a state that `changed` also has."""
    return {part: {name: state[part][name] for name in own} for part, own in changed.items()}
