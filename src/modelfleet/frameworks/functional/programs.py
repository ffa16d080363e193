"""The steps of a lane as functions of its stacked state, compiled as they are needed."""

from collections.abc import Callable, Sequence
from typing import Any

from modelfleet.frameworks.errors import FINE, GRADIENT, LOSS, CannotFuseError
from modelfleet.frameworks.functional.contract import PARTS, Backend, Definition, Function, State
from modelfleet.trees import leaves, map_tree


class Programs:
    """The steps for lanes of one structure and task, compiled as they are needed."""

    def __init__(self, definition: Definition, backend: Backend, *, fused: bool) -> None:
        self.backend = backend
        self.fused = fused
        self.take = backend.compile(backend.take)
        self.put = backend.compile(backend.put, donate=True)
        self.renew(definition)

    def renew(self, definition: Definition) -> None:
        """Begin anew with another definition: what was traced of the one before is forgotten."""
        self.definition = definition
        self.reads: Any = None  # what they were traced under, where a framework keeps that
        self.untraced: str | None = None
        self.names: list[str] = []  # of the loss and the metrics, in their order
        self.bears_padding: dict[Any, bool] = {}
        self.rows_apart: dict[int, bool] = {}
        self.output_shapes: dict[Any, tuple[int, ...] | None] = {}
        self._known: dict[tuple[str, bool], tuple[Function, Function]] = {}
        self._plain: set[tuple[str, bool]] = set()

    def run(self, kind: str, shared: bool, *args: Any) -> Any:
        """Run a step: "train", "several", "one", "gradients", "apply", "evaluate", "evaluate_one", "predict",
        "predict_one" or "results"."""
        compiled, plain = self._functions(kind, shared)
        return (plain if (kind, shared) in self._plain else compiled)(*args)

    def ready(self, kind: str, shared: bool, *args: Any) -> None:
        """Make sure that a step can be run; raises `CannotFuseError` if the members can't be run as one."""
        try:
            self.backend.trace(self._functions(kind, shared)[0], args)
        except Exception as error:  # whatever a model may do that can't be traced
            self.refuse(kind, self.backend.reason(error), error)

    def refuse(self, kind: str, reason: str, error: Exception | None = None) -> None:
        """Run such steps as Python, for a reason; raises `CannotFuseError` if they are of several members."""
        if self.fused:
            raise CannotFuseError(reason) from error
        self.untraced = reason
        self._plain |= {(name, both) for name in _TOGETHER[kind] for both in (True, False)}

    def working_bytes(self, shared: bool, *args: Any) -> int | None:
        """What a train step takes on the device beside the state."""
        if ("train", shared) in self._plain:
            return None
        return self.backend.working_bytes(self._functions("train", shared)[0], args)

    def _functions(self, kind: str, shared: bool) -> tuple[Function, Function]:
        """A step as a program, and as it is."""
        if (kind, shared) not in self._known:
            step = getattr(self, f"_{kind}")

            def function(*args: Any) -> Any:
                return step(shared, *args)

            compiled = self.backend.compile(function, donate=kind in ("train", "several", "one", "apply"))
            plain = function if kind != "several" else self._several_plain(shared)
            self._known[kind, shared] = compiled, plain
        return self._known[kind, shared]

    # --- the steps, as functions of the stacked state. `shared`: the data have no member axis.

    def _train(self, shared: bool, state: State, hyper: Any, active: Any, data: Any, weights: Any) -> State:
        args, mapped = (state, hyper, data, weights), (True, True, not shared, True)
        return self._kept(state, active, *self._mapped(self.definition.train, args, mapped))

    def _gradients(self, shared: bool, state: State, data: Any, weights: Any) -> Any:
        return self._mapped(self.definition.gradients, (state, data, weights), (True, not shared, True))

    def _apply(self, _: bool, state: State, hyper: Any, active: Any, found: Any) -> State:
        args = (state, hyper, found)
        return self._kept(state, active, *self._mapped(self.definition.apply, args, (True, True, True)))

    def _kept(self, state: State, active: Any, new: State, good_loss: Any, good_gradient: Any) -> State:
        """Return the new state of active members whose loss and gradient were finite, the old of others."""
        where, member = self.backend.where, state["member"]
        live = active & (member["trouble"] == FINE)
        keep = live & good_loss & good_gradient
        kept = {part: _merged(lambda a, b: where(keep, a, b), new[part], state[part]) for part in PARTS}
        trouble = where(good_loss, where(good_gradient, FINE, GRADIENT), LOSS)
        kept["member"] = {
            **member,
            "step": where(keep, member["step"] + 1, member["step"]),
            "trouble": where(live, trouble, member["trouble"]),
        }
        return kept

    def _several(
        self, shared: bool, state: State, hyper: Any, active: Any, data: Any, weights: Any, count: Any
    ) -> State:
        train = self.backend.within(*self._functions("train", shared))

        def step(state: State, xs: Any) -> State:
            return train(state, hyper, active, *xs)

        return self.backend.loop(step, state, (data, weights), count)

    def _several_plain(self, shared: bool) -> Function:
        def run(state: State, hyper: Any, active: Any, data: Any, weights: Any, count: int) -> State:
            for number in range(count):
                xs = map_tree(lambda leaf, number=number: leaf[number], (data, weights))
                state = self._train(shared, state, hyper, active, *xs)
            return state

        return run

    def _one(self, _: bool, state: State, rows: Any, hyper: Any, active: Any, data: Any) -> State:
        take = self.backend.take
        part = self._train(True, take(state, rows), take(hyper, rows), active, data, None)
        return self.backend.put(state, rows, part)

    def _evaluate(self, shared: bool, state: State, totals: Any, there: Any, data: Any, weights: Any) -> Any:
        args, mapped = (state, totals, data, weights), (True, True, not shared, True)
        new, changed = self._mapped(self.definition.evaluate, args, mapped)
        kept = {part: {name: state[part][name] for name in own} for part, own in changed.items()}

        def there_only(new: Any, old: Any) -> Any:
            return self.backend.where(there, new, old)

        return _merged(there_only, new, totals), _merged(there_only, changed, kept)

    def _evaluate_one(self, _: bool, state: State, totals: Any, rows: Any, there: Any, data: Any) -> Any:
        take = self.backend.take
        part, changed = self._evaluate(True, take(state, rows), take(totals, rows), there, data, None)
        return self.backend.put(totals, rows, part), self._put_changed(state, rows, changed)

    def _predict(self, shared: bool, state: State, there: Any, data: Any) -> Any:
        outputs, changed = self._mapped(self.definition.predict, (state, data), (True, not shared))
        kept = {part: {name: state[part][name] for name in own} for part, own in changed.items()}
        return outputs, _merged(lambda new, old: self.backend.where(there, new, old), changed, kept)

    def _predict_one(self, _: bool, state: State, rows: Any, there: Any, data: Any) -> Any:
        outputs, changed = self._predict(True, self.backend.take(state, rows), there, data)
        return outputs, self._put_changed(state, rows, changed)

    def _put_changed(self, state: State, rows: Any, changed: State) -> State:
        kept = {part: {name: state[part][name] for name in own} for part, own in changed.items()}
        return self.backend.put(kept, rows, changed)

    def _results(self, _: bool, metrics: dict[str, Any]) -> dict[str, Any]:
        def results(metrics: dict[str, Any]) -> dict[str, Any]:
            found = self.definition.results(metrics)
            self.names = list(found)  # programs give dicts in the order of their keys; people want the loss first
            return found

        return self._mapped(results, (metrics,), (True,))

    def _mapped(self, function: Function, args: Sequence[Any], mapped: Sequence[bool]) -> Any:
        # A member on its own is not mapped: the plain operations are faster, and some models have no others.
        if leaves(args[0])[0].shape[0] > 1:
            return self.backend.map(function, args, mapped)
        rows = [map_tree(lambda t: t[0], arg) if own else arg for arg, own in zip(args, mapped, strict=True)]
        return map_tree(lambda t: t[None], function(*rows))


_TOGETHER = {  # what can't be traced if one of them can't: a model that branches when trained does so elsewhere
    "train": (
        *("train", "several", "one", "gradients", "apply"),
        *("evaluate", "evaluate_one", "predict", "predict_one"),
    ),
    "evaluate": ("evaluate", "evaluate_one"),
    "predict": ("predict", "predict_one"),
}


def _merged(function: Callable[[Any, Any], Any], new: Any, old: Any) -> Any:
    """`function(new, old)` of the tensors of two trees of dicts, in the order of the second."""
    if isinstance(old, dict):
        return {name: _merged(function, new[name], value) for name, value in old.items()}
    return function(new, old)
