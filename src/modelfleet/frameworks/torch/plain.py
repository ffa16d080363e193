"""The engine of a lane of one torch member: its own module, eager autograd and `torch.optim`, as in a plain loop.

What can't be fused runs here, and so does a fleet of one. Nothing of the model is imitated: its hooks run, its
Python state moves on, its parameters are updated in place. Only two things differ from a loop that a person would
write. Random draws come from the member's own stream, where the model draws any. And a step whose loss or gradient
is not finite is not taken: the member keeps its last good weights and buffers.
"""

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelfleet.errors import InputError, StrategyError
from modelfleet.frameworks.errors import FINE, GRADIENT, LOSS, SCALE
from modelfleet.frameworks.stacked import WEIGHTS, Positions
from modelfleet.frameworks.torch import arrays, plain_optimizer, plain_parallel
from modelfleet.frameworks.torch import state as states
from modelfleet.frameworks.torch.base import CARRIED, TorchEngine, explained, on_host
from modelfleet.frameworks.torch.modes import in_mode, training_modes
from modelfleet.frameworks.torch.process_group import ProcessGroup
from modelfleet.frameworks.torch.python_state.undo import undoing_side_effects
from modelfleet.frameworks.torch.random.detection import DrawDetector
from modelfleet.frameworks.torch.random.eager import DrawRecord, DrawsIfNeeded, EagerDraws, WordCache
from modelfleet.frameworks.torch.random.streams import DrawShapes
from modelfleet.frameworks.torch.row_independence import divide_by_rows
from modelfleet.frameworks.torch.steps import GROWTH_STEPS, SMALLEST_SCALE, Steps
from modelfleet.frameworks.torch.task import PRECISIONS, Task, call, logits
from modelfleet.members import Member
from modelfleet.trees import leaves, map_tree
from modelfleet.types import State

FIRST_SCALE = 65536.0  # torch.amp.GradScaler's


