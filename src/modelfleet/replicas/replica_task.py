"""Task of a replica's worker: one model on one device, answering batch after batch."""

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from modelfleet import frameworks
from modelfleet.devices import parse_devices
from modelfleet.frameworks.contexts import using_settings
from modelfleet.replicas.answering import Answerer, Reply, portable_error
from modelfleet.replicas.models import Source, UnknownFramework
from modelfleet.types import Precision, Tree
from modelfleet.workers import SharedValue


@dataclass(frozen=True)
class ReplicaSpec:
    """Everything that a worker needs to be a replica."""

    framework: str | None
    """Name of the model's framework. None: `model` is a factory, to be called in the worker."""
    model: SharedValue
    device: str
    precision: Precision
    batch_size: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the owner's frameworks; see `frameworks.contexts.current_settings`."""
    whole: bool = False
    """True if a batch goes through the model as it is: not padded, and not cut to find rows that fail."""


@dataclass(frozen=True)
class Load:
    """Asks a worker to load another model, beside the one that answers."""

    spec: ReplicaSpec


@dataclass(frozen=True)
class Switch:
    """Asks a worker to answer with the model that it has loaded; or to forget that model."""

    forget: bool = False


Question = Tree | Load | Switch | None
"""Batch of rows, change of models, or None for the end."""


def serve(spec: ReplicaSpec) -> Generator[Reply, Question, None]:
    """Answer batches (trees of NumPy arrays) until None comes. The first reply says that the model is loaded."""
    with using_settings(spec.settings), closing(_Models(spec)) as models:
        # In a list, not in a variable: a question must not be kept here until the next one comes.
        questions = [(yield Reply())]
        while questions[0] is not None:
            questions.append((yield models.reply(questions.pop())))


class _Models:
    """Model that answers, and one that is to replace it."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._current = _answerer(spec)
        self._spare: Answerer | None = None

    def reply(self, question: Question) -> Reply:
        if isinstance(question, Load):
            return self._load(question.spec)
        if isinstance(question, Switch):
            if not question.forget:
                assert self._spare is not None, "a worker was asked to switch to a model that it has not loaded"
                self._current, self._spare = self._spare, self._current
            self._drop_spare()
            return Reply()
        return self._current.answer(question)

    def close(self) -> None:
        self._drop_spare()
        self._current.replica.close()

    def _load(self, spec: ReplicaSpec) -> Reply:
        self._drop_spare()
        try:
            self._spare = _answerer(spec)
        except Exception as error:  # loading a model may raise anything
            return Reply(error=portable_error(error))
        return Reply()

    def _drop_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.replica.close()


def _answerer(spec: ReplicaSpec) -> Answerer:
    """Put the model on its device; a factory is called here."""
    framework = UnknownFramework() if spec.framework is None else frameworks.adapter(spec.framework)
    source = Source(spec.model.get(), framework).made()
    source.check_precision(spec.precision)
    device = source.framework.choose(parse_devices(spec.device))[0]
    # Nothing else refers to the model, so memory that is not shared is not held twice.
    replica = source.framework.Replica(source.value, source.framework.native(device), spec.precision)
    return Answerer(replica, spec.batch_size, whole=spec.whole)
