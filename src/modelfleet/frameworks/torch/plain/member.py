"""One member as plain torch has it: a module, a `torch.optim` optimizer, and counters.

`read` and `write` give its state the form that fused lanes have: tensors `(1, …)` by part and name.
"""

import copy
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.frameworks.errors import FINE
from modelfleet.frameworks.stacked import CARRIED, WEIGHTS, Given
from modelfleet.frameworks.torch import arrays
from modelfleet.frameworks.torch.fused import state as states
from modelfleet.frameworks.torch.fused.updating import INITIAL_SCALE
from modelfleet.frameworks.torch.plain import optimizer as plain_optimizer
from modelfleet.frameworks.torch.task import Task
from modelfleet.members import Member
from modelfleet.trees import leaves, map_tree
from modelfleet.types import State

SavedBuffer = tuple[nn.Module, str, Tensor, Tensor]
"""A module, a buffer's name, the buffer, and a copy of it."""


class PlainMember:
    """Module, optimizer and counters of a member that is trained by itself."""

    def __init__(
        self, member: Member, task: Task, columns: Mapping[str, np.ndarray], device: torch.device
    ) -> None:
        self.name = member.name
        self.seed = member.seed
        self.task = task
        self.device = device
        self.model: nn.Module = member.model
        if any(tensor.device != device for tensor in (*self.model.parameters(), *self.model.buffers())):
            self.model = copy.deepcopy(self.model).to(device)
        self.layout = states.transposed(self.model)
        self.hyper = {name: float(column[0]) for name, column in columns.items()}
        self.step = 0
        self.trouble = FINE
        self.scale = INITIAL_SCALE  # of a float16 loss
        self.finite_steps = 0  # since the scale was changed
        self.sums: dict[str, Tensor | float] = {}  # of the epoch so far
        self._given: Mapping[str, Tensor] | None = None  # the tensors that `hyper` was read from
        self._bind()

    def _bind(self) -> None:
        """Make the optimizer for the parameters that the model has now."""
        self.params = dict(self.model.named_parameters())
        self.find_buffers()
        self.optimizer = plain_optimizer.make(self.task.optimizer, self.params.values(), self.hyper)

    def rebind(self) -> None:
        """Give the optimizer the model's current parameters. New parameters start without optimizer state."""
        found = dict(self.model.named_parameters())
        if list(map(id, found.values())) == list(map(id, self.params.values())):
            return
        state, before = self._optimizer_state(self.params), self.params
        self._bind()
        for name, parameter in self.params.items():
            if before.get(name) is parameter:
                own = {key: state[f"{key}/{name}"][0] for key in self.task.optimizer.tensor_names}
                plain_optimizer.write_state(self.optimizer, parameter, own, self.step)

    def use(self, hyper: Mapping[str, Tensor]) -> None:
        """Give the optimizer the hyperparameters of this step."""
        if hyper is self._given:
            return
        self._given = hyper
        self.hyper = {name: float(column[0]) for name, column in hyper.items()}
        for group in self.optimizer.param_groups:
            group.update(plain_optimizer.settings(self.task.optimizer, self.hyper))

    def count(self, loss: float, sums: Mapping[str, Tensor | float]) -> None:
        """Count a step, and add its loss and metrics to the sums of the epoch."""
        self.step += 1
        for name, total in {**sums, "loss": loss * float(sums["rows"])}.items():
            self.sums[name] = self.sums.get(name, 0.0) + exact(total)

    # --- buffers during a step -----------------------------------------------------------------------------------

    def find_buffers(self) -> None:
        """Find the modules that have buffers now."""
        self._buffered = [module for module in self.model.modules() if module._buffers]

    def save_buffers(self) -> list[SavedBuffer]:
        """Return the buffers with a copy of each, for `undo`."""
        return [
            (module, name, buffer, buffer.clone())
            for module in self._buffered
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def undo(self, saved: Sequence[SavedBuffer]) -> None:
        """Restore the buffers from before a step, and drop the gradients."""
        with torch.no_grad():
            for module, name, buffer, before in saved:
                module._buffers[name] = buffer
                buffer.copy_(before)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop the last step's gradients. `Optimizer.zero_grad` does the same in ten times as long."""
        for parameter in self.params.values():
            parameter.grad = None

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Return the state as a fused lane of this one member has it. Weights are views of the model's."""
        dtype = states.exact(self.device)
        sums = {
            name: torch.tensor([float(total)], dtype=dtype, device=self.device)
            for name, total in self.sums.items()
        }
        optimizer = self.stored({"optimizer": self._optimizer_state(states.trained(self.model))})
        return {**self.weights(self.model), **optimizer, "member": self._numbers(), "sums": sums}

    def read(self, parts: Collection[str] | None) -> State:
        """Return a copy of the state, `(1, …)`."""
        only_weights = parts is not None and set(parts) <= set(WEIGHTS)
        state = self.weights(self.model) if only_weights else self.state
        return {
            part: {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
            for part, tensors in state.items()
            if parts is None or part in parts
        }

    def write(self, state: Given) -> None:
        """Replace the state by part and name."""
        own = self.state if any(isinstance(leaf, np.ndarray) for leaf in leaves(state)) else {}
        double = torch.empty(0, dtype=torch.float64)
        given: State = {
            part: {
                name: arrays.from_host(value, own.get(part, {}).get(name, double))
                if isinstance(value, np.ndarray)
                else value
                for name, value in tensors.items()
            }
            for part, tensors in state.items()
        }
        self.write_weights({part: given.get(part, {}) for part in WEIGHTS})
        member = given.get("member", {})
        self._write_numbers({name: tensor[0] for name, tensor in member.items()})
        if "trouble" in member:
            self.trouble = int(member["trouble"][0])
        self._write_optimizer(self.stored({"optimizer": given.get("optimizer", {})})["optimizer"])
        if "sums" in given:
            self.sums = {name: float(tensor[0]) for name, tensor in given["sums"].items()}

    def carried(self) -> State:
        """Return the optimizer's state and the step count for another engine to adopt.

        Parameters that are frozen now are included. Parameters that the user has replaced are not.
        """
        current = dict(self.model.named_parameters())
        kept = {name: parameter for name, parameter in self.params.items() if current.get(name) is parameter}
        return {"optimizer": map_tree(torch.clone, self._optimizer_state(kept)), "member": self._numbers()}

    def adopt(self, carried: State) -> None:
        """Take over what another engine's `carried` returned, as far as it fits."""
        names = [name for name in CARRIED["member"] or () if name in carried["member"]]
        self._write_numbers({name: carried["member"][name][0] for name in names})
        self._write_optimizer(carried["optimizer"])

    def weights(self, model: nn.Module) -> State:
        """Return the weights and buffers of a model of this structure, as views."""
        parts = {"params": states.trained, "frozen": states.kept, "buffers": states.buffers}
        return self.stored(
            {
                part: {name: tensor.detach().unsqueeze(0) for name, tensor in find(model).items()}
                for part, find in parts.items()
            }
        )

    def write_weights(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy weights and buffers into the model."""
        own = {name: tensor for tensors in self.weights(self.model).values() for name, tensor in tensors.items()}
        with torch.no_grad():
            for tensors in weights.values():
                for name, tensor in tensors.items():
                    if own[name].shape == tensor.shape and own[name].dtype == tensor.dtype:
                        own[name].copy_(tensor)
                    else:  # a buffer that the model had replaced by one of another shape or type
                        path, _, last = name.rpartition(".")
                        self.model.get_submodule(path)._buffers[last] = tensor[0].to(self.device, copy=True)

    def stored(self, state: Mapping[str, Mapping[str, Tensor]]) -> State:
        """Return a state in the layout that fused lanes store it in, or back from it."""
        return {
            part: {
                name: states.turned(name.rpartition("/")[2], tensor, self.layout)
                for name, tensor in tensors.items()
            }
            for part, tensors in state.items()
        }

    def _numbers(self) -> dict[str, Tensor]:
        found = {
            "seed": torch.tensor([self.seed], device=self.device),
            "step": torch.tensor([float(self.step)], dtype=states.exact(self.device), device=self.device),
            "trouble": torch.tensor([self.trouble], device=self.device),
        }
        if self.task.precision == "fp16":
            found["scale"] = torch.tensor([self.scale], device=self.device)
            found["finite_steps"] = torch.tensor([self.finite_steps], device=self.device)
        return found

    def _write_numbers(self, member: Mapping[str, Tensor]) -> None:
        if "step" in member:
            self.step = int(member["step"])
        if "scale" in member:
            self.scale, self.finite_steps = float(member["scale"]), int(member["finite_steps"])

    def _optimizer_state(self, params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        hyper = {name: torch.tensor([value]) for name, value in self.hyper.items()}
        by_name = plain_optimizer.read_state(self.task.optimizer, self.optimizer, params, hyper)
        return {f"{key}/{name}": tensor for key, tensors in by_name.items() for name, tensor in tensors.items()}

    def _write_optimizer(self, given: Mapping[str, Tensor]) -> None:
        """Give the optimizer the state of each parameter, `(1, …)` in the layout of the model's parameters.

        A parameter that has another shape now starts at its initial state.
        """
        for name, parameter in self.params.items():
            own = {key: given.get(f"{key}/{name}") for key in self.task.optimizer.tensor_names}
            found = {key: tensor[0] for key, tensor in own.items() if tensor is not None}
            if found.keys() == own.keys() and all(
                t.dim() == 0 or t.shape == parameter.shape for t in found.values()
            ):
                plain_optimizer.write_state(self.optimizer, parameter, found, self.step)


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy the parameters and buffers of a model into another one."""
    with torch.no_grad():
        theirs = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        for name, tensor in (*target.named_parameters(), *target.named_buffers()):
            tensor.copy_(theirs[name])


def exact(total: Tensor | float) -> Tensor | float:
    """Return a number to add up in float64, without waiting for the device."""
    return total.detach().double() if isinstance(total, Tensor) else float(total)
