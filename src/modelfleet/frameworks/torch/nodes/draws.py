"""Random draws of a node's micro-batches: those that the undivided model would draw for the same rows."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from modelfleet.frameworks.node_engine import Draws, Step
from modelfleet.frameworks.torch.plain.member import PlainMember
from modelfleet.frameworks.torch.random.detection import DrawDetector
from modelfleet.frameworks.torch.random.eager import EagerDraws, WordCache
from modelfleet.frameworks.torch.random.streams import BatchRows


class NodeDraws:
    """Contexts in which a node's random operations draw from the stream of the whole graph."""

    def __init__(self, member: PlainMember) -> None:
        self._member = member
        self._detector = DrawDetector(member.model, ())
        loss = member.task.loss
        plain = loss.plain if loss is not None and loss.rows is None and loss.parts is None else None
        self._of_loss = DrawDetector(nn.Identity(), (plain,))
        self._words = WordCache()
        self._draws = Draws((), 0)
        self._step = Step(((0, 0),), train=True)
        self._contexts: dict[int, EagerDraws] = {}  # of micro-batches, until their backward pass

    def begin(self, draws: Draws, step: Step) -> None:
        """Start a step."""
        self._draws, self._step = draws, step
        self._contexts = {}

    def of(self, micro: int) -> AbstractContextManager[object]:
        """Return the context for the forward pass of one micro-batch. The next one draws the same numbers."""
        if not self._detector.may_draw():
            return nullcontext()
        member, rows = self._member, None
        if len(self._step.rows) > 1:
            start, stop = self._step.rows[micro]
            first, count = (torch.tensor(number, device=member.device) for number in (start, self._step.count))
            rows = BatchRows(first, count, stop - start, self._draws.shapes)
        context = EagerDraws(member.seed, member.step, self._words, rows=rows, first=self._draws.first)
        self._contexts[micro] = context
        return context

    def again(self, micro: int) -> AbstractContextManager[object]:
        """Return the context for a backward pass that may compute some of the forward pass again.

        `torch.utils.checkpoint` does so, with the state that torch's generator had then.
        """
        context = self._contexts.get(micro)
        return context if context is not None and context.may_repeat else nullcontext()

    def of_loss(self) -> AbstractContextManager[object]:
        """Return the context for the loss of a whole batch, which draws after all nodes.

        In micro-batches, a loss that draws is refused.
        """
        if len(self._step.rows) > 1 or not self._of_loss.may_draw():
            return nullcontext()
        member = self._member
        return EagerDraws(member.seed, member.step, self._words, first=len(self._draws.shapes))
