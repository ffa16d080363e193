"""Engine of one Keras node on JAX (see `frameworks.node_engine`).

The state is apart from the model: `graph.fitting` writes it back. A backward pass is `jax.vjp` of the
forward pass.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from modelfleet.frameworks.held_bytes import HeldBytes
from modelfleet.frameworks.jax import arrays
from modelfleet.frameworks.keras.nodes.jax.programs import Values, is_float, programs_of
from modelfleet.frameworks.keras.nodes.jax.trial import kept_bytes, try_node
from modelfleet.frameworks.keras.nodes.task import NodeTask
from modelfleet.frameworks.keras.steps import by_key, optimizer_keys
from modelfleet.frameworks.node_engine import Draws, LossParts, NodeHyper, NodeTrial, Step, TrialInputs
from modelfleet.frameworks.stacked import WEIGHTS, Given
from modelfleet.members import Member
from modelfleet.trees import leaves, map_tree
from modelfleet.types import State, Tensor, Tree

SEED = "seed_generator_state"  # what Keras calls the variable of a SeedGenerator


@dataclass
class _Kept:
    """What a micro-batch leaves for its backward pass."""

    inputs: Tree
    wanted: Sequence[int]
    before: Values
    """The kept variables before its forward pass."""
    vjp: Any = None
    """None until it is recomputed."""
    form: Tree = None
    """Shapes of the outputs."""
    loss_gradients: list[jax.Array | None] = field(default_factory=list)
    gradients: Values = field(default_factory=list)
    """Of the outputs, for `backward_weights`."""
    bytes: int = 0
    """What was counted of it."""


class JaxNode:
    """Engine of a Keras model. Its programs are those that the model has from before."""

    def __init__(self, member: Member, task: NodeTask, device: jax.Device, *, recompute: bool = False) -> None:
        self.name = member.name
        self.failed: Mapping[str, int] = {}
        self.device = device
        self._task = task
        self._programs = programs = programs_of(member.model, member.name, device)
        self._optimizer = None if task.make_optimizer is None else task.make_optimizer()
        self._params = self._on_device([variable.value for variable in programs.trained])
        self._kept = self._on_device([variable.value for variable in programs.kept])
        self._slots: Values = []
        self._keys = self._find_keys(member.model.variables)
        if self._optimizer is not None and programs.trained:
            self._optimizer.build(programs.trained)
            self._slots = self._on_device([variable.value for variable in self._optimizer.variables])
            self._keys["optimizer"] = optimizer_keys(self._optimizer.variables, programs.trained)
        self._seeds = [index for index, variable in enumerate(programs.kept) if variable.name == SEED]
        self._recompute = recompute
        self.trained = bool(programs.trained)
        self._steps = 0
        self._step = Step(((0, 0),), train=False)
        self._before = self._kept  # at the start of the step
        self._gradients: list[Tensor] | None = None  # NumPy's arrays after replicas have summed them
        self._passes: dict[int, _Kept] = {}
        self._outputs: dict[int, Tree] = {}
        self._held: HeldBytes | None = None

    def count_into(self, held: HeldBytes | None) -> None:
        """Count what is kept from now on for backward passes; None ends it."""
        self._held = held

    # --- steps ---------------------------------------------------------------------------------------------------

    def begin(self, step: Step, hyper: NodeHyper, draws: Draws) -> None:
        """Start a step, or the evaluation of a batch."""
        self._step, self._before = step, self._kept
        self._gradients = None
        self._passes, self._outputs = {}, {}

    def forward(self, micro: int, inputs: Tree, wanted: Collection[int]) -> Tree:
        """Return the outputs for a micro-batch."""
        if self._step.train:
            kept = _Kept(inputs, sorted(wanted), self._with_first_seeds(self._kept))
            outputs, self._kept, vjp = self._run(micro, kept)
            if not (self.trained or wanted):  # it has no backward pass
                return self._noted(micro, outputs)
            kept.form = map_tree(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), outputs)
            if not self._recompute:
                kept.vjp = vjp
            self._passes[micro] = kept
            self._count(kept, sum(leaf.nbytes for leaf in leaves(inputs)) if self._recompute else self._size(vjp))
        else:
            outputs = self._programs.predict(self._params, self._kept, inputs)
        return self._noted(micro, outputs)

    def _size(self, vjp: Any) -> int:
        return 0 if self._held is None else kept_bytes(vjp, self._params)

    def _count(self, kept: _Kept, change: int) -> None:
        """Tell the rank that more is kept of a micro-batch, or less, if it counts this step."""
        if self._held is not None:
            kept.bytes += change
            self._held.keep(change)

    def _noted(self, micro: int, outputs: Tree) -> Tree:
        """Return outputs when they are there, and keep them if they have a loss."""
        if self._task.loss is not None:
            self._outputs[micro] = outputs
        return jax.block_until_ready(outputs)

    def _run(self, micro: int, kept: _Kept) -> tuple[Tree, Values, Any]:
        start, _ = self._step.rows[micro]
        count = self._step.count
        return self._programs.train(self._params, kept.before, kept.inputs, kept.wanted, start, count)

    def _with_first_seeds(self, kept: Values) -> Values:
        """Return the kept variables with the seeds of the step's start: all its micro-batches share the draws."""
        found = list(kept)
        for index in self._seeds:
            found[index] = self._before[index]
        return found

    def count(self, micro: int, target: Tree) -> float:
        """Return the count by which the loss of the whole batch is divided."""
        assert self._task.loss is not None
        y, weights = (*target, None)[:2]
        return self._task.loss.count_of(self._step.count, y, self._outputs[micro], weights)

    def loss(self, micro: int, target: Tree, divisor: float) -> LossParts:
        """Compute the loss of a micro-batch, and the gradient of its output if the step trains."""
        assert self._task.loss is not None
        loss, (start, stop) = self._task.loss, self._step.rows[micro]
        y, weights = (*target, None)[:2]
        fraction = np.float64((stop - start) / self._step.count)  # float32, unless JAX uses 64 bits
        output = self._outputs.pop(micro)
        loss.check(y, output)
        if micro in self._passes:
            gradient, (total, count, sums) = self._programs.loss(loss)(
                output, y, weights, fraction, np.float64(divisor)
            )
            self._passes[micro].loss_gradients = [gradient]
        else:
            total, count, sums = self._programs.evaluation(loss)(output, y, weights, fraction)
        named = loss.named([np.asarray(value) for value in sums])
        return LossParts(float(total), float(count), {**named, "rows": float(stop - start)})

    def backward(self, micro: int, gradients: Sequence[jax.Array | None], *, inputs_only: bool = False) -> Values:
        """Add a micro-batch's gradients to those of the step, and return those of the wanted inputs."""
        kept = self._passes[micro]
        if kept.vjp is None:
            kept.vjp = self._run(micro, kept)[2]
            self._count(kept, self._size(kept.vjp))
        kept.gradients = self._of_outputs(kept, gradients)
        if inputs_only:
            return jax.block_until_ready(self._programs.backward_inputs(kept.vjp, kept.gradients))
        own, found = self._programs.backward(kept.vjp, kept.gradients)
        del self._passes[micro]
        self._count(kept, -kept.bytes)
        self._add(own)
        return jax.block_until_ready(found)

    def backward_weights(self, micro: int) -> None:
        """Add the gradients of the weights that `backward` has left out."""
        kept = self._passes.pop(micro)
        self._add(jax.block_until_ready(self._programs.backward_params(kept.vjp, kept.gradients)))
        self._count(kept, -kept.bytes)

    def _of_outputs(self, kept: _Kept, gradients: Sequence[jax.Array | None]) -> Values:
        """Return the gradient of every output that can have one: from other nodes, from the loss, or zeros."""
        found = []
        for index, shape in enumerate(leaves(kept.form)):
            if not is_float(shape):
                continue
            given = [own[index] for own in (gradients, kept.loss_gradients) if own and own[index] is not None]
            total = jnp.zeros(shape.shape, shape.dtype)
            for one in given:
                total = total + jnp.asarray(one, shape.dtype)
            found.append(jax.device_put(total, self.device))
        return found

    def _add(self, own: Values) -> None:
        self._gradients = own if self._gradients is None else self._programs.add(self._gradients, own)

    # --- the update ----------------------------------------------------------------------------------------------

    def gradients(self) -> list[np.ndarray]:
        """Return the gradients of the step on the host: zeros if no micro-batch came to this replica."""
        own = self._gradients or [np.zeros(value.shape, value.dtype) for value in self._params]
        found = [np.array(value) for value in own]
        self._gradients = [*found]
        return found

    def norm(self) -> tuple[float, bool]:
        """Return the squared norm of the gradients, and whether all are finite."""
        if not self._gradients:
            return 0.0, True
        squares, finite = self._programs.norm(self._gradients)
        return float(squares), bool(finite)

    def apply(self, scale: float) -> None:
        """Take the optimizer's step."""
        if self._gradients and self._optimizer is not None:
            update = self._programs.update(self._optimizer)
            self._params, self._slots = update(self._params, self._slots, self._gradients, np.float64(scale))

    def end(self, *, skipped: bool) -> None:
        """End a step. If it was skipped, the buffers are as they were before it, and it does not count."""
        if skipped:
            self._kept = self._before
        elif self._step.train:
            self._steps += 1
        self._passes, self._outputs, self._gradients = {}, {}, None

    # --- tensors and state ---------------------------------------------------------------------------------------

    def place(self, tree: Tree) -> Tree:
        """Return arrays, or tensors of any framework, on the node's device."""
        return map_tree(lambda leaf: arrays.place(leaf, self.device), tree)

    def read(self, parts: Collection[str] | None = None) -> State:
        """Return a copy of the state, as arrays on the host `(1, …)`."""
        found: State = {
            part: {key: np.array(arrays.host(value))[None] for key, value in zip(keys, own, strict=True)}
            for part, keys, own in self._by_part()
        }
        found["member"] = {"step": np.array([float(self._steps)])}
        return {part: own for part, own in found.items() if parts is None or part in parts}

    def write(self, state: Given) -> None:
        """Replace the state by part and name."""
        weights = {name: value for part in WEIGHTS for name, value in state.get(part, {}).items()}
        for part, keys, own in self._by_part():
            given = state.get(part, {}) if part == "optimizer" else weights
            for index, key in enumerate(keys):
                if key in given:
                    value = arrays.from_host(np.asarray(given[key])[0], own[index])
                    own[index] = jax.device_put(np.array(value), self.device)
        if "step" in state.get("member", {}):
            self._steps = int(state["member"]["step"][0])

    def _by_part(self) -> list[tuple[str, Sequence[str], Values]]:
        parts = {"params": self._params, "frozen": self._kept, "optimizer": self._slots}
        return [(part, self._keys.get(part, []), own) for part, own in parts.items()]

    def _find_keys(self, variables: Sequence[Any]) -> dict[str, Sequence[str]]:
        """Return the names of weights: by index among all, which stay if a layer is frozen between two fits."""
        names = {id(variable): key for key, variable in by_key(variables).items()}
        programs = self._programs
        return {
            "params": [names[id(variable)] for variable in programs.trained],
            "frozen": [names[id(variable)] for variable in programs.kept],
        }

    def _on_device(self, values: Sequence[jax.Array]) -> Values:
        # Copied: a fit of the model itself donates the arrays of its variables.
        return [jax.device_put(np.array(value), self.device) for value in values]

    def try_out(self, inputs: TrialInputs, wanted: Collection[int], *, train: bool) -> NodeTrial:
        """Return what the node does with a few rows, without changing it."""
        return try_node(self._programs, self._params, self._kept, inputs, sorted(wanted), train=train)
