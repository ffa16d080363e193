"""Keras on torch: a lane's engine on the torch adapter's machinery, with Keras's own pure functions in it.

A Keras model on torch is stepped as any torch model is: its stacked variables go through one traced program, which
is compiled where that pays. What is Keras's comes from `Steps`: the loss, the metrics and the optimizer's update.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import keras
import numpy as np
import torch
from keras.src.backend.torch import random as keras_random
from keras.src.random.seed_generator import draw_seed
from torch import Tensor

from modelfleet.errors import InputError
from modelfleet.frameworks import batches, engine
from modelfleet.frameworks.errors import FINE, GRADIENT, LOSS, CannotFuseError
from modelfleet.frameworks.functional import Replica, padding
from modelfleet.frameworks.keras.custom_objects import own_python
from modelfleet.frameworks.keras.losses import label_check
from modelfleet.frameworks.keras.plain import become_plain, evaluation_offset
from modelfleet.frameworks.keras.replica import is_double
from modelfleet.frameworks.keras.steps import Steps, outputs
from modelfleet.frameworks.keras.task import task_of
from modelfleet.frameworks.stacked import Positions, StackedState, stack
from modelfleet.frameworks.torch import arrays, fused, programs, steps
from modelfleet.frameworks.torch import state as states
from modelfleet.frameworks.torch.base import on_host
from modelfleet.frameworks.torch.counting import Coefficients
from modelfleet.frameworks.torch.devices import out_of_memory
from modelfleet.frameworks.torch.random.operations import DrawFromStreams
from modelfleet.frameworks.torch.random.streams import Streams
from modelfleet.frameworks.torch.tracing.trace import TRACE_LOCK, Program, trace, untraced
from modelfleet.members import Member
from modelfleet.trees import leaves, map_tree
from modelfleet.types import State

PARTS = ("params", "buffers", "optimizer", "metrics")


class LaneSteps(steps.Steps):
    """The three steps of a lane, as `frameworks.torch.steps.Steps` has them, of a Keras model's pure functions."""

    def __init__(self, model: Any, task: Any) -> None:
        super().__init__(model, task, layout=frozenset())
        self.own = Steps(model)

    def find_unused(
        self, state: State, shared: dict[str, Tensor], data: Any, weights: Tensor | None, *, shared_data: bool
    ) -> None:
        """Find the variables that take no part in the loss, by one backward pass of the first member alone."""
        data = data if shared_data else map_tree(lambda t: t[0], data)
        weights = None if weights is None else weights[0]
        one = {part: map_tree(lambda t: t[0].clone(), state[part]) for part in PARTS}
        with self._keras(state, fused=False):
            found = self._gradients(one, data, weights, fused=False)[0]
        self.unused = frozenset(one["params"].keys() - found.keys())

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
        """One step of every active member, in place; gives the losses `(member,)`."""
        own = {part: state[part] for part in PARTS}

        def step(own: State, data: Any, weights: Any) -> Any:
            return self._applied(own, self._gradients(own, data, weights, fused=fused))

        with self._keras(state, fused):
            found = steps.mapped(step, (own, data, weights), _axes(shared_data), fused=fused)
        return self._keep(state, active, *found)

    def gradients(
        self,
        state: State,
        shared: dict[str, Tensor],
        data: Any,
        weights: Tensor | None,
        *,
        shared_data: bool,
        fused: bool,
    ) -> Any:
        """Return every member's gradients, and its loss, buffers and metrics."""

        def found(own: State, data: Any, weights: Any) -> Any:
            return self._gradients(own, data, weights, fused=fused)

        own = {part: state[part] for part in PARTS}
        with self._keras(state, fused):
            return steps.mapped(found, (own, data, weights), _axes(shared_data), fused=fused)

    def apply(
        self,
        state: State,
        shared: dict[str, Tensor],
        coefficients: Coefficients,
        active: Tensor,
        found: Any,
        *,
        shared_data: bool,
        fused: bool,
    ) -> Tensor:
        """Update every active member in place by what `gradients` found; gives the losses `(member,)`."""
        own = {part: state[part] for part in PARTS}
        with self._keras(state, fused):
            new = steps.mapped(self._applied, (own, found), (0, 0), fused=fused)
        return self._keep(state, active, *new)

    def _applied(self, own: State, found: Any) -> tuple[State, Tensor, Tensor]:
        """Return one member's state after an update, its loss, and whether its gradient was finite."""
        gradients, (loss, buffers, metrics) = found
        params, optimizer = self.own.apply(own["params"], own["optimizer"], gradients)
        finite = torch.isfinite(torch.stack([(g * 0).sum() for g in gradients.values()]).sum())
        if self.own.scales_loss:  # and by itself passes over gradients that are not finite
            finite = torch.ones_like(finite)
        return {"params": params, "buffers": buffers, "optimizer": optimizer, "metrics": metrics}, loss, finite

    def _keep(self, state: State, active: Tensor, new: State, loss: Tensor, finite: Tensor) -> Tensor:
        """Write the new state of the active members whose loss and gradient are finite; gives the losses."""
        member = state["member"]
        live = active & (member["trouble"] == FINE)
        good_loss = torch.isfinite(loss)
        keep = live & good_loss & finite
        # First all that is to be kept, and only then the writing: so equal results between can be shared.
        kept = [
            (tensor, torch.where(_like(keep, tensor), new[part][name].to(tensor.dtype), tensor))
            for part in PARTS
            for name, tensor in state[part].items()
        ]
        for tensor, value in kept:
            tensor.copy_(value)
        steps.keep_new(keep, member["step"], member["step"] + 1)
        steps.keep_new(live, member["trouble"], torch.where(good_loss, torch.where(finite, FINE, GRADIENT), LOSS))
        return loss

    def evaluate(
        self,
        state: State,
        shared: dict[str, Tensor],
        data: Any,
        weights: Tensor | None,
        *,
        shared_data: bool,
        fused: bool,
    ) -> dict[str, Tensor]:
        """The metrics of a state `(member, …)` with a batch added."""

        def add(own: State, data: Any, weights: Any) -> Any:
            return self.own.evaluate(own["params"], own["buffers"], own["metrics"], data, weights)[0]

        own = {part: state[part] for part in ("params", "buffers", "metrics")}
        with torch.no_grad(), self._keras(state, fused):
            return steps.mapped(add, (own, data, weights), _axes(shared_data), fused=fused)

    def predict(
        self, state: State, shared: dict[str, Tensor], data: Any, *, shared_data: bool, fused: bool
    ) -> Any:
        """The outputs `(member, row, …)` on a batch of inputs."""

        def output_of(own: State, data: Any) -> Any:
            return self.own.predict(own["params"], own["buffers"], data)[0]

        own = {part: state[part] for part in ("params", "buffers")}
        with torch.no_grad(), self._keras(state, fused):
            return steps.mapped(output_of, (own, data), _axes(shared_data)[:2], fused=fused)

    def results(self, metrics: dict[str, Tensor], *, fused: bool) -> dict[str, Tensor]:
        """The loss and the metrics `(member,)` of what was added up."""
        with torch.no_grad():
            return steps.mapped(self.own.results, (metrics,), (0,), fused=fused)

    def _gradients(self, own: State, data: Any, weights: Any, *, fused: bool) -> Any:
        """One member's gradients, of the variables that have one; and its loss, buffers and metrics."""

        def loss_of(params: Any) -> Any:
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

    def bears_padding(self, one: State, data: Any, real: int) -> bool:
        """Whether a member's step on `real` rows is the same with padded rows behind them that weigh 0.

        Tried at random weights, too: a member's own may hide what it does (see `functional.padding`).
        """
        own = {part: map_tree(lambda t: t[0], one[part]) for part in PARTS}
        weights = (torch.arange(len(leaves(data)[0]), device=one["member"]["seed"].device) < real).float()
        data = map_tree(lambda leaf: arrays.padded_otherwise(leaf, real), data)
        few = map_tree(lambda t: t[:real], data)
        params = map_tree(on_host, own["params"])
        try:
            for number in (1, 2, None):
                if number is not None:
                    drawn = padding.shaken(params, number)
                    own["params"] = {
                        name: torch.from_numpy(drawn[name]).to(tensor) for name, tensor in own["params"].items()
                    }
                else:
                    own["params"] = map_tree(lambda t: t[0], one["params"])
                with self._keras(one, fused=False):
                    padded = map_tree(on_host, self._gradients(own, data, weights, fused=False))
                with self._keras(one, fused=False):
                    alone = map_tree(on_host, self._gradients(own, few, None, fused=False))
                pairs = zip(padded, alone, (True, False), strict=True)  # the gradients, and all else
                if not all(padding.alike(p, a, together=together) for p, a, together in pairs):
                    return False
        except Exception:  # a model that needs whole batches feels padding
            return False
        return True

    def rows_apart(self, one: State, inputs: Any) -> bool:
        """Whether a member's output for a row depends on that row alone; tried as in `bears_padding`."""
        rows = len(leaves(inputs)[0])
        few = map_tree(lambda t: t[: (rows + 1) // 2], inputs)
        params = map_tree(lambda t: on_host(t[0]), one["params"])
        buffers = map_tree(lambda t: t[0], one["buffers"])
        try:
            for number in (1, 2, None):
                drawn = params if number is None else padding.shaken(params, number)
                own = {name: torch.from_numpy(drawn[name]).to(tensor) for name, tensor in one["params"].items()}
                with torch.no_grad(), self._keras(one, fused=False):
                    whole, part = (map_tree(on_host, self.own.predict(own, buffers, x)[0]) for x in (inputs, few))
                if not padding.rows_alike(whole, part, rows):
                    return False
        except Exception:  # a model that needs whole batches feels padding
            return False
        return True

    @contextmanager
    def _keras(self, state: State, fused: bool) -> Iterator[None]:
        device = state["member"]["seed"].device
        with keras.device(str(device)), _GENERATORS, _own_errors(), self._streams(state["member"], fused):
            yield


class Engine(fused.FusedEngine):
    """The Keras-on-torch side of a lane (see `modelfleet.lanes.Lane`)."""

    held = ("params", "buffers", "optimizer")

    def __init__(
        self,
        members: Sequence[Member],
        task: Any,
        columns: Mapping[str, np.ndarray],
        device: torch.device,
        *,
        fused: bool,
        programs: Any = None,
    ) -> None:
        if programs is None:
            programs = _programs(members[0].model, task, fused=fused)
        elif programs.steps.own.stale:  # in place: others have these programs, too
            vars(programs).update(vars(_programs(members[0].model, task, fused=fused)))
        self._members = list(members)
        self._alike = None  # models of one signature are alike, and a change of one is seen at the next verb
        self._batch = 0  # the number of the next batch to evaluate or predict
        # Nothing is `shared`: every Keras model has variables of its own.
        self._begin(members[0].name, programs, device)
        self.stacked = StackedState(self._from_models(members), len(members), states.Rows(device))

    @property
    def _steps(self) -> LaneSteps:
        found = self.programs.steps
        assert isinstance(found, LaneSteps)
        return found

    # --- steps ---------------------------------------------------------------------------------------------------

    def ready(self, kind: str, hyper: Any, active: Tensor, data: Any, *, shared: bool) -> None:
        """Trace a step for batches like this one, if that has not been done."""
        if kind == "train" and not self.state["params"]:
            raise InputError(
                f"member {self._first!r} has no trainable variable. Set trainable=True on what is to be trained."
            )
        own = self._steps.own
        self._batch = 0
        if kind != "predict":
            self._try_results()
        args = {
            "train": (self.state, self.shared, {}, active, data, None),
            "evaluate": (self._reading(self.state, self.state["metrics"]), self.shared, data, None),
            "predict": (self._reading(self.state), self.shared, data),
        }
        try:
            self.programs.program(kind, args[kind], shared)
        except CannotFuseError as error:
            error.shared = False  # what Keras writes to in a step are tensors of its own
            raise
        if own.apart is not None and len(self._members) > 1:
            raise CannotFuseError(own.apart)
        self._run_plainly()

    def _run_plainly(self) -> None:
        """Become an engine that calls the model's own functions, if it was found that no others will do."""
        reason = self._steps.own.apart
        if reason is not None and len(self._members) == 1:
            become_plain(self, self._members, reason)

    def objects(self) -> Iterable[tuple[str, Any]]:
        """The layers of the model that is traced for all members of a signature; none where no Python runs."""
        return () if self.untraced is None else super().objects()

    def epoch_values(self) -> dict[str, np.ndarray]:
        """The loss and the metrics `(slot,)` since the last call; the next epoch begins at nothing."""
        found = self.values(self.state["metrics"])
        for name, fresh in self._steps.own.fresh_metrics().items():
            self.state["metrics"][name].copy_(fresh.detach())
        return found

    def evaluate(
        self,
        totals: dict[str, Tensor] | None,
        slots: np.ndarray | None,
        data: Any,
        weights: Tensor | None,
        counts: np.ndarray,
        size: int,
        *,
        shared: bool,
    ) -> dict[str, Tensor]:
        """The metrics `(slot, …)` so far with a batch added."""
        if totals is None:
            totals = self._fresh_metrics(len(counts))
            self._batch = 0
        self._batch += 1
        there = self.tensor(np.flatnonzero(counts > 0) if slots is None else slots)
        if slots is None:
            added = self._added(self.state, totals, data, weights, shared=shared)
            if len(there) == len(counts):
                return added
            added = map_tree(lambda t: t.index_select(0, there), added)
        else:
            some = map_tree(lambda t: t.index_select(0, there), totals)
            added = self._added(states.select(self.state, there), some, data, None, shared=shared)
        return {name: total.index_copy(0, there, added[name]) for name, total in totals.items()}

    def values(self, totals: dict[str, Tensor]) -> dict[str, np.ndarray]:
        """The loss and the metrics `(slot,)` of what `evaluate` added up, by the names of Keras's logs."""
        return self._to_host(self._steps.results(totals, fused=self.fused))

    def predict(self, data: Any, *, shared: bool, counts: np.ndarray | None = None) -> Any:
        """The outputs `(slot, row, …)` on a batch of inputs."""
        self._batch += 1
        args = (self._reading(self.state), self.shared, data)
        return self.programs.program("predict", args, shared)[0](leaves(args))

    def predict_some(self, positions: Positions, data: Any, counts: np.ndarray) -> Any:
        """Return the outputs of some members, each on rows of its own, as NumPy arrays `(member, row, …)`."""
        self._batch += 1
        args = (self._reading(self.read(positions, ("params", "buffers", "member"))), self.shared, data)
        return map_tree(on_host, self.programs.program("predict", args, False)[0](leaves(args)))

    @staticmethod
    def inputs(data: Any) -> Any:
        """The x of (x,), (x, y) and (x, y, sample_weight), or the batch itself."""
        return batches.weighted_inputs(data)

    def maskable(self, batch: Any) -> bool:
        """Whether padded rows can be weighted out without being felt, found by trying on one member."""
        if not self._steps.own.maskable:
            return False
        real = int(batch.counts[batch.counts > 0].min())
        key = (real, batch.size)
        if key not in self._bears_padding:
            slot = int(np.flatnonzero(batch.counts == real)[0])
            data = batch.data if batch.shared else map_tree(lambda leaf: leaf[slot], batch.data)
            one = states.select(self.state, self.tensor(np.array([slot])))
            self._bears_padding[key] = self._steps.bears_padding(one, data, real)
        return self._bears_padding[key]

    def _are_apart(self, inputs: Any) -> bool:
        return self._steps.rows_apart(states.select(self.state, self.tensor(np.array([0]))), inputs)

    # --- state ---------------------------------------------------------------------------------------------------

    def adopt(self, position: int, other: engine.Engine, source: int) -> None:
        """Take over the number of steps a member has taken. Its optimizer's state is in its model."""
        self.write([position], {"member": {"step": other.read([source], ("member",))["member"]["step"]}})

    def still_shared(self, members: Sequence[Member]) -> bool:
        """Whether all members are compiled as they were when the lane was made."""
        return not self._steps.own.stale and all(task_of(member.model) is self.task for member in members)

    def gather(self, members: Sequence[Member]) -> State:
        """Return the weights and the optimizer's variables that the models of some members hold."""
        found = [self._steps.own.state(member.model) for member in members]
        return stack(
            [{part: own[part] for part in self.held} for own in found],
            lambda tensors: states.stack(tensors, self.device),
        )

    def scatter(self, positions: Positions, members: Sequence[Member]) -> None:
        """Copy the state of some members into their models and optimizers."""
        state = self.stacked.read(positions, self.held, copy=False)
        for row, member in enumerate(members):
            self._steps.own.write_back(member.model, map_tree(lambda tensor, row=row: tensor[row], state))

    def refresh(self, positions: Positions, members: Sequence[Member]) -> None:
        """Replace the state of some members by what their models hold."""
        self.write(positions, self.gather(members))

    # --- checks --------------------------------------------------------------------------------------------------

    def check(self, batch: Any, name: str) -> None:
        """Try one member on two rows, before anything is trained, and make room for its metrics.

        What does not fit raises `InputError`, with the shapes that came and what the model said of them.
        """
        with self._trying(batch, batch.data, name) as (one, few):
            self._steps.own.build(few)
            one["metrics"] = self._fresh_metrics(1)
            self._steps.evaluate(one, self.shared, few, None, shared_data=True, fused=False)
            with suppress(Exception):  # a forward that trains may assign what the other does not
                self._steps.find_unused(one, self.shared, few, None, shared_data=True)
        width = len(self.state["member"]["seed"])
        self.state = {**self.state, "metrics": self._fresh_metrics(width)}
        self._run_plainly()

    @property
    def checks_targets(self) -> bool:  # pyrefly: ignore
        """Return True: a Keras model is called on x, whatever its loss is."""
        return True

    def check_targets(self, output_shape: tuple[int, ...] | None, target: Any, name: str | None) -> None:
        """Check all labels of a data set, where the loss takes labels."""
        whose = "" if name is None else f"member {name!r}: "
        check = None if output_shape is None else label_check(self._steps.model, output_shape, whose)
        if check is not None:
            check(target)

    def label_check(self, output_shape: tuple[int, ...] | None) -> Callable[[Any], None] | None:
        """A function that refuses a batch with labels out of range; None where the loss takes none."""
        check = None if output_shape is None else label_check(self._steps.model, output_shape)
        if check is None:
            return None
        return lambda batch: check(batch[1]) if isinstance(batch, tuple) and len(batch) > 1 else None

    # --- helpers -------------------------------------------------------------------------------------------------

    def _try_results(self) -> None:
        # Metrics are read once an epoch: what can't be read for all members at once must be known before.
        try:
            self.values(self.state["metrics"])
        except Exception as error:  # whatever a metric may do
            if self.fused:
                raise CannotFuseError(f"a metric can't be computed for all members at once: {error}") from error
            raise

    def _added(
        self, state: State, totals: dict[str, Tensor], data: Any, weights: Tensor | None, *, shared: bool
    ) -> dict[str, Tensor]:
        args = (self._reading(state, totals), self.shared, data, weights)
        return self.programs.program("evaluate", args, shared)[0](leaves(args))

    def _fresh_metrics(self, width: int) -> dict[str, Tensor]:
        fresh = self._steps.own.fresh_metrics()
        return {name: states.stack([value] * width, self.device) for name, value in fresh.items()}

    def _next_coefficients(self, hyper: dict[str, Tensor], active: Tensor) -> Coefficients:
        return {}  # the optimizer's numbers are variables of its own

    def _coefficients(self, state: State, hyper: dict[str, Tensor]) -> Coefficients:
        return {}

    def _from_models(self, members: Sequence[Member]) -> State:
        state = self.gather(members)
        width = len(members)
        state["metrics"] = self._fresh_metrics(width)
        state["member"] = {
            "seed": torch.tensor([member.seed for member in members], device=self.device),
            "step": torch.zeros(width, dtype=states.exact(self.device), device=self.device),
            "trouble": torch.zeros(width, dtype=torch.int64, device=self.device),
        }
        return state

    def _reading(self, state: State, metrics: dict[str, Tensor] | None = None) -> State:
        """What a forward pass reads of a state; with metrics to add to, if they are given.

        Every batch of an evaluation draws its own numbers, and others than a step does.
        """
        seed = (state["member"]["seed"] + evaluation_offset(self._batch)) & (2**63 - 1)
        member = {"seed": seed, "step": state["member"]["step"]}
        found = {"params": state["params"], "buffers": state["buffers"], "member": member}
        return found if metrics is None else {**found, "metrics": metrics}


class _Programs(programs.Programs):
    """The programs of a lane of Keras models."""

    def _roots(self) -> list[tuple[str, Any]]:
        return own_python(self.steps.model)

    def _refuse_other_parameters(self, kind: str, args: tuple[Any, ...]) -> None:
        """Do nothing: a layer frozen in the middle of a fit counts from the next compile on, as in Keras."""

    def serve(self, model: Any) -> None:
        """Do nothing: the steps are those of the model they were made of, until that is stale."""


def _programs(model: Any, task: Any, *, fused: bool) -> programs.Programs:
    made = _Programs(model, task, fused=fused)
    made.steps = LaneSteps(model, task)
    return made


def _axes(shared_data: bool) -> tuple[int | None, ...]:
    """The member axes of (state, data, weights)."""
    return 0, None if shared_data else 0, 0


def _like(per_member: Tensor, tensor: Tensor) -> Tensor:
    return per_member.view(-1, *[1] * (tensor.dim() - 1))


class _Substitute:
    """Something in a module of Keras that is replaced as long as anybody is within its context."""

    def __init__(self, module: Any, name: str, value: Any) -> None:
        self._place = module, name
        self._value = value
        self._before = getattr(module, name)
        self._users = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            setattr(*self._place, self._value)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                setattr(*self._place, self._before)


def _advance(seed: Any) -> None:
    """Count a draw, as Keras does, without a generator: the draw is made from the member's own stream."""
    draw_seed(seed)


# Keras on torch makes a generator from the value of a seed at every draw, which no program can.
_GENERATORS = _Substitute(keras_random, "torch_seed_generator", _advance)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Errors as they were raised, by which one can tell what can't be fused: Keras wraps them in its own."""
    filtering = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    try:
        yield
    finally:
        if filtering:
            keras.config.enable_traceback_filtering()


@contextmanager
def drawing(seed: int, step: int) -> Iterator[None]:
    """Within this context a model that is stepped by itself draws what a lane would draw for that member."""
    with _GENERATORS, DrawFromStreams(Streams(torch.tensor(seed), torch.tensor(step))):
        yield


# --- to be asked only ----------------------------------------------------------------------------------------


def replica(model: Any, device: torch.device) -> Replica:
    """Answers batches with a model. On the CPU its weights are not copied."""
    variables = list(model.variables)

    def predict(values: Any, x: Any) -> Any:
        with keras.device(str(device)), _own_errors():
            return outputs(model, list(zip(variables, values, strict=True)), x)

    exact = is_double(variables)
    values = [variable.value.detach().to(device) for variable in variables]
    return Replica(predict, values, _Traced(device), lambda leaf: arrays.place(leaf, device, exact=exact))


class _Traced:
    """What a replica asks of a backend: each form of batch is traced once, and runs without Keras's Python."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function by traced programs, or as it is where it can't be traced."""
        programs: dict[str, Program] = {}

        def run(*args: Any) -> Any:
            form = str(map_tree(lambda t: (tuple(t.shape), t.dtype), args[1:]))
            if form not in programs:
                with TRACE_LOCK:
                    programs[form] = _program(function, args)
            with torch.inference_mode():
                return programs[form](leaves(args))

        return run

    def host(self, tree: Any) -> Any:
        """A tree of tensors as NumPy arrays; bfloat16 as float32."""
        return map_tree(arrays.as_numpy, tree)

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device is out of memory."""
        return out_of_memory(error)


def _program(function: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    unstacked = [False] * len(args)
    try:
        return trace(function, args, unstacked)
    except CannotFuseError:
        return untraced(function, args, unstacked)


def numbers(variable: Any) -> np.ndarray:
    """A variable's numbers in NumPy's terms: of bfloat16 the bits."""
    return arrays.host(variable.value)


def lend(variable: Any, array: np.ndarray) -> None:
    """Give a variable what `numbers` gave; it reads that memory."""
    tensor = arrays.restored(array)
    variable.value.data = tensor.view(torch.bfloat16) if variable.value.dtype == torch.bfloat16 else tensor
