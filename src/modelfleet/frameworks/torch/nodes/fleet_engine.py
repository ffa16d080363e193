"""Engine of a node that is a fleet of torch modules: one stacked program for all members, on the same inputs.

The members' state is that of a fused lane, which also updates it. Forward and backward are recorded by autograd,
so that gradients reach both the stacked parameters and the inputs, where those of all members add up.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from modelfleet.errors import InputError
from modelfleet.frameworks.errors import FINE, GRADIENT, LOSS
from modelfleet.frameworks.held_bytes import HeldBytes
from modelfleet.frameworks.lane_context import LaneContext
from modelfleet.frameworks.node_engine import Draws, LossParts, NodeHyper, NodeTrial, Step, TrialInputs
from modelfleet.frameworks.stacked import Given
from modelfleet.frameworks.torch import arrays
from modelfleet.frameworks.torch.base import explained
from modelfleet.frameworks.torch.fused import state as states
from modelfleet.frameworks.torch.fused.engine import FusedEngine
from modelfleet.frameworks.torch.fused.updating import flat
from modelfleet.frameworks.torch.likeness import signatures
from modelfleet.frameworks.torch.model_locks import locked_in_mode
from modelfleet.frameworks.torch.nodes.fleet_losses import MemberLosses, MemberSums
from modelfleet.frameworks.torch.nodes.fleet_trial import refusing_python_state, try_fleet
from modelfleet.frameworks.torch.nodes.fleet_update import update_members
from modelfleet.frameworks.torch.nodes.reached import Reached
from modelfleet.frameworks.torch.nodes.saved import SavedTensors
from modelfleet.frameworks.torch.nodes.weight_halves import WeightHalf, input_gradients
from modelfleet.frameworks.torch.plain.member import PlainMember
from modelfleet.frameworks.torch.random.streams import BatchRows
from modelfleet.frameworks.torch.structure import difference
from modelfleet.frameworks.torch.task import Task
from modelfleet.members import Member
from modelfleet.trees import leaves, map_tree, rebuild
from modelfleet.types import State, Tree

Tensors = dict[str, Tensor]


@dataclass
class _Kept:
    """What a micro-batch leaves for its backward pass."""

    inputs: Tree
    roots: list[Tensor | None]
    """Leaves of autograd for the inputs whose gradients are wanted, by leaf of the inputs."""
    buffers: Tensors
    """Buffers before it."""
    outputs: Tree = None
    """Outputs `(member, row, …)` with their graph; None until they are recomputed."""
    loss_gradients: list[Tensor | None] = field(default_factory=list)
    weights: WeightHalf | None = None


class TorchFleetNode:
    """Engine of a fleet whose members have one structure.

    Args:
        name: The name of the node.
        members: The members of the fleet.
        tasks: Their tasks.
        columns: Their hyperparameters, `(member,)`.
        device: The device.
        recompute: Keep no activations for the backward pass, and compute them again.
        isolates: True if nothing else depends on the members, so that one may fail by itself.

    Raises:
        InputError: The members can't be stacked.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        tasks: Sequence[Task],
        columns: Mapping[str, np.ndarray],
        device: torch.device,
        *,
        recompute: bool = False,
        isolates: bool = False,
    ) -> None:
        _refuse_unlike(name, members, tasks)
        self.name, self.device = name, device
        self.failed: dict[str, int] = {}
        self._names = [member.name for member in members]
        variants = [0] * len(members)
        self._engine = FusedEngine(LaneContext(members, tasks, variants, columns, device, fused=True))
        self._steps = self._engine.programs.steps
        self._losses = MemberLosses(name, self._names, tasks, device)
        self._first = members[0], tasks[0], {key: column[:1] for key, column in columns.items()}
        self._recompute, self._isolates = recompute, isolates
        self._everybody = torch.ones(len(members), dtype=torch.bool, device=device)
        self._step, self._draws = Step(((0, 0),), train=False), Draws((), 0)
        self._columns: dict[str, np.ndarray] = {}
        self._counted = SavedTensors()
        self._hyper: Tensors = {}
        self._drop()

    def _drop(self) -> None:
        """Forget the step."""
        self._kept: dict[int, _Kept] = {}
        self._outputs: dict[int, Tree] = {}  # detached, for the loss
        self._params: Tensors = {}  # leaves of autograd
        self._buffers: Tensors = {}
        self._counts: Tensor | None = None  # by which the losses of the whole batch are divided
        self._bad_loss = ~self._everybody
        self._live = self._everybody
        self._applied = False
        self._reached = Reached()

    @property
    def trained(self) -> bool:
        """Return True if any parameter takes a gradient."""
        return bool(self._engine.state["params"])

    def count_into(self, held: HeldBytes | None) -> None:
        """Count what is kept from now on for backward passes; None ends it."""
        self._counted.held = held

    # --- steps ---------------------------------------------------------------------------------------------------

    def begin(self, step: Step, hyper: NodeHyper, draws: Draws) -> None:
        """Start a step, or the evaluation of a batch."""
        self._drop()
        self._counted.begin()
        self._step, self._draws, self.failed = step, draws, {}
        state = self._engine.state
        self._params, self._buffers = dict(state["params"]), dict(state["buffers"])
        if step.train:
            self._use({name: np.asarray(column) for name, column in hyper.items()})
            self._params = {name: tensor.detach().requires_grad_() for name, tensor in self._params.items()}
            self._live = state["member"]["trouble"] == FINE

    def _use(self, columns: dict[str, np.ndarray]) -> None:
        """Take the hyperparameters of this step. The same tensors stand for the same numbers."""
        before = self._columns
        same = columns.keys() == before.keys() and all(
            np.array_equal(column, before[name], equal_nan=True) for name, column in columns.items()
        )
        if not same:
            self._columns = columns
            self._hyper = {name: self._engine.tensor(column) for name, column in columns.items()}

    def forward(self, micro: int, inputs: Tree, wanted: Collection[int]) -> Tree:
        """Return the outputs of every member for a micro-batch, detached: {member: outputs}."""
        if not self._step.train:
            with torch.no_grad():
                outputs, _ = self._run(micro, inputs, self._buffers)
        else:
            points = leaves(inputs)
            roots = [
                leaf.detach().requires_grad_() if place in wanted else None for place, leaf in enumerate(points)
            ]
            given = [leaf if root is None else root for leaf, root in zip(points, roots, strict=True)]
            kept = self._kept[micro] = _Kept(rebuild(inputs, given), roots, self._buffers)
            if self._recompute:
                self._counted.add(micro, sum(leaf.nbytes for leaf in points))
            with torch.set_grad_enabled(not self._recompute):
                outputs, buffers = self._run(micro, kept.inputs, self._buffers)
            self._buffers = map_tree(Tensor.detach, buffers)
            kept.outputs = None if self._recompute else outputs
        detached = self._outputs[micro] = map_tree(Tensor.detach, outputs)
        return self._by_member(detached)

    def _run(self, micro: int, inputs: Tree, buffers: Tensors) -> tuple[Tree, Tensors]:
        """Run all members, with their own draws for a micro-batch."""
        part = None
        if self._step.train and len(self._step.rows) > 1:
            start, stop = self._step.rows[micro]
            first, count = (torch.tensor(number, device=self.device) for number in (start, self._step.count))
            part = BatchRows(first, count, stop - start, self._draws.shapes)
        with self._counted.counting(micro, self._params.values()):
            return self._call(inputs, self._params, buffers, train=self._step.train, part=part)

    def _call(
        self, inputs: Tree, params: Tensors, buffers: Tensors, *, train: bool, part: BatchRows | None = None
    ) -> tuple[Tree, Tensors]:
        engine = self._engine
        with (
            explained(self.name, self._steps.model, inputs),
            locked_in_mode(self._steps, train=train),
        ):
            return self._steps.outputs(engine.state, engine.shared, params, buffers, inputs, part)

    def _by_member(self, outputs: Tree) -> dict[str, Tree]:
        return {name: map_tree(lambda leaf, row=row: leaf[row], outputs) for row, name in enumerate(self._names)}

    def count(self, micro: int, target: Tree) -> float:
        """Keep the counts by which the members' losses of the whole batch are divided. Return 1."""
        start, stop = self._step.rows[micro]
        outputs = self._outputs[micro]
        whole = map_tree(
            lambda leaf: leaf.new_zeros(
                len(leaf), leaf.shape[1] // (stop - start) * self._step.count, *leaf.shape[2:]
            ),
            outputs,
        )
        with torch.no_grad():
            self._counts = self._losses.of(whole, target, 1.0).counts
        return 1.0

    def loss(self, micro: int, target: Tree, divisor: float) -> LossParts:
        """Compute the members' losses of a micro-batch, and the gradients of their outputs if the step trains."""
        start, stop = self._step.rows[micro]
        train = self._step.train
        outputs = self._outputs[micro]
        roots = [leaf.detach().requires_grad_(train and leaf.is_floating_point()) for leaf in leaves(outputs)]
        with (
            explained(self.name, self._steps.model, (outputs, target)),
            torch.set_grad_enabled(train),
        ):
            found = self._losses.of(rebuild(outputs, roots), target, (stop - start) / self._step.count)
            if train:
                self._differentiate(found, micro, roots, divisor)
        live = self._live.tolist()
        parts = found.on_host(self._names, live)
        counted = [name for name, bad in zip(self._names, self._bad_loss.tolist(), strict=True) if not bad]
        alone = [parts[name] for name in (counted if self._isolates else parts) if name in parts]
        return LossParts(
            sum(part.total / part.count if part.count else part.total for part in alone), 1.0, {}, parts
        )

    def _differentiate(self, found: MemberSums, micro: int, roots: list[Tensor], divisor: float) -> None:
        assert self._counts is not None
        losses = found.totals / self._counts / divisor
        self._bad_loss = self._bad_loss | (self._live & ~torch.isfinite(losses.detach()))
        # A member that has been set aside has no gradient.
        torch.where(self._live, losses, 0.0).sum().backward()
        self._kept[micro].loss_gradients = [root.grad for root in roots]

    def backward(
        self, micro: int, gradients: Sequence[Tensor | None], *, inputs_only: bool = False
    ) -> list[Tensor]:
        """Add a micro-batch's gradients to the parameters'. Return those of the inputs, sums over the members."""
        kept = self._kept[micro]
        if self._recompute:
            with torch.enable_grad():
                kept.outputs, _ = self._run(micro, kept.inputs, kept.buffers)
        found: list[tuple[Tensor, Tensor]] = []
        points = leaves(kept.outputs)
        for index, output in enumerate(points):
            own = kept.loss_gradients[index] if kept.loss_gradients else None
            other = _stacked(gradients[index :: len(points)], output)
            gradient = own if other is None else other if own is None else own + other
            if gradient is not None and output.requires_grad:
                found.append((output, gradient.to(output.dtype)))
        roots = [root for root in kept.roots if root is not None]
        if inputs_only:
            kept.weights, wanted = input_gradients(found, roots)
            kept.outputs = None
        else:
            if found:
                torch.autograd.backward([output for output, _ in found], [gradient for _, gradient in found])
            wanted = [torch.zeros_like(root) if root.grad is None else root.grad for root in roots]
            del self._kept[micro]
            self._counted.release(micro)
        return wanted

    def backward_weights(self, micro: int) -> None:
        """Add the gradients of the parameters that `backward` has left out."""
        half = self._kept.pop(micro).weights
        assert half is not None
        half.run()
        self._counted.release(micro)

    # --- the update ----------------------------------------------------------------------------------------------

    def gradients(self) -> list[Tensor]:
        """Return the stacked gradients of the step: zeros where this replica's micro-batches did not reach."""
        return self._reached.gradients(self._params.values())

    def norm(self) -> tuple[float, bool]:
        """Return the squared norm of the members' gradients, and whether all are finite.

        A member that may fail by itself is left out.
        """
        exact = states.exact(self.device)
        found = [flat(p.grad).to(exact).square().sum(1) for p in self._params.values() if p.grad is not None]
        squares = torch.stack(found).sum(0) if found else torch.zeros(len(self._names), device=self.device)
        finite = torch.isfinite(squares) & ~self._bad_loss
        table = zip(self._names, self._live.tolist(), finite.tolist(), self._bad_loss.tolist(), strict=True)
        for name, live, good, bad_loss in table:
            if live and not good:
                self.failed[name] = LOSS if bad_loss else GRADIENT
        return float(torch.where(self._live & finite, squares, 0.0).sum()), self._isolates or not self.failed

    def apply(self, scale: float) -> None:
        """Take the step of every member's optimizer."""
        self._reached.drop_unreached()
        gradients = {
            name: p.grad if scale == 1.0 else p.grad * scale
            for name, p in self._params.items()
            if p.grad is not None
        }
        # A fleet that others depend on is only updated if all of its members are fine.
        fine = bool(self._live.all()) and not self.failed
        update_members(
            self._engine, self._hyper, gradients, self._everybody, self._bad_loss, self._buffers, fine=fine
        )
        self._applied = True

    def end(self, *, skipped: bool) -> None:
        """End a step. If it was skipped, everything is as it was before. A frozen fleet counts its steps, too."""
        if self._step.train and not skipped and not self._applied:
            state = self._engine.state
            for name, buffer in self._buffers.items():
                state["buffers"][name].copy_(buffer)
            state["member"]["step"].add_(1)
        self._drop()

    # --- tensors and state ---------------------------------------------------------------------------------------

    def place(self, tree: Tree) -> Tree:
        """Return arrays as tensors on the node's device."""
        return map_tree(lambda leaf: arrays.place(leaf, self.device), tree)

    def read(self, parts: Collection[str] | None = None) -> State:
        """Return a copy of the state `(member, …)` on the host, with parameters in their own layout."""
        found = self._engine.read(range(len(self._names)), parts)
        found.pop("sums", None)
        return map_tree(lambda tensor: arrays.host(tensor.contiguous()), self._turned(found))

    def write(self, state: Given) -> None:
        """Replace the state by part and name, as `read` returned it."""
        own = self._turned(self._engine.state)
        given = {
            part: {
                name: arrays.from_host(value, own[part][name]) if isinstance(value, np.ndarray) else value
                for name, value in tensors.items()
                if name in own.get(part, {})
            }
            for part, tensors in state.items()
        }
        self._engine.write(range(len(self._names)), self._turned(given))

    def _turned(self, state: Mapping[str, Mapping[str, Tensor]]) -> State:
        """Return a state in the layout that fused lanes store it in, or back from it."""
        layout = self._engine.layout
        return {
            part: {name: states.turned(name.rpartition("/")[2], tensor, layout) for name, tensor in own.items()}
            for part, own in state.items()
        }

    def try_out(self, inputs: TrialInputs, wanted: Collection[int], *, train: bool) -> NodeTrial:
        """Return what the fleet does with a few rows, without changing it."""
        state = self._engine.state
        member, task, columns = self._first

        def run(inputs: Tree, params: Tensors) -> Tree:
            return self._by_member(self._call(inputs, params, state["buffers"], train=train)[0])

        with torch.no_grad(), refusing_python_state(self.name, self._steps):
            fewer = run(inputs.fewer, state["params"])

        found = try_fleet(
            PlainMember(member, task, columns, self.device),
            run,
            state["params"],
            inputs,
            wanted,
            members=len(self._names),
            train=train,
        )
        return replace(found, fewer_outputs=fewer)