class PlainEngine(TorchEngine):
    """The torch side of a lane of one member (see `modelfleet.lanes.Lane`)."""

    programs = None
    undoes_steps = True
    steps_per_call = 8  # what is around a step costs as much as a small model's forward
    fused = False
    prospect = 1.0
    compiling = False
    untraced = None
    program = "plain torch"
    positions = slots = np.zeros(1, dtype=np.int64)

    def __init__(
        self, members: Sequence[Member], task: Task, columns: Mapping[str, np.ndarray], device: torch.device
    ) -> None:
        (member,) = members
        self.device = device
        self._task = task
        self._member = member
        self.model: nn.Module = member.model
        if any(tensor.device != device for tensor in (*self.model.parameters(), *self.model.buffers())):
            self.model = copy.deepcopy(self.model).to(device)
        self._modes = training_modes(self.model)
        self._layout = states.transposed(self.model)
        self._hyper = {name: float(column[0]) for name, column in columns.items()}
        self._given: Any = None  # the tensors that `_hyper` was read from
        self._active: tuple[Any, bool] = None, True
        self._step = 0
        self._trouble = FINE
        self._scale, self._good = FIRST_SCALE, 0
        self._sums: dict[str, Any] = {}
        self._habits: dict[str, DrawRecord] = {}  # by what is done: whether it has drawn random numbers after all
        self._may_draw: DrawDetector | None = None  # not looked at yet
        self._ahead = WordCache()
        self._needs_grad = (
            False  # whether evaluating takes gradients, as an objective with a gradient penalty does
        )
        self._group: ProcessGroup | None = None
        self._divided: dict[Any, DrawShapes | str] = {}  # by the form of a batch
        self._skipped = False  # whether the last step was not taken
        self._bind()

    def _bind(self) -> None:
        """Make the optimizer for the parameters that the model has now."""
        self._params = dict(self.model.named_parameters())
        self._buffered = [module for module in self.model.modules() if module._buffers]
        self._optimizer = plain_optimizer.make(self.task.optimizer, self._params.values(), self._hyper)

    def _rebind(self) -> None:
        """Have the optimizer hold the model's parameters; those that the user has put in begin afresh."""
        found = dict(self.model.named_parameters())
        if list(map(id, found.values())) == list(map(id, self._params.values())):
            return
        state, before = self._optimizer_state(self._params), self._params
        self._bind()
        for name, parameter in self._params.items():
            if before.get(name) is parameter:
                own = {slot: state[f"{slot}/{name}"][0] for slot in self.task.optimizer.slots}
                plain_optimizer.write_slots(self._optimizer, parameter, own, self._step)

    @property
    def task(self) -> Task:
        """Return what the member is to do."""
        return self._task

    @property
    def parameters(self) -> int:
        """Return how many numbers are trained."""
        return sum(parameter.numel() for parameter in states.trained(self.model).values())

    @property
    def bytes(self) -> int:
        """Return what the weights and the optimizer's state take on the device."""
        trained = sum(parameter.nbytes for parameter in states.trained(self.model).values())
        weights = sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))
        return weights + trained * len(self.task.optimizer.slots)

    def stop(self) -> None:
        """Let go of the last step's gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    # --- steps ---------------------------------------------------------------------------------------------------

    def train(
        self,
        hyper: Any,
        active: Tensor,
        data: Any,
        weights: Tensor | None,
        *,
        shared: bool,
        pace: Any,
        steps: int | None = None,
    ) -> None:
        """Take one step, or several on data with a step axis."""
        self._use(hyper)
        weights = None if weights is None else weights[0]
        for step in range(steps or 1):
            if self._takes_part(active):
                self._take_step(self._own(data, shared, None if steps is None else step), weights)

    def gradients(self, data: Any, weights: Tensor | None = None, *, shared: bool) -> dict[str, Any]:
        """Return what a step makes of a batch before its optimizer does; the model's buffers stay as they are."""
        kept = self._kept_buffers()
        self._optimizer.zero_grad(set_to_none=True)
        scale = self._scale if self.task.precision == "fp16" else None
        try:
            loss, sums = self._backward(self._own(data, shared), None if weights is None else weights[0], scale)
            gradients = {name: p.grad.unsqueeze(0) for name, p in self._params.items() if p.grad is not None}
            buffers = {name: tensor.clone().unsqueeze(0) for name, tensor in self.model.named_buffers()}
        finally:
            self._put_back(kept)
        gradients = self._stored({"gradients": gradients})["gradients"]
        return {"gradients": gradients, "loss": loss, "sums": sums, "buffers": buffers, "scale": scale}

    def apply(self, hyper: Any, active: Tensor, gradients: dict[str, Any]) -> None:
        """Update the member by what `gradients` returned."""
        self._use(hyper)
        if not self._takes_part(active):
            return
        loss, self._skipped = gradients["loss"], True
        for name, gradient in self._stored({"gradients": gradients["gradients"]})["gradients"].items():
            self._params[name].grad = gradient[0].clone()
        self._trouble = self._update(gradients["scale"]) if math.isfinite(loss) else LOSS
        if not self._skipped:
            self._fill({"buffers": gradients["buffers"]})
            self._count(loss, gradients["sums"])

    def train_some(self, slots: np.ndarray, hyper: Any, data: Any, *, shared: bool, pace: Any) -> None:
        """Take one step on data cut for it."""
        if self._trouble == FINE:
            self._use(hyper)
            self._take_step(self._own(data, shared), None)

    def _takes_part(self, active: Tensor) -> bool:
        if active is not self._active[0]:
            self._active = active, bool(active[0])
        return self._active[1] and self._trouble == FINE

    def _use(self, hyper: Mapping[str, Tensor]) -> None:
        """Give the optimizer the hyperparameters of this step."""
        if hyper is self._given:
            return
        self._given = hyper
        self._hyper = {name: float(column[0]) for name, column in hyper.items()}
        for group in self._optimizer.param_groups:
            group.update(plain_optimizer.settings(self.task.optimizer, self._hyper))

    def _take_step(self, batch: Any, weights: Tensor | None) -> None:
        """Do what a plain loop does: forward, backward, clip, update."""
        kept = self._kept_buffers()
        self._optimizer.zero_grad(set_to_none=True)
        scale = self._scale if self.task.precision == "fp16" else None
        self._skipped = True
        try:
            loss, sums = self._backward(batch, weights, scale)
            self._trouble = self._update(scale) if math.isfinite(loss) else LOSS
        finally:
            if self._skipped:
                self._put_back(kept)
        if not self._skipped:
            self._count(loss, sums)

    def _count(self, loss: float, sums: Mapping[str, Any]) -> None:
        """Note a step, and add its loss and metrics to the sums of the epoch."""
        self._step += 1
        for name, total in {**sums, "loss": loss * float(sums["rows"])}.items():
            self._sums[name] = self._sums.get(name, 0.0) + _exact(total)

    def _backward(self, batch: Any, weights: Tensor | None, scale: float | None) -> tuple[float, dict[str, Any]]:
        """Give the parameters their gradients; return the loss and what the epoch's metrics sum up."""
        if self._group is not None:
            with self._in_mode(train=True), self._autocast():
                return plain_parallel.backward(
                    self._group,
                    self.task,
                    self.model,
                    self._params,
                    (self._member.seed, self._step),
                    self._row_draws(batch),
                    batch,
                    weights,
                    scale,
                )
        with self._in_mode(train=True), self._drawing("train"):
            with self._autocast():
                loss, sums, rows = self.task.measured(self.model, batch, weights)
            value = loss.item()
            if math.isfinite(value):
                (loss if scale is None else loss * scale).backward()
        return value, {**sums, "rows": rows}

    def _update(self, scale: float | None) -> int:
        """Update the parameters if all gradients are finite; return the trouble there is."""
        gradients = [p.grad for p in self._params.values() if p.grad is not None]
        if scale is not None and self._group is None:
            torch._foreach_div_(gradients, scale)
        if not plain_optimizer.finite(gradients):
            if scale is None:
                return GRADIENT
            self._scale, self._good = scale * 0.5, 0
            return SCALE if self._scale < SMALLEST_SCALE else FINE
        if self.task.clip:
            nn.utils.clip_grad_norm_(self._params.values(), self._hyper["clip_norm"])
        self._optimizer.step()
        self._skipped = False
        if scale is not None:
            self._good += 1
            if self._good >= GROWTH_STEPS:
                self._scale, self._good = scale * 2.0, 0
        return FINE

    def spread(self, group: ProcessGroup | None) -> None:
        """Compute only this rank's rows of every train batch from now on; None: whole batches again."""
        self._group = group

    def indivisible(self, data: Any, *, shared: bool) -> str | None:
        """Return why the rows of batches like this one can't be spread over devices; None if they can."""
        found = self._divide(data if shared else map_tree(lambda leaf: leaf[0], data))
        return found if isinstance(found, str) else None

    def _divide(self, rows: Any) -> DrawShapes | str:
        """Return what the rows of a batch draw, or why they can't be computed apart. A copy is tried."""
        form = len(leaves(rows)[0]) == 1, *(leaf.shape[1:] for leaf in leaves(rows))  # a single row tells little
        if form not in self._divided:
            model = _scratch(self.model)
            if model is None:
                return "the model can't be copied to be tried. Train it on one device"
            steps = Steps(model, self.task, self._layout)
            self._divided[form] = divide_by_rows(steps, self.state, {}, rows, self.inputs(rows))
        return self._divided[form]

    def _row_draws(self, batch: Any) -> DrawShapes:
        found = self._divide(batch)
        if isinstance(found, str):
            name = self._member.name
            raise StrategyError(f"member {name!r} can't be spread over several devices: {found}.")
        return found

    def ready(self, kind: str, hyper: Any, active: Tensor, data: Any, *, shared: bool) -> None:
        """Raise `InputError` if there is nothing to train."""
        if kind == "train" and not states.trained(self.model):
            raise InputError(
                f"member {self._member.name!r} has no parameter that takes a gradient. "
                f"Set requires_grad=True on what is to be trained."
            )
        if kind == "train" and self._group is not None:
            self._row_draws(data if shared else map_tree(lambda leaf: leaf[0], data))

    def epoch_values(self) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` since the last call; the next epoch begins at zero."""
        sums, self._sums = self._sums, {}
        if not sums:
            return dict.fromkeys(("loss", *(metric.name for metric in self.task.metrics)), np.array([np.nan]))
        return self.values(sums)

    def evaluate(
        self,
        totals: dict[str, Any] | None,
        slots: np.ndarray | None,
        data: Any,
        weights: Tensor | None,
        counts: np.ndarray,
        size: int,
        *,
        shared: bool,
    ) -> dict[str, Any]:
        """Return the sums of the loss and the metrics so far with those of a batch added."""
        totals = {} if totals is None else totals
        if not counts[0]:
            return totals
        weights = None if weights is None or slots is not None else weights[0]
        sums = self._looked(lambda: self.task.run(self.model, self._own(data, shared), weights)[1])
        return {name: totals.get(name, 0.0) + _exact(total) for name, total in sums.items()}

    def values(self, totals: dict[str, Any]) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` of what `evaluate` added up."""
        return self.task.values({name: np.array([float(total)]) for name, total in totals.items()})

    def predict(self, data: Any, *, shared: bool, counts: np.ndarray | None = None) -> Any:
        """Return the outputs on a batch of inputs, without the slot axis."""
        return self._looked(lambda: logits(call(self.model, self._own(data, shared))))

    def predict_some(self, positions: Positions, data: Any, counts: np.ndarray) -> Any:
        """Return the outputs on the member's rows, as NumPy arrays `(1, row, …)`."""
        outputs = self.predict(map_tree(lambda leaf: leaf[:, : counts[0]], data), shared=False)
        return map_tree(lambda tensor: on_host(tensor)[None], outputs)

    def rows(self, outputs: Any, slot: int, count: int) -> Any:
        """Return the real rows of a batch of outputs, on the host."""
        return map_tree(lambda t: on_host(t[:count]), outputs)

    def maskable(self, batch: Any) -> bool:
        """Return False: one member has no need of padding."""
        return False

    def rows_apart(self, inputs: Any) -> bool:
        """Return False: that is not known, and one member needs no padding."""
        return False

    def _looked(self, run: Any) -> Any:
        """Run something on the model in evaluation in_mode, with gradients only where it needs them."""
        with self._in_mode(train=False), self._drawing("evaluate"), self._autocast():
            if not self._needs_grad:
                try:
                    with torch.no_grad():
                        return run()
                except RuntimeError as error:
                    if "grad" not in str(error):
                        raise
                self._needs_grad = True
            with torch.enable_grad():
                return run()

    def _own(self, data: Any, shared: bool, step: int | None = None) -> Any:
        """Return the member's batch in memory of its own: a forward may write into its input."""
        if step is None:
            return map_tree(lambda leaf: leaf.clone() if shared else leaf[0].clone(), data)
        return map_tree(lambda leaf: (leaf[step] if shared else leaf[step, 0]).clone(), data)

    def _in_mode(self, *, train: bool) -> AbstractContextManager[None]:
        # A model that is in training in_mode is trained as it is; nothing need be put back.
        if train and self.model.training:
            return nullcontext()
        return in_mode(self.model, train=train, given=self._modes)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS[self.task.precision]
        if dtype is None:
            return nullcontext()
        # Without its cache: within another autocast torch would keep the cast weights of an earlier step.
        return torch.autocast(self.device.type, dtype=dtype, cache_enabled=False)

    def _drawing(self, kind: str) -> AbstractContextManager[Any]:
        """Return the context in which random operations draw from the member's stream, if the model draws any."""
        if self._may_draw is None:
            loss = None if self.task.loss is None else self.task.loss.plain
            self._may_draw = DrawDetector(self.model, (self.task.objective, loss))
        if self._may_draw.may_draw():
            return EagerDraws(self._member.seed, self._step, self._ahead)
        return DrawsIfNeeded(
            self._habits.setdefault(kind, DrawRecord()), self._member.seed, self._step, self._ahead
        )

    # --- buffers -------------------------------------------------------------------------------------------------

    def _kept_buffers(self) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
        return [
            (module, name, buffer, buffer.clone())
            for module in self._buffered
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def _put_back(self, kept: Sequence[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
        """Give the buffers the numbers they had before the step, and let the gradients go."""
        with torch.no_grad():
            for module, name, buffer, before in kept:
                module._buffers[name] = buffer
                buffer.copy_(before)
        self._optimizer.zero_grad(set_to_none=True)

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The state as a fused lane of this one member has it; weights are views of the model's."""
        exact = states.exact(self.device)
        sums = {
            name: torch.tensor([float(total)], dtype=exact, device=self.device)
            for name, total in self._sums.items()
        }
        optimizer = self._stored({"optimizer": self._optimizer_state(states.trained(self.model))})
        return {**self._weights(), **optimizer, "member": self._numbers(), "sums": sums}

    def _numbers(self) -> dict[str, Tensor]:
        found = {
            "seed": torch.tensor([self._member.seed], device=self.device),
            "step": torch.tensor([float(self._step)], dtype=states.exact(self.device), device=self.device),
            "trouble": torch.tensor([self._trouble], device=self.device),
        }
        if self.task.precision == "fp16":
            found["scale"] = torch.tensor([self._scale], device=self.device)
            found["good"] = torch.tensor([self._good], device=self.device)
        return found

    def _weights(self) -> State:
        return self._weights_of(self.model)

    def _weights_of(self, model: nn.Module) -> State:
        parts = {"params": states.trained, "frozen": states.kept, "buffers": states.buffers}
        return self._stored(
            {
                part: {name: tensor.detach().unsqueeze(0) for name, tensor in find(model).items()}
                for part, find in parts.items()
            }
        )

    def _optimizer_state(self, params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        hyper = {name: torch.tensor([value]) for name, value in self._hyper.items()}
        slots = plain_optimizer.read_slots(self.task.optimizer, self._optimizer, params, hyper)
        return {f"{slot}/{name}": tensor for slot, tensors in slots.items() for name, tensor in tensors.items()}

    def _stored(self, state: Mapping[str, Mapping[str, Tensor]]) -> State:
        """Return a state in the layout that fused lanes store it in, or back from it."""
        return {
            part: {
                name: states.turned(name.rpartition("/")[2], tensor, self._layout)
                for name, tensor in tensors.items()
            }
            for part, tensors in state.items()
        }

    def read(self, positions: Positions, parts: Collection[str] | None = None) -> State:
        """Return a copy of the member's state, `(1, …)`."""
        state = self._weights() if parts is not None and set(parts) <= set(WEIGHTS) else self.state
        return {
            part: {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
            for part, tensors in state.items()
            if parts is None or part in parts
        }

    def write(self, positions: Positions, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the member's state by part and name."""
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
        self._fill({part: given.get(part, {}) for part in WEIGHTS})
        member = given.get("member", {})
        self._take_numbers({name: tensor[0] for name, tensor in member.items()})
        if "trouble" in member:
            self._trouble = int(member["trouble"][0])
        self._fill_optimizer(self._stored({"optimizer": given.get("optimizer", {})})["optimizer"])
        if "sums" in given:
            self._sums = {name: float(tensor[0]) for name, tensor in given["sums"].items()}

    def _fill(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        own = {name: tensor for tensors in self._weights().values() for name, tensor in tensors.items()}
        with torch.no_grad():
            for tensors in weights.values():
                for name, tensor in tensors.items():
                    if own[name].shape == tensor.shape and own[name].dtype == tensor.dtype:
                        own[name].copy_(tensor)
                    else:  # a buffer that the model had replaced by one of another shape or type
                        path, _, last = name.rpartition(".")
                        self.model.get_submodule(path)._buffers[last] = tensor[0].to(self.device, copy=True)

    def adopt(self, position: int, other: Any, source: int) -> None:
        """Write what still fits of the optimizer state and the step count that a member has in another engine.

        A parameter that was given another shape meanwhile begins at its initial state.
        """
        theirs = other.carried(source)
        names = [name for name in CARRIED["member"] or () if name in theirs["member"]]
        self._take_numbers({name: theirs["member"][name][0] for name in names})
        self._fill_optimizer(theirs["optimizer"])

    def carried(self, position: int) -> State:
        """Return the optimizer's state and the step count for another engine to adopt.

        Parameters that are frozen now are among them. Parameters that the user has replaced are not.
        """
        current = dict(self.model.named_parameters())
        kept = {name: parameter for name, parameter in self._params.items() if current.get(name) is parameter}
        return {"optimizer": map_tree(torch.clone, self._optimizer_state(kept)), "member": self._numbers()}

    def _fill_optimizer(self, given: Mapping[str, Tensor]) -> None:
        """Give the optimizer the state of each parameter, `(1, …)` in the layout of the model's parameters."""
        for name, parameter in self._params.items():
            own = {slot: given.get(f"{slot}/{name}") for slot in self.task.optimizer.slots}
            found = {slot: tensor[0] for slot, tensor in own.items() if tensor is not None}
            if found.keys() == own.keys() and all(
                t.dim() == 0 or t.shape == parameter.shape for t in found.values()
            ):
                plain_optimizer.write_slots(self._optimizer, parameter, found, self._step)

    def _take_numbers(self, member: Mapping[str, Tensor]) -> None:
        if "step" in member:
            self._step = int(member["step"])
        if "scale" in member:
            self._scale, self._good = float(member["scale"]), int(member["good"])

    def trouble(self) -> np.ndarray:
        """Return `(slot,)`: what went wrong, by the codes of `errors.REASONS`; 0 where nothing did."""
        return np.array([self._trouble])

    def steps_taken(self) -> np.ndarray:
        """Return `(slot,)`: the steps that changed the weights."""
        return np.array([self._step], dtype=np.float64)

    def clear_trouble(self) -> None:
        """Begin a fit with nobody in trouble, on the model as it is now."""
        self._trouble = FINE
        self._may_draw, self._habits = None, {}
        self._rebind()
        self._buffered = [module for module in self.model.modules() if module._buffers]

    def narrow(self, positions: np.ndarray) -> None:
        """Do nothing: there is one member."""

    def widen(self) -> None:
        """Do nothing: nothing was narrowed."""

    def still_shared(self, members: Sequence[Member]) -> bool:
        """Return True: one member shares nothing."""
        return True

    def objects(self) -> Iterable[tuple[str, nn.Module]]:
        """Return the modules of the model that is stepped."""
        return self.model.named_modules()

    def gather(self, members: Sequence[Member]) -> State:
        """Return the weights that the member's model holds."""
        return self._weights_of(members[0].model)

    def scatter(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the weights into the member's model, if that is not the very one that is stepped."""
        if self.model is not members[0].model:
            _copy_weights(self.model, members[0].model)

    def refresh(self, positions: Positions, members: Sequence[Member]) -> None:
        """Take the weights from the member's model, if that is not the very one that is stepped."""
        if self.model is not members[0].model:
            _copy_weights(members[0].model, self.model)
        self._rebind()

    # --- checks --------------------------------------------------------------------------------------------------

    def check(self, batch: Any, name: str) -> None:
        """Try the model on a batch, before anything is trained.

        A copy is tried, whose buffers and Python state are its own. An objective is not called: it may keep count
        of its calls, and the first step will tell what is wrong with it.
        """
        if self.task.objective is None:
            self._try(batch, batch.data, name, lambda model, few: self.task.run(model, few, None))

    def output_shape(self, batch: Any, name: str) -> tuple[int, ...] | None:
        """Return the shape `(row, …)` of the output for a batch; None if it is no single tensor."""
        inputs = self.inputs(batch.data)
        output = self._try(batch, inputs, name, lambda model, few: logits(call(model, few)))
        return tuple(output.shape) if isinstance(output, Tensor) else None

    def _try(self, batch: Any, data: Any, name: str, run: Any) -> Any:
        """Run something on a copy of the model; raise `InputError` for what does not fit."""
        data = data if batch.shared else map_tree(lambda leaf: leaf[0], data)
        for graded in (torch.no_grad, torch.enable_grad):  # a forward may differentiate by its input
            model = _scratch(self.model)
            if model is None:  # it can't be copied: its first step will tell
                return None
            with (
                explained(name, self.model, data),
                undoing_side_effects(("self", model), ("the loss", self.task.loss and self.task.loss.plain)),
                torch.random.fork_rng(devices=[]),
                in_mode(model, train=False),
                self._autocast(),
                graded(),
            ):
                try:
                    return run(model, map_tree(torch.clone, data))
                except RuntimeError as error:
                    if graded is torch.enable_grad or "grad" not in str(error):
                        raise
        return None

    def working_bytes(self, batch: Any) -> int | None:
        """Return None: what a plain step takes is not known before it runs."""
        return None


def _scratch(model: nn.Module) -> nn.Module | None:
    """Return a copy of a model that reads the same parameters; None if it can't be copied."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # whatever a user's attributes may hold
        return None


def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        theirs = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        for name, tensor in (*target.named_parameters(), *target.named_buffers()):
            tensor.copy_(theirs[name])


def _exact(total: Any) -> Any:
    """Return a number to add up in float64, without waiting for the device."""
    return total.detach().double() if isinstance(total, Tensor) else float(total)
