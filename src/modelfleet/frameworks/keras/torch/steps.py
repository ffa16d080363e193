"""Steps of a lane of Keras models on torch, as the torch engine calls them."""

import copy
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Self

import keras
import torch
from torch import Tensor

from modelfleet.frameworks.errors import FINE, GRADIENT, LOSS
from modelfleet.frameworks.functional import padding_trial
from modelfleet.frameworks.keras.custom_objects import own_python
from modelfleet.frameworks.keras.steps import Steps
from modelfleet.frameworks.keras.structure import Weight, signature
from modelfleet.frameworks.keras.task import Task
from modelfleet.frameworks.keras.torch.contexts import STREAM_DRAWS, unfiltered_errors
from modelfleet.frameworks.torch import arrays
from modelfleet.frameworks.torch.base import on_host
from modelfleet.frameworks.torch.fused.arguments import Key, numbers_key
from modelfleet.frameworks.torch.fused.mapping import mapped
from modelfleet.frameworks.torch.fused.steps_protocol import How, Tensors, drawing
from modelfleet.frameworks.torch.fused.updating import keep_new
from modelfleet.frameworks.torch.modes import training_modes
from modelfleet.frameworks.torch.optimizers.counting import CoefficientsBySlice
from modelfleet.frameworks.torch.tracing.number_rules import changes
from modelfleet.frameworks.torch.tracing.recording import Origin, Recording, recording
from modelfleet.frameworks.torch.tracing.replaying import replaying
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Model, Signature, State, Tree

PARTS = ("params", "buffers", "optimizer", "metrics")


