"""Update of the stacked state after a step's gradients are known: clip, apply the optimizer, count the step."""

from collections.abc import Mapping

import torch
from torch import Tensor

from modelfleet.frameworks.errors import FINE, GRADIENT, LOSS, SCALE, CannotFuseError
from modelfleet.frameworks.torch.optimizers.coefficients import computing
from modelfleet.frameworks.torch.optimizers.counting import CoefficientsByParameter
from modelfleet.frameworks.torch.optimizers.rules import STEP
from modelfleet.frameworks.torch.optimizers.slices import Rule
from modelfleet.types import State, Tree

# As in torch.amp.GradScaler:
INITIAL_SCALE = 65536.0
GROWTH_STEPS = 2000  # finite steps after which the scale is doubled
SMALLEST_SCALE = 2.0**-24  # below it, a member's float16 gradients are given up


def update(
    rule: Rule,
    state: State,
    coefficients: CoefficientsByParameter,
    active: Tensor,
    gradients: dict[str, Tensor],
    loss: Tensor,
    sums: Mapping[str, Tensor],
    *,
    buffers: Mapping[str, Tensor] | None = None,
    used: Mapping[str, Tensor] | None = None,
    norms: Tensor | None = None,
) -> None:
    """Step the active members whose loss and gradients are finite, in place, and record the trouble of the others.

    Args:
        rule: The optimizer of these members, and whether gradients are clipped.
        state: The stacked state.
        coefficients: The optimizer's numbers for this step, `(member,)` each, by the parameters they are for.
        active: `(member,)`: True for each member that takes part.
        gradients: By parameter, `(member, …)`.
        loss: `(member,)`.
        sums: What this step adds to the sums of the epoch, `(member,)` each.
        buffers: The buffers after the forward pass. None if they do not change.
        used: By parameter, `(member,)`: True if it took part in the member's loss. None if all did.
        norms: The norms of the gradients that are clipped together, `(member, gradient)`. None for those of
            `gradients`.
    """
    member, scale = state["member"], state["member"].get("scale")
    live = active & (member["trouble"] == FINE)
    # Of what is not finite, 0 times it is NaN.
    finite = _total([flat(g * 0).sum(1) for g in gradients.values()]) == 0
    finite_loss = loss * 0 == 0
    keep = live & finite_loss & finite
    if rule.clip:
        norms = gradient_norms(gradients) if norms is None else norms
        gradients = _clipped(gradients, norms, next(iter(coefficients.values()))["clip_norm"])

    numbers = {name: own for names, own in coefficients.items() for name in names}
    for name, gradient in gradients.items():
        parameter = state["params"][name]
        keys = (key for key in rule.optimizer.tensor_names if key != STEP)
        tensors = {key: state["optimizer"][f"{key}/{name}"] for key in keys}
        updated, new_tensors = rule.optimizer.apply(parameter, gradient, tensors, numbers[name])
        stepping = keep if used is None else keep & used[name]
        keep_new(stepping, parameter, updated)
        for key, tensor in tensors.items():
            keep_new(stepping, tensor, new_tensors[key])
        if STEP in rule.optimizer.tensor_names:
            count = state["optimizer"][f"{STEP}/{name}"]
            count.add_(_like(stepping, count).to(count.dtype))
    for name, buffer in (buffers or {}).items():
        refuse_changed_form(name, state["buffers"][name], buffer)
        keep_new(keep, state["buffers"][name], buffer)
    for name, total in state["sums"].items():
        keep_new(keep, total, total + sums[name])
    keep_new(keep, member["step"], member["step"] + 1)

    trouble = torch.where(finite_loss, torch.where(finite, FINE, GRADIENT), LOSS)
    if scale is not None:
        trouble = torch.where(finite_loss, _rescale(member, live & finite_loss, finite), LOSS)
    keep_new(live, member["trouble"], trouble)


