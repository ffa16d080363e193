"""The engine of a Keras member on its own: its own object, by the functions that its own `fit` calls.

What can't be had as a pure function of a member's variables runs here: a `train_step` of one's own, eager models,
states that a forward changes outside of the model. The model itself is the state: a step changes its variables in
place, as `fit` does. Only two things differ from `fit`. On torch, draws come from the member's own stream. And a
step whose loss or weights are not finite is undone: the member keeps its last good state.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from modelfleet.errors import InputError, StrategyError
from modelfleet.frameworks import batches
from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.errors import FINE, GRADIENT, LOSS
from modelfleet.frameworks.explaining import batch_error
from modelfleet.frameworks.keras.optimizers import built, left_unbuilt
from modelfleet.frameworks.keras.steps import slot_keys, structural_keys
from modelfleet.frameworks.keras.task import task_of
from modelfleet.frameworks.stacked import Positions
from modelfleet.joining import joined
from modelfleet.members import Member
from modelfleet.trees import map_tree
from modelfleet.types import Kind, State

BACKEND = keras.backend.backend()


class PlainEngine(Engine):
    """The side of a lane of one member that Keras knows (see `frameworks.engine.Engine`)."""

    programs = None
    steps_per_call = 1
    fused = False
    prospect = 1.0
    untraced: str | None = None
    compiling = False
    positions = slots = np.zeros(1, dtype=np.int64)

    def __init__(self, members: Sequence[Member], task: Any, device: Any, reason: str | None = None) -> None:
        (member,) = members
        self.device = device
        self.untraced = reason
        self._task = task
        self._member = member
        self.model: Any = member.model
        self._step = 0
        self._trouble = FINE
        self._batch = 0  # the number of the next batch to evaluate or predict
        self._logs: dict[str, Any] = {}
        self._held: list[Any] = []  # what the metrics of training are while others are evaluated

    @property
    def task(self) -> Any:
        """Return what the member is to do."""
        return self._task

    @property
    def parameters(self) -> int:
        """Return how many numbers are trained."""
        return sum(int(np.prod(variable.shape)) for variable in self.model.trainable_variables)

    @property
    def bytes(self) -> int:
        """Return what the model's and the optimizer's variables take."""
        found = (variable for own in self._variables().values() for variable in own.values())
        return sum(int(np.prod(v.shape)) * np.dtype(_numpy_dtype(v)).itemsize for v in found)

    @property
    def program(self) -> str:
        """Return how the train steps run."""
        return "Keras's own train step, eager" if self.model.run_eagerly else "Keras's own train step"

    def stop(self) -> None:
        """Do what Keras does when a fit is over: an optimizer may put averages in the place of the weights."""
        optimizer: Any = getattr(self.model, "optimizer", None)
        if getattr(optimizer, "use_ema", False) and int(ops.convert_to_numpy(optimizer.iterations)) > 0:
            optimizer.finalize_variable_values(self.model.trainable_variables)
            for variable in self.model.trainable_variables:
                # Not the average's own array: on JAX, what next takes the weights would take that, too (3.15).
                variable.assign(ops.copy(variable.value))

    # --- steps ---------------------------------------------------------------------------------------------------

    def train(
        self,
        hyper: Any,
        active: Any,
        data: Any,
        weights: Any,
        *,
        shared: bool,
        pace: Any = None,
        steps: int | None = None,
    ) -> None:
        """Take one step, or several on data with a step axis."""
        for step in range(steps or 0):
            one = map_tree(lambda t, step=step: t[step], data)
            self.train(hyper, active, one, None, shared=shared)
        if steps is None and bool(np.all(ops.convert_to_numpy(active))) and self._trouble == FINE:
            self._take_step(data if shared else map_tree(lambda leaf: leaf[0], data))

    def gradients(self, data: Any, weights: Any = None, *, shared: bool) -> Any:
        """Raise `StrategyError`: a train step of the model's own has no parts."""
        raise StrategyError(
            f"member {self._member.name!r} trains by its model's own train_step, which can't be taken in parts. "
            f"Leave train_step as Keras has it, and compile without run_eagerly."
        )

    def apply(self, hyper: Any, active: Any, gradients: Any) -> None:
        """Raise `StrategyError`: a train step of the model's own has no parts."""
        self.gradients(None, shared=False)

    def train_some(self, slots: np.ndarray, hyper: Any, data: Any, *, shared: bool, pace: Any = None) -> None:
        """Take one step on data that were cut."""
        self.train(hyper, np.ones(1, dtype=bool), data, None, shared=shared)

    def _take_step(self, batch: Any) -> None:
        if self.model.optimizer is not None:
            built(self.model)
        before = self._copied(("params", "buffers", "optimizer", "metrics"))
        with self._drawing(self._member.seed):
            self._logs = self._called("train", batch)
        if not _finite(self._logs.get("loss", 0.0)):
            self._trouble = LOSS
        elif not all(_finite(ops.sum(v.value * 0)) for v in self.model.trainable_variables):
            self._trouble = GRADIENT
        if self._trouble == FINE:
            self._step += 1
        else:
            self._put(before)

    def ready(self, kind: Kind, hyper: Any, active: Any, data: Any, *, shared: bool) -> None:
        """Refuse to train a model that has nothing to train."""
        self._batch = 0
        own_step = type(self.model).train_step is not keras.Model.train_step
        if kind == "train" and not self.model.trainable_variables and not own_step:
            raise InputError(
                f"member {self._member.name!r} has no trainable variable. "
                f"Set trainable=True on what is to be trained."
            )

    def epoch_values(self) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` since the last call; the next epoch begins at nothing."""
        found = self._results(self._logs)
        self.model.reset_metrics()
        self._logs = {}
        return found

    def evaluate(
        self, totals: Any, slots: Any, data: Any, weights: Any, counts: np.ndarray, size: int, *, shared: bool
    ) -> Any:
        """Add a batch; `totals` are the last batch's logs, and the sums are in the model's own metrics."""
        if not np.asarray(counts)[0]:
            return totals
        if totals is None:
            self._held = [(variable, ops.copy(variable.value)) for variable in self.model.metrics_variables]
            self.model.reset_metrics()
            self._batch = 0
        batch = data if shared else map_tree(lambda leaf: leaf[0], data)
        with self._drawing_to_evaluate():
            return self._called("test", batch)

    def values(self, totals: Any) -> dict[str, np.ndarray]:
        """Return the loss and the metrics `(slot,)` of what `evaluate` added up."""
        found = self._results(totals or {})
        for variable, value in self._held:
            variable.assign(value)
        self._held = []
        return found

    def predict(self, data: Any, *, shared: bool, counts: np.ndarray | None = None) -> Any:
        """Return the outputs `(slot, row, …)` on a batch of inputs, on the host."""
        x = data if shared else map_tree(lambda leaf: leaf[0], data)
        if counts is not None:
            x = map_tree(lambda leaf: leaf[: int(counts[0])], x)
        with self._drawing_to_evaluate():
            found = self._called("predict", (x,))
        return map_tree(lambda leaf: np.asarray(ops.convert_to_numpy(leaf))[None], found)

    def predict_some(self, positions: Positions, data: Any, counts: np.ndarray) -> Any:
        """Return the outputs on the member's rows, as NumPy arrays `(1, row, …)`."""
        return self.predict(data, shared=False, counts=counts)

    def inputs(self, data: Any) -> Any:
        """Return the x of (x,), (x, y) and (x, y, sample_weight), or the batch itself."""
        return batches.weighted_inputs(data)

    def rows(self, outputs: Any, slot: int, count: int) -> Any:
        """Return the member's real rows of a batch of outputs."""
        return map_tree(lambda leaf: leaf[slot, :count], outputs)

    def concatenate(self, parts: Sequence[Any]) -> Any:
        """Return batches of rows as one array, or tree of arrays."""
        return joined(parts)

    # --- which rows count ----------------------------------------------------------------------------------------

    def maskable(self, batch: Any) -> bool:
        """Padded rows are cut off: nothing is known of what a step of one's own does with weights."""
        return False

    def rows_apart(self, inputs: Any) -> bool:
        """Return False: that is not known, and one member needs no padding."""
        return False

    def row_weights(self, counts: np.ndarray, size: int) -> Any:
        """Return `(slot, row)`: 1 for a real row, 0 for padding."""
        return (np.arange(size) < np.asarray(counts)[:, None]).astype(np.float32)

    def cut(self, data: Any, slots: np.ndarray, count: int, *, shared: bool) -> Any:
        """Return the first `count` rows."""
        return map_tree(lambda leaf: leaf[:count] if shared else leaf[:, :count], data)

    # --- state ---------------------------------------------------------------------------------------------------

    def tensor(self, array: np.ndarray) -> Any:
        """Return a host array as it is: what is active is known on the host."""
        return np.asarray(array)

    def trouble(self) -> np.ndarray:
        """Return `(slot,)`: what went wrong, by the codes of `errors.REASONS`."""
        return np.array([self._trouble])

    def steps_taken(self) -> np.ndarray:
        """Return `(slot,)`: the steps that changed the member's weights."""
        return np.array([self._step])

    def clear_trouble(self) -> None:
        """Begin a fit out of trouble, and with metrics at nothing, as `fit` does."""
        self._trouble = FINE
        if self.model.compiled:
            self.model.reset_metrics()

    def narrow(self, positions: np.ndarray) -> None:
        """Do nothing: there is one member."""

    def widen(self) -> None:
        """Do nothing: there is one member."""

    def adopt(self, position: int, other: Engine, source: int) -> None:
        """Take over the number of steps that the member has taken."""
        self._step = _number(other.read([source], ("member",))["member"]["step"])

    def still_shared(self, members: Sequence[Member]) -> bool:
        """Return whether the member is compiled as it was when the lane was made."""
        return all(task_of(member.model) is self.task for member in members)

    def gather(self, members: Sequence[Member]) -> State:
        """Return nothing: the model is the state."""
        return {}

    def scatter(self, positions: Positions, members: Sequence[Member]) -> None:
        """Do nothing: the model is the state."""

    def read(self, positions: Positions, parts: Collection[str] | None = None) -> State:
        """Return a copy of the member's state, `(1, …)`."""
        found: State = {
            part: {key: variable.value[None] * 1 for key, variable in own.items()}
            for part, own in self._variables().items()
            if parts is None or part in parts
        }
        if parts is None or "member" in parts:
            numbers = {"step": self._step, "trouble": self._trouble}
            found["member"] = {
                name: ops.convert_to_tensor(np.array([number], dtype=np.int32)) for name, number in numbers.items()
            }
        return found

    def write(self, positions: Positions, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the member's state by part and name."""
        if state.get("optimizer"):  # there is none before the first step
            built(self.model)
        for part, own in self._variables().items():
            for key, variable in own.items():
                if key not in state.get(part, {}):
                    continue
                value = state[part][key][0]
                if isinstance(value, np.ndarray | np.generic) and str(variable.dtype) == "bfloat16":
                    arrays = import_module(f"modelfleet.frameworks.{BACKEND}.arrays")
                    value = arrays.from_host(np.asarray(value), variable.value)
                variable.assign(value)
        member = state.get("member", {})
        self._step = _number(member["step"]) if "step" in member else self._step
        self._trouble = _number(member["trouble"]) if "trouble" in member else self._trouble

    def stream(self) -> AbstractContextManager[Any]:
        """Return nothing to step within."""
        return nullcontext()

    def out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error that a step raised says that the device is out of memory."""
        return (
            isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error)
        )

    # --- checks and costs ----------------------------------------------------------------------------------------

    def check(self, batch: Any, name: str) -> None:
        """Make the variables of the metrics, as far as the model can be looked at for it."""
        data = batch.data if batch.shared else map_tree(lambda leaf: leaf[0], batch.data)
        with (
            left_unbuilt(self.model),
            suppress(Exception),
        ):  # an eager model may look at numbers; its first step will tell what is wrong
            self.model._symbolic_build(data_batch=_tuple(data))

    def output_shape(self, batch: Any, name: str) -> tuple[int, ...] | None:
        """Return None: what a model of its own ways gives is known when it gives it."""
        return None

    def check_targets(self, output_shape: tuple[int, ...] | None, target: Any, name: str | None) -> None:
        """Do nothing: nothing is known of the outputs."""

    def label_check(self, output_shape: tuple[int, ...] | None) -> Callable[[Any], None] | None:
        """Return None: nothing is known of the outputs."""
        return None

    def working_bytes(self, batch: Any) -> int | None:
        """Return None: it is not known."""
        return None

    # --- helpers -------------------------------------------------------------------------------------------------

    def _called(self, kind: str, batch: Any) -> Any:
        """Call the model's own train, test or predict function on one batch, as `fit` does."""
        model = self.model
        getattr(model, f"make_{kind}_function")()
        function = getattr(model, f"{kind}_function")
        try:
            if BACKEND == "jax":
                return self._with_state(kind, function, _tuple(batch))
            if BACKEND == "tensorflow":
                batch = tree.map_structure(_with_strings, batch)
            if BACKEND == "torch":
                (model.train if kind == "train" else model.eval)()
            with keras.device(str(self.device)) if BACKEND == "torch" else nullcontext():
                return function([_tuple(batch)])
        except Exception as error:  # whatever a model of one's own may raise
            if self.out_of_memory(error):
                raise
            kind, name = type(model).__name__, self._member.name
            raise batch_error(name, kind, _shapes(batch), error, memory=False) from error
        finally:
            if BACKEND == "torch":
                model.eval()

    def _with_state(self, kind: str, function: Any, batch: Any) -> Any:
        # As `train_on_batch` does on JAX, but without its reset of the metrics.
        model = self.model
        parts = {
            "train": (
                "trainable_variables",
                "non_trainable_variables",
                "optimizer_variables",
                "metrics_variables",
            ),
            "test": ("trainable_variables", "non_trainable_variables", "metrics_variables"),
            "predict": ("trainable_variables", "non_trainable_variables"),
        }[kind]
        state = model._get_jax_state(**dict.fromkeys(parts, True))
        model._jax_state_synced = False
        try:
            found, state = function(state, iter([batch]))
            model._jax_state = dict(zip(parts, state, strict=True))
            model.jax_state_sync()
        finally:
            model._jax_state_synced = True
        return found

    def _results(self, logs: Any) -> dict[str, np.ndarray]:
        """Return what Keras's logs would tell: the metrics, or what a step of one's own has given."""
        found = self.model._get_metrics_result_or_logs(logs) if logs else self.model.get_metrics_result()
        numbers = {name: np.asarray(ops.convert_to_numpy(value)) for name, value in dict(found).items()}
        for name, value in numbers.items():
            if value.size != 1:
                raise InputError(
                    f"member {self._member.name!r}: the metric {name!r} gives an array {value.shape}; a history "
                    f"holds single numbers."
                )
        return {name: value.astype(np.float64).reshape(1) for name, value in numbers.items()}

    def _drawing(self, seed: int) -> AbstractContextManager[Any]:
        """On torch, have draws come from the member's own stream; elsewhere they come from the model's seeds."""
        if BACKEND != "torch":
            return nullcontext()
        from modelfleet.frameworks.keras.torch import drawing

        return drawing(seed, self._step)

    def _drawing_to_evaluate(self) -> AbstractContextManager[Any]:
        self._batch += 1
        return self._drawing((self._member.seed + evaluation_offset(self._batch)) % 2**63)

    def _variables(self) -> dict[str, dict[str, Any]]:
        model = self.model
        slots: list[Any] = []
        if model.compiled and model.optimizer is not None and model.optimizer.built:
            slots = model.optimizer.variables
        trained, kept = model.trainable_variables, model.non_trainable_variables
        metrics = model.metrics_variables if model.compiled else []
        return {
            "params": dict(zip(structural_keys(trained), trained, strict=True)),
            "buffers": dict(zip(structural_keys(kept), kept, strict=True)),
            "optimizer": dict(zip(slot_keys(slots, trained), slots, strict=True)),
            "metrics": dict(zip(structural_keys(metrics), metrics, strict=True)),
        }

    def _copied(self, parts: Sequence[str]) -> dict[str, dict[str, Any]]:
        found = self._variables()
        return {part: {key: ops.copy(v.value) for key, v in found[part].items()} for part in parts}

    def _put(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        found = self._variables()
        for part, some in values.items():
            for key, value in some.items():
                found[part][key].assign(value)


def evaluation_offset(batch: int) -> int:
    """What is added to a member's seed, modulo 2**63, for the draws of a batch of an evaluation: each its own."""
    return batch * 0x9E3779B97F4A7C15 % 2**63


def _tuple(batch: Any) -> Any:
    return tuple(batch) if isinstance(batch, list) else batch if isinstance(batch, tuple) else (batch,)


def _with_strings(leaf: Any) -> Any:
    """Return an array of strings as TensorFlow's; any other as it is."""
    strings = isinstance(leaf, np.ndarray) and leaf.dtype.kind == "O"
    return ops.convert_to_tensor(leaf, dtype="string") if strings else leaf


def _number(value: Any) -> int:
    """Return the number in a tensor or array `(1,)`."""
    return int(np.asarray(ops.convert_to_numpy(value))[0])


def _finite(value: Any) -> bool:
    return bool(np.isfinite(ops.convert_to_numpy(value)).all())


def _numpy_dtype(variable: Any) -> str:
    return {"bfloat16": "float16"}.get(str(variable.dtype), str(variable.dtype))


def _shapes(batch: Any) -> str:
    found = [leaf for leaf in tree.flatten(batch) if leaf is not None]
    return ", ".join(f"{tuple(leaf.shape)} {getattr(leaf.dtype, 'name', leaf.dtype)}" for leaf in found)


def become_plain(engine: Any, members: Sequence[Member], reason: str) -> None:
    """Turn the engine of one member into a plain one, where it is."""
    steps = engine.steps_taken()
    plain = PlainEngine(members, engine.task, engine.device, reason)
    plain._step = int(steps[0])
    engine.__class__ = PlainEngine
    engine.__dict__.clear()
    engine.__dict__.update(vars(plain))
