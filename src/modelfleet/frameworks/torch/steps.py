"""The steps of a lane as plain functions of tensors: train, evaluate, predict.

Each works on the stacked state of all members at once. `fused=True` maps one member's computation over the member
axis (`torch.func.vmap`); `fused=False` runs a lane of one member as any torch loop would, for models that can't be
mapped. Both give a member the same numbers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from modelfleet.frameworks.errors import FINE, GRADIENT, LOSS, SCALE, CannotFuseError
from modelfleet.frameworks.torch.algorithms import STEP
from modelfleet.frameworks.torch.coefficients import computing, pairs
from modelfleet.frameworks.torch.counting import Coefficients
from modelfleet.frameworks.torch.modes import training_modes
from modelfleet.frameworks.torch.python_state.undo import undoing_side_effects
from modelfleet.frameworks.torch.random.eager import EagerDraws
from modelfleet.frameworks.torch.random.operations import DrawFromStreams
from modelfleet.frameworks.torch.random.streams import BatchRows, DrawShapes, Streams
from modelfleet.frameworks.torch.state import exact
from modelfleet.frameworks.torch.task import PRECISIONS, Task, call, logits
from modelfleet.frameworks.torch.tracing.batching_rules import BatchingRules
from modelfleet.frameworks.torch.tracing.parameters import NeedsGradientError, ParameterMode
from modelfleet.trees import leaves, map_tree
from modelfleet.types import State

GROWTH_STEPS = 2000  # torch.amp.GradScaler's interval, growth and backoff
SMALLEST_SCALE = 2.0**-24


class Holder(nn.Module):
    """A model and what to do with it as one module, so that `functional_call` can reach both."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._run = run

    def forward(self, *args: Any) -> Any:
        """Do it."""
        return self._run(self.model, *args)