def _stacked(gradients: Sequence[Tensor | None], output: Tensor) -> Tensor | None:
    """Return the gradients of the members' outputs as one `(member, row, …)`; None if there are none."""
    if all(gradient is None for gradient in gradients):
        return None
    zeros = torch.zeros_like(output[0])
    return torch.stack([zeros if gradient is None else gradient for gradient in gradients])


def _refuse_unlike(node: str, members: Sequence[Member], tasks: Sequence[Task]) -> None:
    """Raise InputError for members that can't be stacked, and for tasks that need more than an output."""
    own = signatures([member.model for member in members])
    for member, other in zip(members, own, strict=True):
        found = difference(other, own[0])
        if found is not None:
            raise InputError(
                f"members {members[0].name!r} and {member.name!r} of the fleet {node!r} differ: {member.name!r} "
                f"{found}. A fleet that is a node is one program, so its members need one structure. Make a node "
                f"of each structure."
            )
    for member, task in zip(members, tasks, strict=True):
        if task.objective is not None or task.precision == "fp16" or task.precision != tasks[0].precision:
            problem = (
                "an objective"
                if task.objective is not None
                else f"precision={task.precision!r} beside {tasks[0].precision!r}"
            )
            raise InputError(
                f"member {member.name!r} of the fleet {node!r} was compiled with {problem}, and a graph gives its "
                f"nodes a loss of outputs. Compile the fleet with a loss, in float32 or bf16 for all members."
            )
