"""What a Keras member does, as pure functions, for the engines of lanes on JAX and on TensorFlow."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from modelfleet.frameworks import batches
from modelfleet.frameworks.engine import Engine
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.functional import Definition, FunctionalEngine, Programs, State
from modelfleet.frameworks.keras.losses import label_check
from modelfleet.frameworks.keras.plain import become_plain
from modelfleet.frameworks.keras.steps import Steps
from modelfleet.frameworks.keras.task import task_of
from modelfleet.members import Member
from modelfleet.types import Kind

Loss = Callable[[dict[str, Any]], tuple[Any, Any]]


class KerasDefinition(Definition):
    """The steps of the members of one lane (see `functional.Definition`); a backend adds how it differentiates."""

    def __init__(self, model: keras.Model, task: Any) -> None:
        self.steps = Steps(model)
        self.task = task

    def differentiate(self, loss: Loss, params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What `loss` gives beside the number to differentiate, and that number's gradients, by key."""
        raise NotImplementedError

    @property
    def maskable(self) -> bool:  # type: ignore[override]
        """Whether row weights are honoured; known once the metrics are."""
        return self.steps.maskable

    def state(self, member: Member) -> State:
        """A member's weights, seeds and optimizer's variables."""
        own = self.steps.state(member.model)
        return {
            part: {key: np.asarray(ops.convert_to_numpy(value)) for key, value in own[part].items()}
            for part in ("params", "buffers", "optimizer")
        }

    def try_out(self, state: State, batch: Any) -> None:
        """Make the metrics for batches like this one."""
        self.steps.build(batch)

    def fresh_metrics(self) -> dict[str, Any]:
        """A member's metrics before its first batch."""
        return {key: np.asarray(ops.convert_to_numpy(value)) for key, value in self.steps.fresh_metrics().items()}

    def gradients(self, state: State, batch: Any, weights: Any) -> dict[str, Any]:
        """Return what a step makes of a batch before its optimizer does."""

        def loss(params: dict[str, Any]) -> tuple[Any, Any]:
            return self.steps.loss(params, state["buffers"], state["metrics"], state["optimizer"], batch, weights)

        (value, buffers, metrics), found = self.differentiate(loss, state["params"])
        gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
        return {"loss": value, "gradients": gradients, "buffers": buffers, "metrics": metrics}

    def apply(self, state: State, hyper: Any, found: dict[str, Any]) -> tuple[State, Any, Any]:
        """Return the state after an update by the model's own optimizer."""
        gradients, good_loss = found["gradients"], ops.isfinite(found["loss"])
        params, optimizer = self.steps.apply(state["params"], state["optimizer"], gradients)
        # An optimizer that scales the loss passes over gradients that are not finite, and tries a smaller scale.
        scales = self.steps.scales_loss
        good_gradient = ops.full_like(good_loss, True) if scales else _finite(gradients)
        new = {"params": params, "optimizer": optimizer, "buffers": found["buffers"], "metrics": found["metrics"]}
        return new, good_loss, good_gradient

    def evaluate(
        self, state: State, metrics: dict[str, Any], batch: Any, weights: Any
    ) -> tuple[dict[str, Any], State]:
        """The metrics with a batch added, and the seeds and counters that the model has moved on."""
        found, changed = self.steps.evaluate(state["params"], state["buffers"], metrics, batch, weights)
        return found, {"buffers": changed}

    def results(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The loss and the metrics, by the names of Keras's logs."""
        return self.steps.results(metrics)

    def predict(self, state: State, x: Any) -> tuple[Any, State]:
        """The model's outputs, and the seeds and counters that it has moved on."""
        outputs, changed = self.steps.predict(state["params"], state["buffers"], x)
        return outputs, {"buffers": changed}

    def write_back(self, member: Member, state: State) -> None:
        """Put a member's weights, seeds and optimizer's variables into its model."""
        # Copies: JAX may go on reading NumPy's memory in place, and this is the engine's own.
        self.steps.write_back(
            member.model, {part: _copied(state[part]) for part in ("params", "buffers", "optimizer")}
        )

    def inputs(self, data: Any) -> Any:
        """The inputs of a batch: the x of (x,), (x, y) or (x, y, sample_weight), or the batch itself."""
        return batches.weighted_inputs(data)

    def check_targets(self, output_shape: tuple[int, ...], target: Any, name: str | None) -> None:
        """Refuse labels that the model has no output for."""
        check = label_check(self.steps.model, output_shape, "" if name is None else f"member {name!r}: ")
        if check is not None:
            check(target)

    def label_check(self, output_shape: tuple[int, ...]) -> Callable[[Any], None] | None:
        """A function that refuses a batch with such labels."""
        check = label_check(self.steps.model, output_shape)
        if check is None:
            return None
        return lambda batch: check(batch[1]) if isinstance(batch, tuple) and len(batch) > 1 else None


class KerasEngine(FunctionalEngine):
    """A functional engine whose members' models hold the state of their optimizers, too."""

    held = ("params", "buffers", "optimizer")

    def __init__(
        self,
        members: Sequence[Member],
        definition: KerasDefinition,
        backend: Any,
        *,
        fused: bool,
        programs: Programs | None = None,
    ) -> None:
        if programs is not None:
            known: Any = programs.definition
            if known.steps.stale:
                programs.renew(definition)
            else:
                definition = known
        self._members = list(members)
        self._keras = definition
        super().__init__(members, definition, backend, fused=fused, programs=programs)

    def check(self, batch: Any, name: str) -> None:
        """Try one member on two rows; one that is alone, and not to be had as functions, then runs plainly."""
        super().check(batch, name)
        if self._width == 1:
            self._run_plainly()

    def ready(self, kind: Kind, hyper: Any, active: Any, data: Any, *, shared: bool) -> None:
        """Have the program for batches like this one, if Keras would compute the same."""
        super().ready(kind, hyper, active, data, shared=shared)
        if self._width == 1:
            self._run_plainly()
        elif self._keras.steps.apart is not None:
            raise CannotFuseError(self._keras.steps.apart)

    def _run_plainly(self) -> None:
        """Become an engine that calls the model's own functions, if it was found that no others will do.

        It is known only once a batch has been tried, and by then lanes and feeds hold this engine.
        """
        reason = self._keras.steps.apart
        if reason is not None:
            become_plain(self, self._members, reason)

    def adopt(self, position: int, other: Engine, source: int) -> None:
        """Take over the number of steps a member has taken. Its optimizer's state is in its model."""
        self.write([position], {"member": {"step": other.read([source], ("member",))["member"]["step"]}})

    def still_shared(self, members: Sequence[Member]) -> bool:
        """Whether all members are compiled as they were when the lane was made."""
        return not self._keras.steps.stale and all(task_of(member.model) is self.task for member in members)


def _copied(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    return {key: np.array(array) for key, array in arrays.items()}


def _finite(gradients: dict[str, Any]) -> Any:
    return ops.all(ops.stack([ops.all(ops.isfinite(gradient)) for gradient in gradients.values()]))
