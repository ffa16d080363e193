"""Random draws of a node's micro-batches: those that the undivided model would draw for the same rows."""

from contextlib import AbstractContextManager, nullcontext

import torch

from modelfleet.frameworks.node_engine import Draws, Step
from modelfleet.frameworks.torch.plain.member import PlainMember
from modelfleet.frameworks.torch.random.detection import DrawDetector
from modelfleet.frameworks.torch.random.operations import DrawFromStreams
from modelfleet.frameworks.torch.random.streams import BatchRows, Streams


class NodeDraws:
    """Contexts in which a node's random operations draw from the stream of the whole graph."""

    def __init__(self, member: PlainMember) -> None:
        self._member = member
        self._detector = DrawDetector(member.model, ())
        self._draws = Draws((), 0)
        self._step = Step(((0, 0),), train=True)

    def begin(self, draws: Draws, step: Step) -> None:
        """Start a step."""
        self._draws, self._step = draws, step

    def of(self, micro: int) -> AbstractContextManager[object]:
        """Return the context for one micro-batch. Entered again, it draws the same numbers."""
        if not self._detector.may_draw():
            return nullcontext()
        member = self._member
        seed, step = (torch.tensor(number, device=member.device) for number in (member.seed, member.step))
        part = None
        if len(self._step.rows) > 1:
            start, stop = self._step.rows[micro]
            first, count = (torch.tensor(number, device=member.device) for number in (start, self._step.count))
            part = BatchRows(first, count, stop - start, self._draws.shapes)
        return DrawFromStreams(Streams(seed, step, part, first=self._draws.first))
