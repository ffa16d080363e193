"""Locks on models.

While a model's Python runs for a member, that member's weights are in the model. All lanes of a group run the same
model, so only one of them may run it at a time.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from weakref import WeakKeyDictionary

from torch import nn

from modelfleet.frameworks.torch.fused.steps_protocol import LaneSteps
from modelfleet.frameworks.torch.modes import in_mode

_LOCKS: WeakKeyDictionary[nn.Module, AbstractContextManager[object]] = WeakKeyDictionary()
_ADDING = threading.Lock()


def lock_of(model: nn.Module) -> AbstractContextManager[object]:
    """Return the lock of a model."""
    with _ADDING:
        return _LOCKS.setdefault(model, threading.RLock())


@contextmanager
def locked_in_mode(steps: LaneSteps, *, train: bool) -> Iterator[None]:
    """Lock a model, in training or evaluation mode, to run its Python with some member's weights."""
    with lock_of(steps.model), in_mode(steps.model, train=train, given=steps.modes):
        yield