class Steps:
    """The three steps for lanes of one structure and one task.

    `layout` names the parameters that are stored transposed. `shared`, in every step, has the tensors that all
    members share: they have no member axis, and what depends on them alone is computed once.
    """

    def __init__(self, model: nn.Module, task: Task, layout: frozenset[str]) -> None:
        self.model = model
        self.modes = training_modes(model)
        self.task = task
        self.layout = layout
        self.unused: frozenset[str] = frozenset()  # parameters that take no part in the loss
        self.contiguous = False  # whether the model needs its weights in their own order: for `weight.view(-1)`
        self.differentiates = False  # whether the objective takes gradients itself, and needs them to evaluate
        self.counting: str | None = None  # a buffer that evaluating changes
        self.draws: DrawShapes = ()  # what a step draws, for `gradients` on some rows of batches like the next one

    def find_unused(
        self, state: State, shared: dict[str, Tensor], data: Any, weights: Tensor | None, *, shared_data: bool
    ) -> None:
        """Find the parameters that take no part in the loss, by one backward pass of the first member alone."""
        if not shared_data:
            data = map_tree(lambda t: t[0], data)
        weights = None if weights is None else weights[0]
        data, shared = map_tree(torch.clone, data), map_tree(torch.clone, shared)  # it may write to them
        one = {part: map_tree(lambda t: t[0].clone(), tensors) for part, tensors in state.items()}
        with self._streams(state["member"], fused=False), torch.enable_grad():
            params = {name: p.requires_grad_() for name, p in one["params"].items()}
            own = {**params, **one["frozen"], **shared}
            loss, _ = self._call(own, one["buffers"], self.task.run, data, weights)
            found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        self.unused = frozenset(name for name, g in zip(params, found, strict=True) if g is None)

    def train(
        self,
        state: State,
        shared: dict[str, Tensor],
        coefficients: Coefficients,
        active: Tensor,
        data: Any,
        weights: Tensor | None,
        *,
        shared_data: bool,
        fused: bool,
    ) -> Tensor:
        """One step of every active member, in place; gives the losses `(member,)`.

        `coefficients` are the optimizer's numbers for this step, `(member,)` each, by the parameters they are for.
        """
        found = self.gradients(state, shared, data, weights, shared_data=shared_data, fused=fused)
        return self.apply(state, shared, coefficients, active, found, shared_data=shared_data, fused=fused)

    def gradients(
        self,
        state: State,
        shared: dict[str, Tensor],
        data: Any,
        weights: Tensor | None,
        *,
        shared_data: bool,
        fused: bool,
    ) -> dict[str, Any]:
        """Return what a step makes of a batch before its optimizer does, `(member, …)` each.

        The "gradients" of the parameters that take part, the "loss", the "sums" of the metrics, and the "buffers"
        after the forward pass.
        """
        member, task = state["member"], self.task
        scale = member.get("scale")

        def loss_of(params: Any, frozen: Any, buffers: Any, data: Any, weights: Any, scale: Any) -> Any:
            buffers = {name: buffer.clone() for name, buffer in buffers.items()}
            loss, sums = self._call({**params, **frozen, **shared}, buffers, task.run, data, weights)
            return loss if scale is None else loss * scale, (loss.detach(), sums, buffers)

        axis = None if shared_data else 0
        with self._streams(member, fused):
            args = (state["params"], state["frozen"], state["buffers"], data, weights, scale)
            gradients, (loss, sums, buffers) = _gradients(loss_of, args, (0, 0, 0, axis, 0, 0), fused=fused)
        # As in torch, a parameter without a gradient is left alone, by weight decay and momentum too.
        gradients = {name: g for name, g in gradients.items() if name not in self.unused}
        if scale is not None:
            gradients = {name: (g / _like(scale, g)).to(g.dtype) for name, g in gradients.items()}
        return {"gradients": gradients, "loss": loss, "sums": dict(sums), "buffers": buffers}

    def apply(
        self,
        state: State,
        shared: dict[str, Tensor],
        coefficients: Coefficients,
        active: Tensor,
        found: dict[str, Any],
        *,
        shared_data: bool,
        fused: bool,
    ) -> Tensor:
        """Update every active member in place by what `gradients` found; gives the losses `(member,)`."""
        live = active & (state["member"]["trouble"] == FINE)
        gradients, loss, sums = found["gradients"], found["loss"], found["sums"]
        self._apply(state, coefficients, live, gradients, loss, sums, buffers=found["buffers"])
        return loss

    def row_gradients(
        self,
        state: State,
        shared: dict[str, Tensor],
        data: Any,
        weights: Tensor | None,
        place: dict[str, Tensor],
        *,
        shared_data: bool,
        fused: bool,
    ) -> tuple[Tensor, Tensor]:
        """The first half of a train step, on some rows of a batch: what is to be summed over all of its rows.

        Gives the gradients of the loss's total, `(member, number)` for all parameters in their order, and the
        columns `(member, column)`: the total, its count, the rows, the epoch's sums, and for every parameter
        whether it took part. `place` has the `start` of the rows, the `count` of the batch's, and their `share`.
        """
        member, params, scale = state["member"], state["params"], state["member"].get("scale")

        def unit(scale: Tensor, count: Tensor) -> Tensor:
            # float16's scale is meant for the gradients of the whole batch's mean.
            return scale * place["share"] / torch.where(count > 0, count, 1)

        def total_of(params: Any, frozen: Any, buffers: Any, data: Any, weights: Any, scale: Any) -> Any:
            buffers = {name: buffer.clone() for name, buffer in buffers.items()}
            own = {**params, **frozen, **shared}
            total, count, sums = self._call(own, buffers, self.task.share, data, weights, place["share"])
            aux = total.detach(), count.detach(), sums
            return total if scale is None else total * unit(scale, aux[1]), aux

        axis = None if shared_data else 0
        rows = leaves(data)[0].shape[0 if shared_data else 1]
        part = BatchRows(place["start"], place["count"], rows, self.draws)
        with self._streams(member, fused, part=part):
            args = (params, state["frozen"], state["buffers"], data, weights, scale)
            found, (total, count, sums) = _gradients(total_of, args, (0, 0, 0, axis, 0, 0), fused=fused)
        found = {name: g for name, g in found.items() if name not in self.unused}
        if scale is not None:
            found = {name: (g / _like(unit(scale, count), g)).to(g.dtype) for name, g in found.items()}

        wide = _widest(params)
        all_found = [found.get(name, torch.zeros_like(p)) for name, p in params.items()]
        flat = torch.cat([_flat(pairs(g)).to(wide) for g in all_found], 1)
        dtype = exact(flat.device)
        total = total.to(dtype)
        took_part, none = torch.ones_like(total), torch.zeros_like(total)
        columns = [total, count, sums["rows"], *(sums[name] for name in _summed(state))]
        columns += [took_part if name in found else none for name in params]
        return flat, torch.stack([column.to(dtype) for column in columns], 1)

    def nothing(self, state: State) -> tuple[Tensor, Tensor]:
        """Return what `row_gradients` gives for no rows."""
        params, seed = state["params"], state["member"]["seed"]
        numbers = sum(pairs(p[0]).numel() for p in params.values())
        columns = 3 + len(_summed(state)) + len(params)
        return (
            torch.zeros(len(seed), numbers, dtype=_widest(params), device=seed.device),
            torch.zeros(len(seed), columns, dtype=exact(seed.device), device=seed.device),
        )

    def row_apply(
        self,
        state: State,
        shared: dict[str, Tensor],
        coefficients: Coefficients,
        active: Tensor,
        flat: Tensor,
        columns: Tensor,
        *,
        shared_data: bool,
        fused: bool,
    ) -> Tensor:
        """The second half of a train step, in place; gives the losses `(member,)`.

        `flat` and `columns` are what `row_gradients` gave, summed over all rows of the batch.
        """
        params = state["params"]
        total, count, rows, *rest = columns.unbind(1)
        loss = total / count
        sums = {**dict(zip(_summed(state), rest, strict=False)), "loss": loss * rows, "rows": rows}
        used = dict(zip(params, (columns[:, -len(params) :] > 0).unbind(1), strict=True))
        parts = (flat / _like(count, flat)).split([pairs(p[0]).numel() for p in params.values()], 1)
        gradients = {name: _shaped(part, p) for (name, p), part in zip(params.items(), parts, strict=True)}
        live = active & (state["member"]["trouble"] == FINE)
        self._apply(state, coefficients, live, gradients, loss, sums, used=used)
        return loss

    def _apply(
        self,
        state: State,
        coefficients: Coefficients,
        live: Tensor,
        gradients: dict[str, Tensor],
        loss: Tensor,
        sums: Mapping[str, Tensor],
        *,
        buffers: Mapping[str, Tensor] | None = None,
        used: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Step the live members by their gradients, those with a finite loss and gradient, and note what they did.

        `used` says of each parameter for which members it took part in the loss; without it, for all.
        """
        member, task, scale = state["member"], self.task, state["member"].get("scale")
        finite = torch.isfinite(torch.stack([_flat(g * 0).sum(1) for g in gradients.values()]).sum(0))
        good_loss = torch.isfinite(loss)
        keep = live & good_loss & finite
        if task.clip:
            gradients = _clipped(gradients, next(iter(coefficients.values()))["clip_norm"])

        numbers = {name: own for names, own in coefficients.items() for name in names}
        for name, gradient in gradients.items():
            parameter = state["params"][name]
            slots = {slot: state["optimizer"][f"{slot}/{name}"] for slot in task.optimizer.slots if slot != STEP}
            updated, new_slots = task.optimizer.apply(parameter, gradient, slots, numbers[name])
            stepping = keep if used is None else keep & used[name]
            keep_new(stepping, parameter, updated)
            for slot, tensor in slots.items():
                keep_new(stepping, tensor, new_slots[slot])
            count = state["optimizer"].get(f"{STEP}/{name}")
            if count is not None:
                count.add_(stepping.to(count.dtype))
        for name, buffer in (buffers or {}).items():
            _refuse_another(name, state["buffers"][name], buffer)
            keep_new(keep, state["buffers"][name], buffer)
        for name, total in state["sums"].items():
            keep_new(keep, total, total + sums[name])
        keep_new(keep, member["step"], member["step"] + 1)

        trouble = torch.where(good_loss, torch.where(finite, FINE, GRADIENT), LOSS)
        if scale is not None:
            trouble = torch.where(good_loss, _rescale(member, live & good_loss, finite), LOSS)
        keep_new(live, member["trouble"], trouble)

    def evaluate(
        self,
        state: State,
        shared: dict[str, Tensor],
        data: Any,
        weights: Tensor,
        *,
        shared_data: bool,
        fused: bool,
    ) -> dict[str, Tensor]:
        """The sums `(member,)` of the loss and the metrics over a batch."""
        args = (state["params"], state["frozen"], state["buffers"], data, weights)

        def sums_of(params: Any, frozen: Any, buffers: Any, data: Any, weights: Any) -> Any:
            mask = weights if self.task.maskable else None
            own = {**params, **frozen, **shared}
            return self._look(own, buffers, state, fused, self.task.run, data, mask)[1]

        return self._read(sums_of, state, args, (0, 0, 0, None if shared_data else 0, 0), fused)

    def predict(
        self, state: State, shared: dict[str, Tensor], data: Any, *, shared_data: bool, fused: bool
    ) -> Any:
        """The outputs `(member, row, …)` on a batch of inputs."""
        args = (state["params"], state["frozen"], state["buffers"], data)

        def output_of(params: Any, frozen: Any, buffers: Any, data: Any) -> Any:
            own = {**params, **frozen, **shared}
            return self._look(own, buffers, state, fused, lambda m, x: logits(call(m, x)), data)

        return self._read(output_of, state, args, (0, 0, 0, None if shared_data else 0), fused)

    def _look(self, own: Any, buffers: Any, state: State, fused: bool, run: Callable[..., Any], *args: Any) -> Any:
        """Run something in evaluation mode.

        What it changes of the buffers stays, in the state of one member. Several can't be asked at once then; that
        is known from the trial of one that comes before.
        """
        if fused and self.counting is not None:
            raise CannotFuseError(f"its forward changes the buffer {self.counting!r} in evaluation mode, too")
        given = {name: buffer.clone() for name, buffer in buffers.items()}
        after, versions = dict(given), {name: buffer._version for name, buffer in given.items()}
        result = self._call(own, after, run, *args)
        for name, buffer in after.items():
            if not fused and (buffer is not given[name] or buffer._version != versions[name]):
                self.counting = name
                state["buffers"][name].copy_(buffer.unsqueeze(0))
        return result

    def _read(self, function: Callable[..., Any], state: State, args: Any, axes: Any, fused: bool) -> Any:
        """Map a function that changes no weight over the members; with gradients only if it takes some itself."""
        try:
            return self._reading(function, state, args, axes, fused)
        except NeedsGradientError:
            if torch.compiler.is_compiling():
                raise  # for another trace
            self.differentiates = True
            return self._reading(function, state, args, axes, fused)

    def _reading(self, function: Callable[..., Any], state: State, args: Any, axes: Any, fused: bool) -> Any:
        with torch.no_grad(), self._streams(state["member"], fused):
            if not self.differentiates:
                return mapped(function, args, axes, fused=fused)

            def tracked(params: Any, *rest: Any) -> Any:
                return sum((p * 0.0).sum() for p in params.values()), function(params, *rest)

            return _gradients(tracked, args, axes, fused=fused)[1]

    def observe(
        self, state: State, shared: dict[str, Tensor], run: Callable[..., Any], data: Any, streams: Streams
    ) -> tuple[Any, dict[str, Tensor]]:
        """What `run(model, data)` gives for the first member, and the member's buffers after it."""
        one = {part: map_tree(lambda t: t[0], state[part]) for part in ("params", "frozen", "buffers")}
        buffers = {name: buffer.clone() for name, buffer in one["buffers"].items()}
        data, shared = map_tree(torch.clone, data), map_tree(torch.clone, shared)  # it may write to them
        tried = undoing_side_effects(("self", self.model), ("the objective", self.task.objective))
        with tried, torch.no_grad(), self._streams(state["member"], fused=False, streams=streams):
            result = self._call({**one["params"], **one["frozen"], **shared}, buffers, run, data)
        return result, buffers

    def learn(
        self,
        state: State,
        shared: dict[str, Tensor],
        run: Callable[..., Any],
        args: tuple[Any, ...],
        streams: Streams,
    ) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
        """What `run(steps, model, *args)` gives for the first member, a loss in front; the gradients of that loss
        by the parameters that take part in it; and the member's buffers after it."""
        one = {part: map_tree(lambda t: t[0], state[part]) for part in ("params", "frozen", "buffers")}
        buffers = {name: buffer.clone() for name, buffer in one["buffers"].items()}
        params = {name: p.detach().requires_grad_() for name, p in one["params"].items()}
        with torch.enable_grad(), self._streams(state["member"], fused=False, streams=streams):
            own = {**params, **one["frozen"], **shared}
            result = self._call(own, buffers, lambda model, *args: run(self, model, *args), *args)
            found = torch.autograd.grad(leaves(result)[0], list(params.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(params, found, strict=True) if g is not None}
        return map_tree(torch.Tensor.detach, (result, gradients, buffers))

    def _call(self, own: Any, buffers: Any, run: Callable[..., Any], *args: Any) -> Any:
        trained = {name: parameter.requires_grad for name, parameter in self.model.named_parameters()}
        own = {name: self._as_given(name, t) for name, t in own.items()}
        tensors = {f"model.{name}": t for name, t in {**own, **buffers}.items()}
        tensors |= {f"model.{name}": tensors[f"model.{first}"] for name, first in tied(self.model).items()}
        dtype = PRECISIONS[self.task.precision]
        device = next((tensor.device.type for tensor in tensors.values()), "cpu")
        versions = {name: t._version for name, t in own.items()}
        with (
            ParameterMode({name: (own[name], takes) for name, takes in trained.items() if name in own}, self),
            enable_inplace_requires_grad(True),
            torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=False),
        ):
            result = functional_call(Holder(self.model, run), tensors, args, tie_weights=False)
        for name in trained.keys() & own.keys():
            if torch.compiler.is_compiling() and own[name]._version != versions[name]:
                raise CannotFuseError(f"its forward changes its parameter {name} in place")
        # functional_call leaves the buffers that the model reassigned in the dict it was given.
        for name in buffers:
            buffers[name] = tensors[f"model.{name}"]
        return result

    def _as_given(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter as the model has it: not transposed, and no tensor of the state itself."""
        if name not in self.layout:
            return torch.ops.aten.alias.default(tensor)
        found = tensor.transpose(-1, -2)
        return found.contiguous() if self.contiguous or not torch.compiler.is_compiling() else found

    @contextmanager
    def _streams(
        self,
        member: dict[str, Tensor],
        fused: bool,
        *,
        part: BatchRows | None = None,
        streams: Streams | None = None,
    ) -> Iterator[None]:
        # Attention's CPU kernels have no batching rule; its plain form has, and recurrent layers have ours. The
        # same forms are used unfused, so that a member's numbers and random draws do not depend on the strategy.
        seed, step = member["seed"], member["step"]
        if streams is None and part is None and not fused and not torch.compiler.is_compiling():
            # A trial: it draws as in plain execution.
            with sdpa_kernel(SDPBackend.MATH), BatchingRules(), EagerDraws(int(seed[0]), int(step[0])):
                yield
            return
        if streams is None:
            streams = Streams(seed, step, part) if fused else Streams(seed[0], step[0], part)
        with sdpa_kernel(SDPBackend.MATH), BatchingRules(), DrawFromStreams(streams):
            yield


def tied(model: nn.Module) -> dict[str, str]:
    """Other names of tensors that several modules hold, and the first name of each.

    Not those of a module that is found by two names: torch 2.13's `functional_call`, told to tie weights, swaps
    such a module's tensors twice, and leaves the given ones in the model.
    """
    first: dict[int, str] = {}
    places: set[tuple[int, str]] = set()
    found: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for part, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or (id(module), part) in places:
                continue
            places.add((id(module), part))
            name = f"{prefix}.{part}" if prefix else part
            if first.setdefault(id(tensor), name) != name:
                found[name] = first[id(tensor)]
    return found


def _gradients(loss_of: Callable[..., Any], args: Any, axes: Any, *, fused: bool) -> Any:
    """Every member's own gradients, and what else `loss_of` gives.

    Unfused, they are of those parameters only that take part in the loss; fused, the others' are zero.
    """
    if fused:
        return _vmapped(grad(loss_of, has_aux=True), args, axes)
    params, *rest = (_row(arg, axis) for arg, axis in zip(args, axes, strict=True))
    with torch.enable_grad():
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        loss, aux = loss_of(leaves, *rest)
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients = {name: g for name, g in zip(leaves, found, strict=True) if g is not None}
    return map_tree(lambda t: t.detach().unsqueeze(0), (gradients, aux))


def mapped(function: Callable[..., Any], args: Any, axes: Any, *, fused: bool) -> Any:
    """One member's function for all members at once, or of a lane of one as it is."""
    if fused:
        return _vmapped(function, args, axes)
    result = function(*(_row(arg, axis) for arg, axis in zip(args, axes, strict=True)))
    return map_tree(lambda t: t.unsqueeze(0), result)


def _vmapped(function: Callable[..., Any], args: Any, axes: Any) -> Any:
    # None is no tensor, and vmap wants an axis of None for it; an empty dict has no axis at all.
    axes = tuple(None if arg is None or arg == {} else axis for arg, axis in zip(args, axes, strict=True))
    return vmap(function, in_dims=axes, randomness="different")(*args)


def _row(arg: Any, axis: int | None) -> Any:
    return arg if arg is None or axis is None else map_tree(lambda t: t[0], arg)


def _like(per_member: Tensor, tensor: Tensor) -> Tensor:
    """Numbers `(member,)` to compute with a tensor `(member, …)`, in the dtype that its operations compute in."""
    return per_member.view(-1, *[1] * (tensor.dim() - 1)).to(computing(tensor.dtype))


def _shaped(flat: Tensor, parameter: Tensor) -> Tensor:
    """Numbers `(member, number)` in the shape and dtype of a parameter; of a complex one they are pairs."""
    own = flat.reshape(pairs(parameter).shape).to(pairs(parameter).dtype)
    return torch.view_as_complex(own) if parameter.is_complex() else own


def _flat(tensor: Tensor) -> Tensor:
    """`(member, number)`; a scalar parameter has one number."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)


def keep_new(keep: Tensor, old: Tensor, new: Tensor) -> None:
    """Overwrite `old` by `new` for the members in `keep`, and leave the others' bits alone."""
    old.copy_(torch.where(keep.view(-1, *[1] * (old.dim() - 1)), new.to(old.dtype), old))


def _refuse_another(name: str, old: Tensor, new: Tensor) -> None:
    """Refuse a buffer that is of another dtype or shape after a step: stacked state can't follow it."""
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        was, becomes = (f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape[1:])}" for t in (old, new))
        raise CannotFuseError(f"a step makes its buffer {name!r} {becomes}, and it was {was}")


def _widest(params: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype in which gradients are summed: float32 at least."""
    dtype = torch.float32
    for parameter in params.values():
        dtype = torch.promote_types(dtype, computing(parameter.dtype))
    return dtype


def _summed(state: State) -> list[str]:
    """The epoch's sums that are sums over rows as they are."""
    return [name for name in state["sums"] if name not in ("loss", "rows")]


def _clipped(gradients: dict[str, Tensor], most: Tensor) -> dict[str, Tensor]:
    # As torch.nn.utils.clip_grad_norm_ does it, member by member: the norm of each gradient in its own dtype, and
    # a number divided by a tensor as `reciprocal() * number`.
    norms = torch.stack([torch.linalg.vector_norm(_flat(g), dim=1) for g in gradients.values()], dim=1)
    total = torch.linalg.vector_norm(norms, dim=1)
    inverse = (total + 1e-6).reciprocal()
    factor = torch.clamp((inverse * most.to(computing(inverse.dtype))).to(inverse.dtype), max=1.0)
    return {name: (g * _like(factor, g)).to(g.dtype) for name, g in gradients.items()}


def _rescale(member: dict[str, Tensor], taking_part: Tensor, finite: Tensor) -> Tensor:
    """Grow or shrink each member's own loss scale after a step; gives the trouble that is left."""
    good = torch.where(finite, member["good"] + 1, 0)
    grown = good >= GROWTH_STEPS
    scale = torch.where(finite, torch.where(grown, member["scale"] * 2.0, member["scale"]), member["scale"] * 0.5)
    keep_new(taking_part, member["scale"], scale)
    keep_new(taking_part, member["good"], torch.where(grown, 0, good))
    return torch.where(scale < SMALLEST_SCALE, SCALE, FINE)