class TorchSteps:
    """Steps of a lane, made of a Keras model's pure functions (see `torch.steps_protocol.LaneSteps`)."""

    layout: frozenset[str] = frozenset()
    contiguous = False
    differentiates = False

    def __init__(self, variants: Sequence[tuple[Model, Task]]) -> None:
        """Make the steps, from the variants of the lane's members, each with the model of one."""
        self.model, self.task = variants[0]
        self.modes = training_modes(self.model)
        self.by_variant = [Steps(model) for model, _ in variants]
        self.own = self.by_variant[0]
        structures = [signature(model) for model, _ in variants]
        tasks = [task for _, task in variants]
        self.forward_of, self.first_variants = _numbered(
            [
                (own, task.key if task.forward is None else task.forward)
                for own, task in zip(structures, tasks, strict=True)
            ]
        )
        """Which kind of forward pass each variant has; and the first variant of each."""
        self.update_of, firsts = _numbered(
            [(constraints(own), task.optimizer) for own, task in zip(structures, tasks, strict=True)]
        )
        """Which kind of update each variant has."""
        self.updates = [self.by_variant[number] for number in firsts]
        self.unused: frozenset[str] = frozenset()
        self.members_differ = len(self.first_variants) > 1
        # By kind and form of a batch, those of each kind of forward pass.
        self.recordings: dict[Key, list[Recording]] = {}
        self.known_recordings: dict[Hashable, int] = {}  # numbered, without the numbers in which members differ

    @property
    def can_mask_rows(self) -> bool:
        """Return True if the loss and every metric can leave out padded rows by weights."""
        return self.own.can_mask_rows

    @property
    def apart(self) -> str | None:
        """Return why these are not the steps that Keras would take, as far as is known."""
        return next((own.apart for own in self.by_variant if own.apart is not None), None)

    @property
    def stale(self) -> bool:
        """Return True if a model was changed or compiled again since these steps were made."""
        return any(own.stale for own in self.by_variant)

    def of_variant(self, number: int) -> Self:
        """Return steps that run the Python of a variant's model."""
        found = copy.copy(self)
        found.own = self.by_variant[number]
        found.model = found.own.model
        found.modes = training_modes(found.model)
        return found

    def variants_by_forward(self, together: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the variants with these kinds of forward passes."""
        return [
            [variant for variant, number in enumerate(self.forward_of) if number in numbers]
            for numbers in together
        ]

    def roots(self) -> list[tuple[str, object]]:
        """Return everything whose Python runs while a step is traced, by the names that messages use."""
        return own_python(self.model)

    def refuse_other_parameters(self, state: State, shared: Tensors) -> None:
        """Do nothing: a layer frozen in the middle of a fit counts from the next compile on, as in Keras."""

    def find_unused(self, state: State, shared: Tensors, data: Tree, weights: Tensor | None, how: How) -> None:
        """Find the variables that do not influence the loss, by one backward pass of the first member."""
        data = data if how.shared_data else map_tree(lambda t: t[0], data)
        weights = None if weights is None else weights[0]
        one = {part: map_tree(lambda t: t[0].clone(), state[part]) for part in PARTS}
        with self._keras(state, fused=False):
            found = self._gradients(one, data, weights, fused=False)[0]
        self.unused = frozenset(one["params"].keys() - found.keys())

    def train(
        self,
        state: State,
        shared: Tensors,
        coefficients: CoefficientsBySlice,
        active: Tensor,
        data: Tree,
        weights: Tensor | None,
        how: How,
    ) -> Tensor:
        """Take one step of every active member, in place. Return the losses `(member,)`."""
        if len(coefficients) > 1:
            found = self.gradients(state, shared, data, weights, how)
            return self.apply(state, shared, coefficients, active, found, how)
        own, steps = _given(state, PARTS, how), self.updates[_rule(coefficients)]
        key = numbers_key("train", data, weights, shared=how.shared_data)

        def step(own: State, data: Tree, weights: Tensor | None) -> Tree:
            return self._applied(steps, own, self._gradients(own, data, weights, fused=how.fused, key=key))

        with self._keras(state, how.fused):
            found = mapped(step, (own, data, weights), _axes(how), fused=how.fused)
        return self._keep(state, active, *found)

    def gradients(self, state: State, shared: Tensors, data: Tree, weights: Tensor | None, how: How) -> Tree:
        """Return every member's gradients, and its loss, buffers and metrics."""
        key = numbers_key("train", data, weights, shared=how.shared_data)

        def found(own: State, data: Tree, weights: Tensor | None) -> Tree:
            return self._gradients(own, data, weights, fused=how.fused, key=key)

        own = _given(state, PARTS, how)
        with self._keras(state, how.fused):
            return mapped(found, (own, data, weights), _axes(how), fused=how.fused)

    def apply(
        self,
        state: State,
        shared: Tensors,
        coefficients: CoefficientsBySlice,
        active: Tensor,
        found: Tree,
        how: How,
    ) -> Tensor:
        """Update every active member in place by what `gradients` returned. Return the losses `(member,)`."""
        if len(coefficients) > 1:
            return torch.cat(
                [
                    self.apply(one.state(state), shared, {one.alone: {}}, one.of(active), one.of(found), how)
                    for one in coefficients
                ]
            )
        own, steps = {part: state[part] for part in PARTS}, self.updates[_rule(coefficients)]
        with self._keras(state, how.fused):
            new = mapped(partial(self._applied, steps), (own, found), (0, 0), fused=how.fused)
        return self._keep(state, active, *new)

    @staticmethod
    def _applied(steps: Steps, own: State, found: Tree) -> tuple[State, Tensor, Tensor]:
        """Return one member's state after an update, its loss, and True if its gradient was finite."""
        gradients, (loss, buffers, metrics) = found
        params, optimizer = steps.apply(own["params"], own["optimizer"], gradients)
        finite = torch.isfinite(torch.stack([(g * 0).sum() for g in gradients.values()]).sum())
        if steps.scales_loss:  # the optimizer itself skips gradients that are not finite
            finite = torch.ones_like(finite)
        return {"params": params, "buffers": buffers, "optimizer": optimizer, "metrics": metrics}, loss, finite

    def _keep(self, state: State, active: Tensor, new: State, loss: Tensor, finite: Tensor) -> Tensor:
        """Write the new state of the active members whose loss and gradient are finite. Return the losses."""
        member = state["member"]
        live = active & (member["trouble"] == FINE)
        good_loss = torch.isfinite(loss)
        keep = live & good_loss & finite
        # All results come before all writes, so that the compiler can share equal intermediate results.
        kept = [
            (tensor, torch.where(_like(keep, tensor), new[part][name].to(tensor.dtype), tensor))
            for part in PARTS
            for name, tensor in state[part].items()
            if name in new[part]  # not the tensors of another's optimizer
        ]
        for tensor, value in kept:
            tensor.copy_(value)
        keep_new(keep, member["step"], member["step"] + 1)
        keep_new(live, member["trouble"], torch.where(good_loss, torch.where(finite, FINE, GRADIENT), LOSS))
        return loss

    def evaluate(self, state: State, shared: Tensors, data: Tree, weights: Tensor | None, how: How) -> Tensors:
        """Return the metrics `(member, …)` of a state with a batch added."""
        key = numbers_key("evaluate", data, weights, shared=how.shared_data)

        def add(own: State, data: Tree, weights: Tensor | None) -> Tree:
            with self._replay(key, own):
                return self.own.evaluate(own["params"], own["buffers"], own["metrics"], data, weights)[0]

        own = _given(state, ("params", "buffers", "metrics"), how)
        with torch.no_grad(), self._keras(state, how.fused):
            return mapped(add, (own, data, weights), _axes(how), fused=how.fused)

    def predict(self, state: State, shared: Tensors, data: Tree, how: How) -> Tree:
        """Return the outputs `(member, row, …)` on a batch of inputs."""
        key = numbers_key("predict", data, None, shared=how.shared_data)

        def output_of(own: State, data: Tree) -> Tree:
            with self._replay(key, own):
                return self.own.predict(own["params"], own["buffers"], data)[0]

        own = _given(state, ("params", "buffers"), how)
        with torch.no_grad(), self._keras(state, how.fused):
            return mapped(output_of, (own, data), _axes(how)[:2], fused=how.fused)

    def results(self, metrics: dict[str, Tensor], *, fused: bool) -> dict[str, Tensor]:
        """Return the loss and the metrics `(member,)` from their sums."""
        with torch.no_grad():
            return mapped(self.own.results, (metrics,), (0,), fused=fused)

    def recorded(self, kind: str, one: State, data: Tree, weights: Tensor | None) -> Recording:
        """Return the calls that the Python of a step makes for a member, whose state has no member axis."""
        optimizer = {
            name: tensor for name, tensor in one.get("optimizer", {}).items() if name in self.own.keys["optimizer"]
        }
        train = kind == "train"
        with torch.set_grad_enabled(train), self._keras({"member": _with_axis(one["member"])}, fused=False):
            params = {name: p.detach().requires_grad_(train) for name, p in one.get("params", {}).items()}
            own = {**one, "params": params, "optimizer": optimizer}
            batch = leaves((data, weights))
            given = {
                **{Origin(part, name): own[part][name] for part in PARTS for name in own.get(part, ())},
                **{Origin("input", place): tensor for place, tensor in enumerate(batch)},
            }
            with recording(given) as recorder:
                if kind == "results":
                    recorder.returned(self.own.results(own["metrics"]))
                elif kind == "predict":
                    recorder.returned(self.own.predict(params, own["buffers"], data)[0])
                elif kind == "evaluate":
                    recorder.returned(self.own.evaluate(params, own["buffers"], own["metrics"], data, weights)[0])
                else:
                    recorder.returned(
                        self.own.loss(params, own["buffers"], own["metrics"], optimizer, data, weights)
                    )
        return recorder.recording

    def _replay(self, key: Key, own: State) -> AbstractContextManager[None]:
        """Return the context in which the first member's Python computes with the numbers of every member."""
        numbers = own.get("numbers")
        if numbers is None:
            return nullcontext()
        expected = self.recordings[key][0]
        return replaying(expected, changes(expected, numbers))

    def _gradients(self, own: State, data: Tree, weights: Tensor | None, *, fused: bool, key: Key = ()) -> Tree:
        """Return one member's gradients, and its loss, buffers and metrics. Unused variables have no gradient."""

        def loss_of(params: dict[str, Tensor]) -> tuple[Tensor, Tree]:
            with self._replay(key, own):
                return self.own.loss(params, own["buffers"], own["metrics"], own["optimizer"], data, weights)

        if fused:
            gradients, aux = torch.func.grad(loss_of, has_aux=True)(own["params"])
            gradients = {name: g for name, g in gradients.items() if name not in self.unused}
        else:
            with torch.enable_grad():
                params = {name: p.detach().requires_grad_() for name, p in own["params"].items()}
                loss, aux = loss_of(params)
                found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
            gradients = {name: g for name, g in zip(params, found, strict=True) if g is not None}
        return map_tree(torch.Tensor.detach, (gradients, aux))

    def ignores_padding(self, one: State, data: Tree, real: int) -> bool:
        """Return True if padding has no influence, whichever numbers a member has (see `_ignores_padding`)."""
        return all(self.of_variant(own)._ignores_padding(one, data, real) for own in self.first_variants)

    def rows_are_independent(self, one: State, inputs: Tree) -> bool:
        """Return True if the output for a row depends on that row alone, whichever numbers a member has."""
        return all(self.of_variant(own)._rows_are_independent(one, inputs) for own in self.first_variants)

    def _ignores_padding(self, one: State, data: Tree, real: int) -> bool:
        """Return True if a member's step on `real` rows stays the same with padding of weight 0 behind them.

        Random weights are tried, too: a member's own weights may hide an influence (see `functional.padding`).
        """
        own = {part: map_tree(lambda t: t[0], one[part]) for part in PARTS}
        weights = (torch.arange(len(leaves(data)[0]), device=one["member"]["seed"].device) < real).float()
        data = map_tree(lambda leaf: arrays.padded_otherwise(leaf, real), data)
        few = map_tree(lambda t: t[:real], data)
        params = map_tree(on_host, own["params"])
        try:
            for number in (1, 2, None):
                if number is not None:
                    drawn = padding_trial.random_weights(params, number)
                    own["params"] = {
                        name: torch.from_numpy(drawn[name]).to(tensor) for name, tensor in own["params"].items()
                    }
                else:
                    own["params"] = map_tree(lambda t: t[0], one["params"])
                with self._keras(one, fused=False):
                    padded = map_tree(on_host, self._gradients(own, data, weights, fused=False))
                with self._keras(one, fused=False):
                    alone = map_tree(on_host, self._gradients(own, few, None, fused=False))
                pairs = zip(padded, alone, (True, False), strict=True)  # the gradients, and everything else
                if not all(padding_trial.alike(p, a, together=together) for p, a, together in pairs):
                    return False
        except Exception:  # a model that accepts only batches of one size
            return False
        return True

    def _rows_are_independent(self, one: State, inputs: Tree) -> bool:
        """Return True if a member's output for a row depends on that row alone, by trials like those above."""
        rows = len(leaves(inputs)[0])
        few = map_tree(lambda t: t[: (rows + 1) // 2], inputs)
        params = map_tree(lambda t: on_host(t[0]), one["params"])
        buffers = map_tree(lambda t: t[0], one["buffers"])
        try:
            for number in (1, 2, None):
                drawn = params if number is None else padding_trial.random_weights(params, number)
                own = {name: torch.from_numpy(drawn[name]).to(tensor) for name, tensor in one["params"].items()}
                with torch.no_grad(), self._keras(one, fused=False):
                    whole, part = (map_tree(on_host, self.own.predict(own, buffers, x)[0]) for x in (inputs, few))
                if not padding_trial.rows_alike(whole, part, rows):
                    return False
        except Exception:  # a model that accepts only batches of one size
            return False
        return True

    @contextmanager
    def _keras(self, state: State, fused: bool) -> Iterator[None]:
        device = state["member"]["seed"].device
        with keras.device(str(device)), STREAM_DRAWS, unfiltered_errors(), drawing(state["member"], fused=fused):
            yield


def constraints(structure: Signature) -> Hashable:
    """Return the constraints of a model's weights, which an update applies."""
    return tuple(own.constraint for _, own in structure.entries if isinstance(own, Weight))


def _numbered(keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Return the number of each key among the different ones, and where each of these comes first."""
    known: dict[Hashable, int] = {}
    numbers = [known.setdefault(key, len(known)) for key in keys]
    return numbers, [numbers.index(number) for number in range(len(known))]


def _given(state: State, parts: Sequence[str], how: How) -> State:
    """Return some parts of a state, and the numbers of the members if they differ in some."""
    return {
        part: state[part] for part in (*parts, "numbers") if part in state and (part != "numbers" or how.fused)
    }


def _with_axis(member: Tensors) -> Tensors:
    """Return the seed and the step of a member with a member axis."""
    return {name: member[name][None] for name in ("seed", "step")}


def _rule(coefficients: CoefficientsBySlice) -> int:
    """Return the number of the task of members that all have the same."""
    return next((one.rule for one in coefficients), 0)


def _axes(how: How) -> tuple[int | None, ...]:
    """Return the member axes of (state, data, weights)."""
    return 0, how.axis, 0


def _like(per_member: Tensor, tensor: Tensor) -> Tensor:
    return per_member.view(-1, *[1] * (tensor.dim() - 1))
