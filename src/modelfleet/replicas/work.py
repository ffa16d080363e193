"""The work of a replica: one model on one device, answering batch after batch."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from modelfleet import frameworks
from modelfleet.devices import parse_devices
from modelfleet.frameworks.protocol import Replica
from modelfleet.replicas.answering import Answering, Reply, portable_error
from modelfleet.replicas.models import Source, Unmade
from modelfleet.workers import SharedValue


@dataclass(frozen=True)
class Order:
    """All that a worker needs to be a replica."""

    framework: str | None
    """None: `model` is a factory, to be called in the worker."""
    model: SharedValue
    device: str
    precision: str
    batch_size: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the owner has set in its frameworks."""
    whole: bool = False
    """Whether a batch goes through the model as it is: not padded, and not cut to find rows that fail."""


@dataclass(frozen=True)
class Load:
    """Asks a worker to have another model ready, beside the one that answers."""

    order: Order


@dataclass(frozen=True)
class Switch:
    """Asks a worker to answer with the model that it was told to load from now on; or to forget that one."""

    forget: bool = False


def serve(order: Order) -> Generator[Reply, Any, None]:
    """Answer batches (trees of NumPy arrays) until None comes; the first reply says that all is ready."""
    with frameworks.using(order.settings):
        yield from _serve(order)


def _serve(order: Order) -> Generator[Reply, Any, None]:
    desk = _Desk(order)
    try:
        # In a list, not in a variable: what was asked must not be kept here until the next question comes.
        asked = [(yield Reply())]
        while asked[0] is not None:
            asked.append((yield desk.reply(asked.pop())))
    finally:
        desk.close()


class _Desk:
    """The model that answers, and one that is to take its place."""

    def __init__(self, order: Order) -> None:
        self._now = _answering(order)
        self._next: Answering | None = None

    def reply(self, asked: Any) -> Reply:
        if isinstance(asked, Load):
            return self._load(asked.order)
        if isinstance(asked, Switch):
            if not asked.forget:
                assert self._next is not None, "a worker was told to switch to a model that it was not given"
                self._now, self._next = self._next, self._now
            self._drop()
            return Reply()
        return self._now.answered(asked)

    def close(self) -> None:
        self._drop()
        self._now.replica.close()

    def _load(self, order: Order) -> Reply:
        self._drop()
        try:
            self._next = _answering(order)
        except Exception as error:  # to load a model may raise anything
            return Reply(error=portable_error(error))
        return Reply()

    def _drop(self) -> None:
        dropped, self._next = self._next, None
        if dropped is not None:
            dropped.replica.close()


def _answering(order: Order) -> Answering:
    return Answering(_replica(order), order.batch_size, order.whole)


def _replica(order: Order) -> Replica:
    """The order's model on its device; a factory is called here."""
    framework = Unmade() if order.framework is None else frameworks.adapter(order.framework)
    source = Source(order.model.get(), framework).made()
    source.check_precision(order.precision)
    device = source.framework.choose(parse_devices(order.device))[0]
    # Nothing else keeps the model: what is not shared need not be here twice.
    return source.framework.Replica(source.value, source.framework.native(device), order.precision)