def update_all(
    rule: Rule,
    state: State,
    buffers: Mapping[str, Tensor],
    coefficients: CoefficientsByParameter,
    found: Mapping[str, Tree],
) -> None:
    """Step all members at once, in place, without masks. Their losses and gradients must be finite.

    Args:
        rule: The optimizer of these members, and whether gradients are clipped.
        state: The stacked state, of which the buffers, numbers and sums are used.
        buffers: The buffers of the parameters and the optimizer's tensors (`packing.buffers_of`).
        coefficients: The optimizer's numbers for this step, the same for all parameters.
        found: What `Steps.packed_gradients` returned.
    """
    (numbers,) = coefficients.values()
    gradient = found["gradient"]
    if rule.clip:
        factor = _clip_factor(found["norms"], numbers["clip_norm"])
        gradient = (gradient * per_member(factor, gradient)).to(gradient.dtype)
    tensors = {key: buffers[key] for key in rule.optimizer.tensor_names if key != STEP}
    updated, new_tensors = rule.optimizer.apply(buffers[""], gradient, tensors, numbers)
    buffers[""].copy_(updated)
    for key, tensor in tensors.items():
        tensor.copy_(new_tensors[key])
    if STEP in rule.optimizer.tensor_names:
        buffers[STEP].add_(1)
    for name, buffer in found["buffers"].items():
        state["buffers"][name].copy_(buffer)
    for name, total in state["sums"].items():
        total.add_(found["sums"][name].to(total.dtype))
    state["member"]["step"].add_(1)


def gradient_norms(gradients: Mapping[str, Tensor]) -> Tensor:
    """Return the norm of each gradient `(member, gradient)`, in its own dtype."""
    return torch.stack([torch.linalg.vector_norm(flat(g), dim=1) for g in gradients.values()], dim=1)


def keep_new(keep: Tensor, old: Tensor, new: Tensor) -> None:
    """Overwrite `old` by `new` for the members in `keep`. The bits of the others stay as they are."""
    old.copy_(torch.where(_like(keep, old), new.to(old.dtype), old))


def per_member(numbers: Tensor, tensor: Tensor) -> Tensor:
    """Return numbers `(member,)` shaped to compute with a tensor `(member, …)`, in the dtype it computes in."""
    return _like(numbers, tensor).to(computing(tensor.dtype))


def _like(numbers: Tensor, tensor: Tensor) -> Tensor:
    """Return numbers `(member,)` with as many axes as a tensor `(member, …)`."""
    return numbers.view(-1, *[1] * (tensor.dim() - 1))


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor as `(member, number)`. A scalar parameter has one number."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)


def refuse_changed_form(name: str, old: Tensor, new: Tensor) -> None:
    """Raise CannotFuseError if a step changes a buffer's dtype or shape: the stacked state can't follow."""
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        was, becomes = (f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape[1:])}" for t in (old, new))
        raise CannotFuseError(f"a step makes its buffer {name!r} {becomes}, and it was {was}")


def _clipped(gradients: dict[str, Tensor], norms: Tensor, max_norm: Tensor) -> dict[str, Tensor]:
    factor = _clip_factor(norms, max_norm)
    return {name: (g * per_member(factor, g)).to(g.dtype) for name, g in gradients.items()}


def _clip_factor(norms: Tensor, max_norm: Tensor) -> Tensor:
    """Return what to multiply each member's gradients by, from the norm of each gradient `(member, gradient)`."""
    # As torch.nn.utils.clip_grad_norm_ does it, member by member: a number divided by a tensor is
    # `reciprocal() * number`.
    total = torch.linalg.vector_norm(norms, dim=1)
    inverse = (total + 1e-6).reciprocal()
    return torch.clamp((inverse * max_norm.to(computing(inverse.dtype))).to(inverse.dtype), max=1.0)


def _rescale(member: dict[str, Tensor], live: Tensor, finite: Tensor) -> Tensor:
    """Grow or shrink each live member's loss scale after a step, and return the trouble left, `(member,)`."""
    finite_steps = torch.where(finite, member["finite_steps"] + 1, 0)
    grown = finite_steps >= GROWTH_STEPS
    scale = torch.where(finite, torch.where(grown, member["scale"] * 2.0, member["scale"]), member["scale"] * 0.5)
    keep_new(live, member["scale"], scale)
    keep_new(live, member["finite_steps"], torch.where(grown, 0, finite_steps))
    return torch.where(scale < SMALLEST_SCALE, SCALE, FINE)
