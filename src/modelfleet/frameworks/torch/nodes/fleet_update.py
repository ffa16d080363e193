"""Update of a fleet that is a node of a graph, by the gradients that autograd left on its parameters."""

from collections.abc import Mapping

import torch
from torch import Tensor

from modelfleet.frameworks.torch.fused import packing
from modelfleet.frameworks.torch.fused.engine import FusedEngine
from modelfleet.frameworks.torch.fused.steps_protocol import How
from modelfleet.frameworks.torch.fused.updating import gradient_norms, refuse_changed_form

_FUSED = How(shared_data=True, fused=True)


def update_members(
    engine: FusedEngine,
    hyper: Mapping[str, Tensor],
    gradients: dict[str, Tensor],
    active: Tensor,
    bad_loss: Tensor,
    buffers: Mapping[str, Tensor],
    *,
    fine: bool,
) -> None:
    """Take the step of every member's optimizer, in place.

    Args:
        engine: Has the state.
        hyper: The hyperparameters `(member,)`.
        gradients: Those of the parameters that took part, `(member, …)`.
        active: `(member,)`: True for all. The same tensor at every step, by which numbers are computed ahead.
        bad_loss: `(member,)`: True for members whose loss is not finite, which are set aside.
        buffers: The buffers after the forward passes.
        fine: True if the losses and gradients of all members are known to be finite: then all are updated at once.
    """
    state, stepper, steps = engine.state, engine.stepper, engine.programs.steps
    with torch.no_grad():
        numbers = stepper.coefficients.next(state, hyper, active)
        packed = packing.buffers_of(state) if fine and gradients.keys() == state["params"].keys() else None
        found = {"loss": torch.where(bad_loss, float("nan"), 0.0), "sums": {}, "buffers": buffers}
        if packed is not None and all(len(own) == 1 for own in numbers.values()):
            for name, buffer in buffers.items():
                refuse_changed_form(name, state["buffers"][name], buffer)
            if any(rule.clip for rule in steps.rules):
                found["norms"] = gradient_norms(gradients)
            part = {"packed": packed, **{part: state[part] for part in ("buffers", "member", "sums")}}
            found["gradient"] = packing.join({name: gradients[name] for name in state["params"]})
            steps.packed_apply(part, engine.shared, numbers, found, _FUSED)
        else:
            found["gradients"] = gradients
            engine.programs.apply("apply", (state, engine.shared), (numbers, active, found))
    stepper.coefficients.stepped(frozenset(state["params"].keys() - gradients.keys()))
