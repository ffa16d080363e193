"""Steps of a lane as plain functions of tensors: train, evaluate, predict.

Each works on the stacked state of all members at once. `fused=True` maps one member's computation over the member
axis. `fused=False` runs a lane of one member as any torch loop would, for models that can't be mapped. Both give a
member the same numbers.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch._functorch.eager_transforms import enable_inplace_requires_grad

from modelfleet.frameworks.errors import FINE, CannotFuseError
from modelfleet.frameworks.torch.functional import call_with
from modelfleet.frameworks.torch.fused import packing
from modelfleet.frameworks.torch.fused.arguments import Key, numbers_key
from modelfleet.frameworks.torch.fused.fast_path import has_other_numbers
from modelfleet.frameworks.torch.fused.mapping import Axes, mapped, mapped_gradients
from modelfleet.frameworks.torch.fused.steps_protocol import (
    FastPathError,
    How,
    NoGradientError,
    Tensors,
    drawing,
)
from modelfleet.frameworks.torch.fused.updating import (
    gradient_norms,
    per_member,
    refuse_changed_form,
    update,
    update_all,
)
from modelfleet.frameworks.torch.modes import training_modes
from modelfleet.frameworks.torch.optimizers.counting import CoefficientsBySlice
from modelfleet.frameworks.torch.optimizers.slices import Rule
from modelfleet.frameworks.torch.parallel import row_sums
from modelfleet.frameworks.torch.python_state.checks import StatefulError
from modelfleet.frameworks.torch.python_state.undo import undoing_side_effects
from modelfleet.frameworks.torch.random.eager import EagerDraws
from modelfleet.frameworks.torch.random.streams import BatchRows, DrawShapes, Streams
from modelfleet.frameworks.torch.task import PRECISIONS, Task, call, logits
from modelfleet.frameworks.torch.tracing.number_rules import changes
from modelfleet.frameworks.torch.tracing.parameters import NeedsGradientError, ParameterMode
from modelfleet.frameworks.torch.tracing.recording import Origin, Recording, recording
from modelfleet.frameworks.torch.tracing.replaying import replaying
from modelfleet.frameworks.torch.widths.padding import OWN, VARIANT, Padding
from modelfleet.frameworks.torch.widths.rules import RULES
from modelfleet.trees import leaves, map_tree
from modelfleet.types import State, Tree

Run = Callable[..., Tree]
"""A function of a model or of tensors. It returns a tree of tensors."""
_UNCHANGED = nullcontext()


class Recorded(Exception):  # noqa: N818  no error: it ends a run that has been recorded
    """Raised as soon as a step that is only recorded has been."""

    def __init__(self, found: Recording) -> None:
        super().__init__()
        self.recording = found


class Steps:
    """Train, evaluate and predict steps for lanes of one structure and one task, apart from its optimizer.

    `rules` are the update rules of the members. Without any, all members have the task's. `layout` names the
    parameters that are stored transposed. In every step, `shared` holds the tensors that all members share. They
    have no member axis, and what depends on them alone is computed once.
    """

    def __init__(self, model: nn.Module, task: Task, layout: frozenset[str], rules: Sequence[Rule] = ()) -> None:
        self.model = model
        self.modes = training_modes(model)
        self.task = task
        self.rules = list(rules) or [Rule(task.optimizer, task.clip)]
        self.layout = layout
        self.unused: frozenset[str] = frozenset()  # parameters that take no part in the loss
        self.contiguous = False  # True if the model needs contiguous weights, for `weight.view(-1)`
        self.differentiates = False  # True if the objective takes gradients itself, and needs them to evaluate
        self.counting: str | None = None  # a buffer that evaluating changes
        self.takes_fast_path = False  # True if members alone, in evaluation, take torch's fast path with a mask
        self.draws: DrawShapes = ()  # what a step draws, for `row_gradients` of batches like the next one
        self.recordings: dict[
            Key, Recording
        ] = {}  # by kind and form of a batch, for members that differ in numbers
        self.padding: dict[Key, Padding] = {}  # by the same, for members of unequal widths
        self.known_padding: list[Padding] = []  # all that were tried
        self.known_recordings: dict[Hashable, int] = {}  # numbered, without the numbers in which members differ
        self.members_differ = False  # True if the members of the lane differ in numbers
        self.writes_inputs = False  # True if the model writes into its inputs
        self.records = False  # True while a step runs only to be recorded

    @property
    def can_mask_rows(self) -> bool:
        """Return True if the loss and every metric can leave out padded rows by weights."""
        return self.task.can_mask_rows

    def roots(self) -> list[tuple[str, object]]:
        """Return everything whose Python runs while a step is traced, by the names that messages use."""
        task = self.task
        roots: list[tuple[str, object]] = [("self", self.model), ("the objective", task.objective)]
        if task.loss is not None:
            roots.append(("the loss", task.loss.plain))
        return roots + [(f"the metric {metric.name}", metric.sums) for metric in task.metrics]

    def refuse_other_parameters(self, state: State, shared: Tensors) -> None:
        """Raise `CannotFuseError` if a parameter was frozen or unfrozen since the state was stacked."""
        for name, parameter in self.model.named_parameters():
            if name not in shared and parameter.requires_grad != (name in state["params"]):
                done = "unfrozen" if parameter.requires_grad else "frozen"
                raise StatefulError(f"its parameter {name} was {done} meanwhile")

    def find_unused(self, state: State, shared: Tensors, data: Tree, weights: Tensor | None, how: How) -> None:
        """Find the parameters that take no part in the loss, by one backward pass of the first member alone."""
        if not how.shared_data:
            data = map_tree(lambda t: t[0], data)
        weights = None if weights is None else weights[0]
        data, shared = map_tree(torch.clone, data), map_tree(torch.clone, shared)  # the forward may write to them
        one = {part: map_tree(lambda t: t[0].clone(), tensors) for part, tensors in state.items()}
        with drawing(state["member"], fused=False), torch.enable_grad():
            params = {name: p.requires_grad_() for name, p in one["params"].items()}
            own = {**params, **one["frozen"], **shared}
            loss, _ = self._call(own, one["buffers"], self.task.run, data, weights)
            if params and not loss.requires_grad:
                raise NoGradientError("its loss does not depend on its parameters, so there is no gradient")
            found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        self.unused = frozenset(name for name, g in zip(params, found, strict=True) if g is None)

    def refuse_fast_path(self, kind: str, state: State, shared: Tensors, data: Tree, how: How) -> None:
        """Raise FastPathError if the first member alone, in evaluation, has other numbers by torch's fast path."""

        def run(model: nn.Module, data: Tree) -> Tree:
            return call(model, data) if kind == "predict" else self.task.run(model, data, None)[0]

        if PRECISIONS[self.task.precision] is not None:
            return  # below autocast, there is no fast path
        if has_other_numbers(self.model, lambda: self._run_alone(run, state, shared, data, how)):
            self.takes_fast_path = True
            raise FastPathError(
                "in evaluation, torch's fast path for transformer layers gives masked positions other numbers "
                "than their operations do. torch.backends.mha.set_fastpath_enabled(False) turns it off"
            )

    def _run_alone(self, run: Run, state: State, shared: Tensors, data: Tree, how: How, *more: Tree) -> Tree:
        """Return `run(model, data, *more)` for the first member, without modes: torch's fast path avoids them."""
        if not how.shared_data:
            data = map_tree(lambda t: t[0], data)
        one = {part: map_tree(lambda t: t[0], state[part]) for part in ("params", "frozen", "buffers")}
        # Where members of unequal widths are padded, the model's own tensors have its shapes.
        known = dict(self.model.named_parameters())
        given = {**one["params"], **one["frozen"], **shared}
        own = {name: self._as_given(name, t.detach()) for name, t in given.items()}
        own |= {name: p.detach() for name, p in known.items() if name in own and own[name].shape != p.shape}
        buffers = {name: buffer.clone() for name, buffer in one["buffers"].items()}
        member = state["member"]
        with torch.no_grad(), EagerDraws(int(member["seed"][0]), int(member["step"][0])):
            return call_with(self.model, own, buffers, run, map_tree(torch.clone, data), *more)

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
        """Take one step of every active member, in place, and return the losses `(member,)`.

        `coefficients` are the optimizers' numbers for this step, `(member,)` each, by the slice of members and the
        parameters they are for.
        With the part `packed`, the buffers of a packed state, all parameters are updated at once.
        """
        if "packed" not in state or self.unused:
            found = self.gradients(state, shared, data, weights, how)
            return self.apply(state, shared, coefficients, active, found, how)
        # The forward pass reads views of what is written to: a compiler must see that they are one.
        params = packing.split(state["packed"][""], state["params"])
        found = self.gradients({**state, "params": params}, shared, data, weights, how)
        self._update_packed(state, coefficients, active, found)
        return found["loss"]

    def gradients(
        self, state: State, shared: Tensors, data: Tree, weights: Tensor | None, how: How
    ) -> dict[str, Tree]:
        """Return what `apply` needs of a batch, `(member, …)` each.

        These are the "gradients" of the parameters that take part in the loss, the "loss", the "sums" of the
        metrics, and the "buffers" after the forward pass.
        """
        member, task = state["member"], self.task
        scale = member.get("scale")

        key = numbers_key("train", data, weights, shared=how.shared_data)

        def loss_of(params: Tensors, frozen: Tensors, buffers: Tensors, *batch: Tree) -> tuple[Tensor, Tree]:
            data, weights, scale, numbers = batch
            buffers = {name: buffer.clone() for name, buffer in buffers.items()}
            own = {**params, **frozen, **shared}
            loss, sums = self._call(own, buffers, task.run, data, weights, replay=self._replay(key, numbers, how))
            return loss if scale is None else loss * scale, (loss.detach(), sums, buffers)

        with drawing(member, fused=how.fused):
            numbers = state.get("numbers")
            args = (state["params"], state["frozen"], state["buffers"], data, weights, scale, numbers)
            axes = (0, 0, 0, how.axis, 0, 0, 0)
            gradients, (loss, sums, buffers) = mapped_gradients(loss_of, args, axes, fused=how.fused)
        # As in torch, weight decay and momentum do not touch a parameter without a gradient.
        gradients = {name: g for name, g in gradients.items() if name not in self.unused}
        if scale is not None:
            gradients = {name: (g / per_member(scale, g)).to(g.dtype) for name, g in gradients.items()}
        return {"gradients": gradients, "loss": loss, "sums": dict(sums), "buffers": buffers}

    def packed_gradients(
        self, state: State, shared: Tensors, data: Tree, weights: Tensor | None, active: Tensor, how: How
    ) -> dict[str, Tree]:
        """Return what `packed_apply` needs of a batch: as `gradients`, but with all gradients in one buffer.

        "fine" is True if all members take part, and their losses and gradients are known to be finite: their sums
        are. "norms" are those of the gradients, if they are to be clipped.
        """
        found = self.gradients(state, shared, data, weights, how)
        for name, buffer in found["buffers"].items():
            refuse_changed_form(name, state["buffers"][name], buffer)
        gradients, loss = found.pop("gradients"), found["loss"]
        gradient = packing.join(gradients)
        sums = gradient.sum(1) + loss.to(gradient.dtype)
        fine = active & (state["member"]["trouble"] == FINE) & torch.isfinite(sums)
        norms = {"norms": gradient_norms(gradients)} if any(rule.clip for rule in self.rules) else {}
        return {**found, **norms, "gradient": gradient, "fine": fine.all()}

    def packed_apply(
        self,
        state: State,
        shared: Tensors,
        coefficients: CoefficientsBySlice,
        found: dict[str, Tree],
        how: How,
    ) -> Tensor:
        """Update all members in place by what `packed_gradients` returned, and return the losses `(member,)`.

        `state` has the part `packed`, the buffers, in place of the parameters and the optimizer's tensors.
        """
        for own, numbers in coefficients.items():
            part = own.packed(state)
            update_all(self.rules[own.rule], part, part["packed"], numbers, own.of(found))
        return found["loss"]

    def apply(
        self,
        state: State,
        shared: Tensors,
        coefficients: CoefficientsBySlice,
        active: Tensor,
        found: dict[str, Tree],
        how: How,
    ) -> Tensor:
        """Update every active member in place by what `gradients` returned, and return the losses `(member,)`."""
        self._update(state, coefficients, active, found)
        return found["loss"]

    def row_gradients(
        self,
        state: State,
        shared: Tensors,
        data: Tree,
        weights: Tensor | None,
        rows_at: Tensors,
        how: How,
    ) -> tuple[Tensor, Tensor]:
        """Compute the first half of a train step on some rows of a batch. Its results are summed over all rows.

        Args:
            state: The stacked state.
            shared: The tensors that all members share.
            data: The rows.
            weights: Their weights.
            rows_at: Where they are in the batch: the `start` of the rows, the `count` of rows in the batch, and
                the `fraction` of the batch that the rows are.
            how: How the step maps over the members.

        Returns:
            The gradients `(member, number)` of the loss's total, and the columns, as in `row_sums`.
        """
        member, params, scale = state["member"], state["params"], state["member"].get("scale")

        def unit(scale: Tensor, count: Tensor) -> Tensor:
            # float16's scale is meant for the gradients of the whole batch's mean.
            return scale * rows_at["fraction"] / torch.where(count > 0, count, 1)

        key = numbers_key("row_gradients", data, weights, shared=how.shared_data)

        def total_of(params: Tensors, frozen: Tensors, buffers: Tensors, *batch: Tree) -> tuple[Tensor, Tree]:
            data, weights, scale, numbers = batch
            buffers = {name: buffer.clone() for name, buffer in buffers.items()}
            own = {**params, **frozen, **shared}
            rest = (data, weights, rows_at["fraction"])
            replay = self._replay(key, numbers, how)
            total, count, sums = self._call(own, buffers, self.task.partial_loss, *rest, replay=replay)
            found = total.detach(), count.detach(), sums
            return total if scale is None else total * unit(scale, found[1]), found

        rows = leaves(data)[0].shape[0 if how.shared_data else 1]
        part = BatchRows(rows_at["start"], rows_at["count"], rows, self.draws)
        with drawing(member, fused=how.fused, part=part):
            args = (params, state["frozen"], state["buffers"], data, weights, scale, state.get("numbers"))
            axes = (0, 0, 0, how.axis, 0, 0, 0)
            found, (total, count, sums) = mapped_gradients(total_of, args, axes, fused=how.fused)
        found = {name: g for name, g in found.items() if name not in self.unused}
        if scale is not None:
            found = {name: (g / per_member(unit(scale, count), g)).to(g.dtype) for name, g in found.items()}
        return row_sums.pack(state, found, total, count, sums)

    def row_apply(
        self,
        state: State,
        shared: Tensors,
        coefficients: CoefficientsBySlice,
        active: Tensor,
        numbers: Tensor,
        columns: Tensor,
        how: How,
    ) -> Tensor:
        """Take the second half of a train step, in place, and return the losses `(member,)`.

        `numbers` and `columns` are what `row_gradients` returned, summed over all rows of the batch.
        """
        gradients, loss, sums, used = row_sums.unpack(state, numbers, columns)
        found = {"gradients": gradients, "loss": loss, "sums": sums, "buffers": {}}
        self._update(state, coefficients, active, found, used)
        return loss

    def _update(
        self,
        state: State,
        coefficients: CoefficientsBySlice,
        active: Tensor,
        found: dict[str, Tree],
        used: Tensors | None = None,
    ) -> None:
        """Update the members of each slice by their own rule."""
        for own, numbers in coefficients.items():
            part = own.of(found)
            update(
                self.rules[own.rule],
                own.state(state),
                numbers,
                own.of(active),
                part["gradients"],
                part["loss"],
                part["sums"],
                buffers=part["buffers"],
                used=own.of(used),
            )

    def _update_packed(
        self, state: State, coefficients: CoefficientsBySlice, active: Tensor, found: dict[str, Tree]
    ) -> None:
        """Update the active members of a packed state, in which all parameters have the same numbers."""
        ((own, by_parameter),) = coefficients.items()
        (numbers,) = by_parameter.values()
        rule, buffers = self.rules[own.rule], own.packed(state)["packed"]
        optimizer = {f"{kind}/": buffer for kind, buffer in buffers.items() if kind}
        update(
            rule,
            {**state, "params": {"": buffers[""]}, "optimizer": optimizer},
            {("",): numbers},
            active,
            {"": packing.join(found["gradients"])},
            found["loss"],
            found["sums"],
            buffers=found["buffers"],
            norms=gradient_norms(found["gradients"]) if rule.clip else None,
        )

    def evaluate(self, state: State, shared: Tensors, data: Tree, weights: Tensor | None, how: How) -> Tensors:
        """Return the sums `(member,)` of the loss and the metrics over a batch."""
        if self.takes_fast_path and not how.fused:
            mask = None if weights is None or not self.task.can_mask_rows else weights[0]
            sums = self._run_alone(self.task.run, state, shared, data, how, mask)[1]
            return map_tree(lambda t: t.unsqueeze(0), sums)
        args = (state["params"], state["frozen"], state["buffers"], state.get("numbers"), data, weights)
        key = numbers_key("evaluate", data, weights, shared=how.shared_data)

        def sums_of(
            params: Tensors,
            frozen: Tensors,
            buffers: Tensors,
            numbers: Tensors,
            data: Tree,
            weights: Tensor | None,
        ) -> Tensors:
            mask = weights if self.task.can_mask_rows else None
            own, replay = {**params, **frozen, **shared}, self._replay(key, numbers, how)
            return self._observed(own, buffers, state, how.fused, replay, self.task.run, data, mask)[1]

        return self._read(sums_of, state, args, (0, 0, 0, 0, how.axis, 0), how.fused)

    def predict(self, state: State, shared: Tensors, data: Tree, how: How) -> Tree:
        """Return the outputs `(member, row, …)` on a batch of inputs."""
        if self.takes_fast_path and not how.fused:
            outputs = self._run_alone(lambda m, x: logits(call(m, x)), state, shared, data, how)
            return map_tree(lambda t: t.unsqueeze(0), outputs)
        args = (state["params"], state["frozen"], state["buffers"], state.get("numbers"), data)
        key = numbers_key("predict", data, None, shared=how.shared_data)

        def output_of(params: Tensors, frozen: Tensors, buffers: Tensors, numbers: Tensors, data: Tree) -> Tree:
            own, replay = {**params, **frozen, **shared}, self._replay(key, numbers, how)
            return self._observed(own, buffers, state, how.fused, replay, lambda m, x: logits(call(m, x)), data)

        return self._read(output_of, state, args, (0, 0, 0, 0, how.axis), how.fused)

    def outputs(
        self,
        state: State,
        shared: Tensors,
        params: Tensors,
        buffers: Tensors,
        data: Tree,
        part: BatchRows | None = None,
    ) -> tuple[Tree, Tensors]:
        """Return the outputs `(member, row, …)` on the same inputs for all members, and the buffers after them.

        Autograd may record it: gradients reach `params`, which are used in place of the state's, and the inputs.
        """

        def outputs_of(params: Tensors, frozen: Tensors, buffers: Tensors, data: Tree) -> tuple[Tree, Tensors]:
            buffers = {name: buffer.clone() for name, buffer in buffers.items()}
            own, data = (
                {**params, **frozen, **shared},
                map_tree(torch.clone, data),
            )  # the forward may write to them
            found = self._call(own, buffers, call, data)
            return map_tree(lambda leaf: leaf, found), buffers

        def run(data: Tree, axis: int | None) -> tuple[Tree, Tensors]:
            with drawing(state["member"], fused=True, part=part):
                args = (params, state["frozen"], buffers, data)
                return mapped(outputs_of, args, (0, 0, 0, axis), fused=True)

        if not self.writes_inputs:
            try:
                return run(data, None)
            except RuntimeError as error:
                if "vmap: inplace" not in str(error):
                    raise
                self.writes_inputs = True  # members that write into their inputs need their own
        members = len(state["member"]["seed"])
        return run(map_tree(lambda leaf: leaf.unsqueeze(0).expand(members, *leaf.shape), data), 0)

    def _observed(
        self,
        own: Tensors,
        buffers: Tensors,
        state: State,
        fused: bool,
        replay: AbstractContextManager[None],
        run: Run,
        *args: Tree,
    ) -> Tree:
        """Run a function in evaluation mode.

        If it changes a buffer, the change is kept in the state of one member. Several members can't be run at once
        then. The trial of one member, which comes first, shows this.
        """
        if fused and self.counting is not None:
            raise CannotFuseError(f"its forward changes the buffer {self.counting!r} in evaluation mode, too")
        given = {name: buffer.clone() for name, buffer in buffers.items()}
        after, versions = dict(given), {name: buffer._version for name, buffer in given.items()}
        result = self._call(own, after, run, *args, replay=replay)
        for name, buffer in after.items():
            if not fused and (buffer is not given[name] or buffer._version != versions[name]):
                self.counting = name
                state["buffers"][name].copy_(buffer.unsqueeze(0))
        return result

    def _read(self, function: Run, state: State, args: tuple[Tree, ...], axes: Axes, fused: bool) -> Tree:
        """Map a function that changes no weight over the members; again with gradients if it takes some itself."""
        try:
            return self._mapped(function, state, args, axes, fused)
        except NeedsGradientError:
            if torch.compiler.is_compiling():
                raise  # `Programs` traces again
            self.differentiates = True
            return self._mapped(function, state, args, axes, fused)

    def _mapped(self, function: Run, state: State, args: tuple[Tree, ...], axes: Axes, fused: bool) -> Tree:
        with torch.no_grad(), drawing(state["member"], fused=fused):
            if not self.differentiates:
                return mapped(function, args, axes, fused=fused)

            def tracked(params: Tensors, *rest: Tree) -> tuple[Tensor | int, Tree]:
                return sum((p * 0.0).sum() for p in params.values()), function(params, *rest)

            return mapped_gradients(tracked, args, axes, fused=fused)[1]

    def observe(
        self, state: State, shared: Tensors, run: Run, data: Tree, streams: Streams
    ) -> tuple[Tree, Tensors]:
        """Return the result of `run(model, data)` for the first member, and the member's buffers after it."""
        one = {part: map_tree(lambda t: t[0], state[part]) for part in ("params", "frozen", "buffers")}
        buffers = {name: buffer.clone() for name, buffer in one["buffers"].items()}
        data, shared = map_tree(torch.clone, data), map_tree(torch.clone, shared)  # the forward may write to them
        tried = undoing_side_effects(("self", self.model), ("the objective", self.task.objective))
        with tried, torch.no_grad(), drawing(state["member"], fused=False, streams=streams):
            result = self._call({**one["params"], **one["frozen"], **shared}, buffers, run, data)
        return result, buffers

    def learn(
        self,
        state: State,
        shared: Tensors,
        run: Run,
        args: tuple[Tree, ...],
        streams: Streams,
    ) -> tuple[Tree, Tensors, Tensors]:
        """Return the result of `run(steps, model, *args)` for the first member, the gradients, and its buffers.

        The first leaf of the result is a loss. The gradients are of that loss, by the parameters that take part in
        it.
        """
        one = {part: map_tree(lambda t: t[0], state[part]) for part in ("params", "frozen", "buffers")}
        buffers = {name: buffer.clone() for name, buffer in one["buffers"].items()}
        params = {name: p.detach().requires_grad_() for name, p in one["params"].items()}
        with torch.enable_grad(), drawing(state["member"], fused=False, streams=streams):
            own = {**params, **one["frozen"], **shared}
            result = self._call(own, buffers, lambda model, *args: run(self, model, *args), *args)
            found = torch.autograd.grad(leaves(result)[0], list(params.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(params, found, strict=True) if g is not None}
        return map_tree(torch.Tensor.detach, (result, gradients, buffers))

    def _replay(self, key: Key, numbers: Tensors | None, how: How) -> AbstractContextManager[None]:
        """Return the context in which the first member's Python computes with the numbers of every member."""
        if numbers is None or not how.fused:
            return nullcontext()
        expected = self.recordings[key]
        own = {site: number for site, number in numbers.items() if site not in (OWN, VARIANT)}
        changed = changes(expected, own)
        if OWN in numbers:
            changed = self.padding[key].changes(numbers, changed, RULES)
        return replaying(expected, changed)

    def _call(
        self,
        own: Tensors,
        buffers: Tensors,
        run: Run,
        *args: Tree,
        replay: AbstractContextManager[None] = _UNCHANGED,
    ) -> Tree:
        """Return `run(model, *args)` with these weights in the model, and put its new buffers into `buffers`.

        Raises:
            Recorded: The step runs only to be recorded.
        """
        trained = {name: parameter.requires_grad for name, parameter in self.model.named_parameters()}
        own = {name: self._as_given(name, t) for name, t in own.items()}
        dtype = PRECISIONS[self.task.precision]
        device = next((tensor.device.type for tensor in (*own.values(), *buffers.values())), "cpu")
        versions = {name: t._version for name, t in own.items()}
        with (
            ParameterMode({name: (own[name], takes) for name, takes in trained.items() if name in own}, self),
            enable_inplace_requires_grad(True),
            torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=False),
        ):
            if self.records:
                given = {
                    **{Origin("parameter", name): t for name, t in own.items()},
                    **{Origin("buffer", name): t for name, t in buffers.items()},
                    **{Origin("input", place): t for place, t in enumerate(leaves(args)) if isinstance(t, Tensor)},
                }
                with recording(given) as recorder:
                    recorder.returned(call_with(self.model, own, buffers, run, *args))
                raise Recorded(recorder.recording)
            with replay:
                result = call_with(self.model, own, buffers, run, *args)
        for name in trained.keys() & own.keys():
            if torch.compiler.is_compiling() and own[name]._version != versions[name]:
                raise CannotFuseError(f"its forward changes its parameter {name} in place")
        return result

    def _as_given(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter in the model's layout, as another tensor than that of the state."""
        if name not in self.layout:
            return torch.ops.aten.alias.default(tensor)
        found = tensor.transpose(-1, -2)
        return found.contiguous() if self.contiguous or not torch.compiler.is_compiling() else found
