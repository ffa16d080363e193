"""Contexts in which a plain member's model runs: its mode, its precision, and its random draws."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from modelfleet.frameworks.torch.global_modes import KeepingModes
from modelfleet.frameworks.torch.modes import in_mode, training_modes
from modelfleet.frameworks.torch.plain.member import PlainMember
from modelfleet.frameworks.torch.random.detection import DrawDetector
from modelfleet.frameworks.torch.random.eager import DrawRecord, DrawsIfNeeded, EagerDraws, WordCache
from modelfleet.frameworks.torch.task import PRECISIONS
from modelfleet.types import Kind

Result = TypeVar("Result")


class PlainContexts:
    """Contexts for the train steps and the evaluations of one plain member."""

    def __init__(self, member: PlainMember) -> None:
        self._member = member
        self._modes = training_modes(member.model)
        self._words = WordCache()
        self._detector: DrawDetector | None = None  # made at the first step
        self._records: dict[Kind, DrawRecord] = {}  # whether a verb has drawn random numbers after all
        self._needs_grad = False  # True if evaluating takes gradients, as with a gradient penalty

    def reset(self) -> None:
        """Look again, before the next step, whether the model draws random numbers."""
        self._detector, self._records = None, {}

    def mode(self, *, train: bool) -> AbstractContextManager[None]:
        """Return the context in which the model is in training or evaluation mode."""
        # A model in training mode is trained as it is, and nothing has to be restored.
        if train and self._member.model.training:
            return nullcontext()
        return in_mode(self._member.model, train=train, given=self._modes)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of the task's precision."""
        dtype = PRECISIONS[self._member.task.precision]
        if dtype is None:
            return nullcontext()
        # Without its cache: within another autocast torch would keep the cast weights of an earlier step.
        return torch.autocast(self._member.device.type, dtype=dtype, cache_enabled=False)

    def draws(self, kind: Kind) -> AbstractContextManager[object]:
        """Return the context in which random operations draw from the member's stream, if the model draws any."""
        member, task = self._member, self._member.task
        if self._detector is None:
            loss = None if task.loss is None else task.loss.plain
            self._detector = DrawDetector(member.model, (task.objective, loss))
        if self._detector.may_draw():
            return EagerDraws(member.seed, member.step, self._words)
        record = self._records.setdefault(kind, DrawRecord())
        return DrawsIfNeeded(record, member.seed, member.step, self._words, member.device)

    def evaluate(self, run: Callable[[], Result]) -> Result:
        """Call a function with the model in evaluation mode, with gradients only if the function needs them."""
        kept = KeepingModes(self._member.device.type)
        with kept, self.mode(train=False), self.draws("evaluate"), self.autocast():
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
