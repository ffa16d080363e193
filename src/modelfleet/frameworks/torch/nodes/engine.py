"""Engine of one torch node of a graph (see `frameworks.node_engine`): eager autograd on micro-batches."""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from modelfleet.frameworks.held_bytes import HeldBytes
from modelfleet.frameworks.node_engine import Draws, LossParts, NodeHyper, NodeTrial, Step, TrialInputs
from modelfleet.frameworks.stacked import Given
from modelfleet.frameworks.torch import arrays
from modelfleet.frameworks.torch.base import explained
from modelfleet.frameworks.torch.global_modes import KeepingModes
from modelfleet.frameworks.torch.nodes.draws import NodeDraws
from modelfleet.frameworks.torch.nodes.reached import Reached
from modelfleet.frameworks.torch.nodes.saved import SavedTensors
from modelfleet.frameworks.torch.nodes.trial import detached, try_node
from modelfleet.frameworks.torch.nodes.weight_halves import WeightHalf, input_gradients
from modelfleet.frameworks.torch.plain import optimizer as plain_optimizer
from modelfleet.frameworks.torch.plain.contexts import PlainContexts
from modelfleet.frameworks.torch.plain.member import PlainMember, SavedBuffer
from modelfleet.frameworks.torch.random.eager import EagerDraws
from modelfleet.frameworks.torch.task import Task, call, logits
from modelfleet.members import Member
from modelfleet.trees import leaves, map_tree, rebuild
from modelfleet.types import State, Tree

BACKWARD = "the backward pass of "


@dataclass
class _Kept:
    """What a micro-batch leaves for its backward pass."""

    inputs: Tree
    roots: list[Tensor | None]
    """Leaves of autograd for the inputs whose gradients are wanted, by leaf of the inputs."""
    outputs: Tree = None
    """Outputs with their graph; None until they are recomputed."""
    loss_gradients: list[Tensor | None] = field(default_factory=list)
    weights: WeightHalf | None = None


