"""Snapshot of everything that a model's Python can read besides its arguments.

A fused program is the trace of a model's Python at one moment. `PythonSnapshot` remembers what that Python could
read then: attributes of modules, closure cells, default values, globals and class attributes. It detects changes,
gives a key to look up programs by, and can put everything back.
"""

from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn

from modelfleet.frameworks.torch.python_state.checks import StatefulError
from modelfleet.frameworks.torch.python_state.reachable import Reachable

# Names that change whenever a model runs with weights that are not its own: its mode, and notes of recurrent
# layers. The last is a note that Hugging Face's heads take at their first loss. It depends on the dtype of the
# labels only, so it is the same at every step.
_HARMLESS = (".training", "._flat_weights", "._flat_weight_refs", ".config.problem_type")


class PythonSnapshot:
    """Python values that some models and functions can read, as they are now.

    Args:
        roots: Models and functions with their names, such as `("self", model)` and `("the objective", objective)`.
    """

    def __init__(self, roots: Sequence[tuple[str, Any]]) -> None:
        reachable = Reachable(roots)
        self.watched = reachable.watched
        self.tensors = reachable.tensors
        self.parameters = reachable.parameters
        self._refusal = reachable.refusal
        self._cheap = [watched for watched in self.watched if watched.cheap]
        self._flags = _flags(self.parameters)

    def refuse(self) -> None:
        """Raise `StatefulError` if there is state that can't be watched."""
        if self._refusal is not None:
            raise StatefulError(self._refusal)

    def same(self, *, thoroughly: bool) -> bool:
        """Return True if nothing has changed. Large arrays are compared only if `thoroughly`."""
        watched = self.watched if thoroughly else self._cheap
        return all(value.same() for value in watched) and self._flags == _flags(self.parameters)

    def changed(self) -> list[str]:
        """Return the names of what has changed."""
        names = (name for watched in self.watched for name in watched.changed())
        return [name for name in names if not name.endswith(_HARMLESS)]

    def restore(self) -> None:
        """Undo every change since the snapshot."""
        for watched in self.watched:
            if watched.moved():
                watched.restore()

    @property
    def key(self) -> Hashable:
        """Return a value that is equal for two snapshots if the same was there to read."""
        return tuple(watched.token for watched in self.watched), self._flags

    @property
    def key_without_floats(self) -> Hashable:
        """Return a key that is equal for two snapshots if the same was there to read, but for floats."""
        return _without_floats(self.key)


def _without_floats(key: Any) -> Hashable:
    if not isinstance(key, tuple):
        return key
    return (float,) if len(key) == 2 and key[0] is float else tuple(map(_without_floats, key))


def _flags(parameters: Sequence[nn.Parameter]) -> tuple[Hashable, ...]:
    """Return what can change in a parameter that stays the same object: whether it is trained, and has hooks."""
    return tuple(
        (p.requires_grad, bool(p._backward_hooks), bool(getattr(p, "_post_accumulate_grad_hooks", None)))
        for p in parameters
    )