class TorchNode:
    """Engine of a torch module. The member's own module is stepped, or a copy of it on the node's device."""

    def __init__(
        self,
        member: Member,
        task: Task,
        columns: Mapping[str, np.ndarray],
        device: torch.device,
        *,
        recompute: bool = False,
        evaluating: bool = False,
    ) -> None:
        self.name = member.name
        self.task = task
        self.device = device
        self._member = PlainMember(member, task, columns, device)
        self._contexts = PlainContexts(self._member)
        self._draws = NodeDraws(self._member)
        self._reached = Reached()
        self._recompute = recompute
        self._evaluating = evaluating  # True if the module stays in evaluation mode, as a frozen part does
        self._kept: dict[int, _Kept] = {}
        self._outputs: dict[int, Tree] = {}  # detached, for the loss
        self._counted = SavedTensors()
        self._saved: list[SavedBuffer] = []
        self._step = Step(((0, 0),), train=False)
        self.failed: dict[str, int] = {}

    @property
    def model(self) -> torch.nn.Module:
        """Return the module that is stepped."""
        return self._member.model

    @property
    def trained(self) -> bool:
        """Return True if any parameter takes a gradient."""
        return any(parameter.requires_grad for parameter in self._member.params.values())

    def count_into(self, held: HeldBytes | None) -> None:
        """Count what is kept from now on for backward passes; None ends it."""
        self._counted.held = held

    # --- steps ---------------------------------------------------------------------------------------------------

    def begin(self, step: Step, hyper: NodeHyper, draws: Draws) -> None:
        """Start a step, or the evaluation of a batch."""
        self._step = step
        self._kept, self._outputs = {}, {}
        self._counted.begin()
        if step.train:
            if hyper != self._member.hyper:
                self._member.use(
                    {name: torch.tensor([value], dtype=torch.float64) for name, value in hyper.items()}
                )
            self._draws.begin(draws, step)
            self._saved = self._member.save_buffers()
            self._member.drop_gradients()

    def forward(self, micro: int, inputs: Tree, wanted: Collection[int]) -> Tree:
        """Return the outputs for a micro-batch, detached."""
        # Copied: a model may write into its inputs, which other nodes read, too.
        inputs = map_tree(torch.clone, inputs)
        if not self._step.train:
            with explained(self.name, self.model, inputs):
                outputs = self._contexts.evaluate(lambda: call(self.model, inputs))
        elif self._recompute:
            with torch.no_grad():
                outputs = self._run(micro, map_tree(torch.clone, inputs))
            self._keep(micro, inputs, wanted)
            self._counted.add(micro, sum(leaf.nbytes for leaf in leaves(inputs)))
        else:
            kept = self._keep(micro, inputs, wanted)
            kept.outputs = outputs = self._run(micro, kept.inputs)
        found = detached(outputs, self.name)
        self._outputs = {micro: found}  # the loss of a micro-batch follows its forward at once
        return found

    def _keep(self, micro: int, inputs: Tree, wanted: Collection[int]) -> _Kept:
        flat = leaves(inputs)
        roots = [leaf.detach().requires_grad_() if index in wanted else None for index, leaf in enumerate(flat)]
        with torch.enable_grad():  # a model may begin with an operation in place, which no leaf of autograd takes
            given = [leaf if root is None else root.clone() for leaf, root in zip(flat, roots, strict=True)]
        kept = _Kept(rebuild(inputs, given), roots)
        self._kept[micro] = kept
        return kept

    def _run(self, micro: int, inputs: Tree) -> Tree:
        """Run the model in training mode, with its draws for a micro-batch."""
        with (
            explained(self.name, self.model, inputs),
            KeepingModes(self.device.type),
            nullcontext() if self._evaluating else self._contexts.mode(train=True),
            self._draws.of(micro),
            self._contexts.autocast(),
            self._counted.counting(micro, self.model.parameters()),
        ):
            return call(self.model, inputs)

    def count(self, micro: int, target: Tree) -> float:
        """Return the count by which the loss of the whole batch is divided."""
        start, stop = self._step.rows[micro]
        y, weights = (*target, None)[:2]
        whole = map_tree(
            lambda leaf: leaf.new_zeros(len(leaf) // (stop - start) * self._step.count, *leaf.shape[1:]),
            self._outputs[micro],
        )
        with torch.no_grad(), self._contexts.autocast():
            one = torch.ones((), device=self.device)
            return float(self.task.partial_loss_of(logits(whole), y, weights, None, one)[1])

    def loss(self, micro: int, target: Tree, divisor: float) -> LossParts:
        """Compute the loss of a micro-batch, and the gradients of its outputs if the step trains."""
        start, stop = self._step.rows[micro]
        train = self._step.train
        outputs = self._outputs[micro]
        flat = leaves(outputs)
        roots = [leaf.detach().requires_grad_(train and leaf.is_floating_point()) for leaf in flat]
        y, weights = (*target, None)[:2]
        fraction = torch.tensor((stop - start) / self._step.count, device=self.device)
        with (
            explained(self.name, self.model, (outputs, y)),
            KeepingModes(self.device.type),
            torch.set_grad_enabled(train),
            self._draws.of_loss() if train else nullcontext(),
            self._contexts.autocast(),
        ):
            # Copied: a loss may write into the output, which the backward pass and other nodes need.
            output = logits(rebuild(outputs, [root.clone() for root in roots]))
            total, count, sums = self.task.partial_loss_of(output, y, weights, None, fraction)
            if train:
                (total / divisor).backward()
                self._kept[micro].loss_gradients = [root.grad for root in roots]
        return LossParts(float(total.detach()), float(count), {name: float(value) for name, value in sums.items()})

    def backward(
        self, micro: int, gradients: Sequence[Tensor | None], *, inputs_only: bool = False
    ) -> list[Tensor]:
        """Add a micro-batch's gradients to the parameters', and return those of the wanted inputs."""
        kept = self._kept[micro]
        with explained(self.name, self.model, kept.inputs, BACKWARD):
            return self._backward(micro, kept, gradients, inputs_only=inputs_only)

    def _backward(
        self, micro: int, kept: _Kept, gradients: Sequence[Tensor | None], *, inputs_only: bool
    ) -> list[Tensor]:
        if self._recompute:
            self._recompute_outputs(micro, kept)
        outputs = leaves(kept.outputs)
        found: list[tuple[Tensor, Tensor]] = []
        for index, output in enumerate(outputs):
            own = kept.loss_gradients[index] if kept.loss_gradients else None
            other = gradients[index] if gradients else None
            gradient = own if other is None else other if own is None else own + other
            if gradient is not None and output.requires_grad:
                found.append((output, gradient.to(output.dtype)))
        roots = [root for root in kept.roots if root is not None]
        if inputs_only:
            with self._draws.again(micro):
                kept.weights, wanted = input_gradients(found, roots)
            kept.outputs = None
        else:
            if found:
                with self._draws.again(micro):
                    torch.autograd.backward([output for output, _ in found], [gradient for _, gradient in found])
            wanted = [torch.zeros_like(root) if root.grad is None else root.grad for root in roots]
            del self._kept[micro]
            self._counted.release(micro)
        return wanted

    def backward_weights(self, micro: int) -> None:
        """Add the gradients of the parameters that `backward` has left out."""
        kept = self._kept.pop(micro)
        assert kept.weights is not None
        with explained(self.name, self.model, kept.inputs, BACKWARD), self._draws.again(micro):
            kept.weights.run()
        self._counted.release(micro)

    def _recompute_outputs(self, micro: int, kept: _Kept) -> None:
        """Run the model again on a micro-batch. Its buffers have seen the micro-batch already."""
        # Copies stand in for its buffers: autograd does not go back through a buffer that was written to.
        before = self._member.save_buffers()
        for module, name, _, value in before:
            module._buffers[name] = value
        try:
            with torch.enable_grad():
                kept.outputs = self._run(micro, kept.inputs)
        finally:
            for module, name, buffer, _ in before:
                module._buffers[name] = buffer

    # --- the update ----------------------------------------------------------------------------------------------

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the step, with zeros for a parameter that no micro-batch has reached here."""
        return self._reached.gradients(self._member.params.values())

    def norm(self) -> tuple[float, bool]:
        """Return the squared norm of the gradients, and whether all are finite."""
        found = [_numbers(p.grad) for p in self._member.params.values() if p.grad is not None]
        if not found:
            return 0.0, True
        squares = torch.stack([norm.to(torch.float64) for norm in torch._foreach_norm(found)]).square().sum()
        # A sum of squares may overflow where no gradient does. Then every number is checked.
        return float(squares), bool(torch.isfinite(squares)) or plain_optimizer.finite(found)

    def apply(self, scale: float) -> None:
        """Take the optimizer's step."""
        member = self._member
        self._reached.drop_unreached()
        found = [p.grad for p in member.params.values() if p.grad is not None]
        if scale != 1.0 and found:
            torch._foreach_mul_(found, scale)
        plain_optimizer.step(member.optimizer, member.params.values())

    def end(self, *, skipped: bool) -> None:
        """End a step. If it was skipped, the buffers are as they were before it, and it does not count."""
        if skipped:
            self._member.undo(self._saved)
        elif self._step.train:
            self._member.step += 1
        self._member.drop_gradients()
        self._kept, self._outputs, self._saved = {}, {}, []

    # --- tensors and state ---------------------------------------------------------------------------------------

    def place(self, tree: Tree) -> Tree:
        """Return arrays as tensors on the node's device."""
        return map_tree(lambda leaf: arrays.place(leaf, self.device), tree)

    def read(self, parts: Collection[str] | None = None) -> State:
        """Return a copy of the state on the host, with parameters in their own layout."""
        state = self._member.stored(self._member.read(parts))
        return map_tree(lambda tensor: arrays.host(tensor.contiguous()), state)

    def write(self, state: Given) -> None:
        """Replace the state by part and name, as `read` returned it."""
        own = self._member.stored(self._member.state)
        tensors = {
            part: {
                name: arrays.from_host(value, own.get(part, {}).get(name, torch.empty(0, dtype=torch.float64)))
                if isinstance(value, np.ndarray)
                else value
                for name, value in tensors.items()
            }
            for part, tensors in state.items()
        }
        self._member.write(self._member.stored(tensors))

    def loss_adds_up(self, outputs: Tree, target: Tree) -> bool:
        """Return False if the loss of some rows is not the mean of its values on parts of them, by their rows.

        Nor is a loss that draws random numbers: a part would draw others. Only functions of the user's are tried.
        Named losses and torch's modules know how they add up.
        """
        loss, rows = self.task.loss, len(leaves(target)[0])
        if loss is None or loss.rows is not None or loss.parts is not None or len(target) > 1:
            return True
        output, y = logits(outputs), target[0]
        if any(not leaf.dim() or len(leaf) != rows for leaf in (*leaves(output), *leaves(y))):
            return True
        with (
            explained(self.name, self.model, (output, y)),
            KeepingModes(self.device.type),
            torch.no_grad(),
            self._contexts.autocast(),
        ):

            def total(start: int, stop: int) -> float:
                own = [map_tree(lambda leaf: leaf[start:stop].clone(), tree) for tree in (output, y)]
                return float(loss.plain(*own)) * (stop - start)

            with EagerDraws(self._member.seed, self._member.step) as draws:
                whole = total(0, rows)
            if draws.count:
                return False
            cuts = {1, rows // 2} - {0, rows}
            return all(math.isclose(total(0, cut) + total(cut, rows), whole, rel_tol=1e-3) for cut in cuts)

    def try_out(self, inputs: TrialInputs, wanted: Collection[int], *, train: bool) -> NodeTrial:
        """Return what the node does with a few rows, without changing it. `wanted` is as for `forward`."""
        return try_node(self._member, self._contexts, inputs, wanted, train=train, evaluating=self._evaluating)


def _numbers(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient. A sparse one may have a row several times, to be added up."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
