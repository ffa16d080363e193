"""Run the Python of one member for all, with some of its calls changed.

While a fused step is traced, the Python of the lane's first member runs. `Replay` knows the calls that it will
make, by their recording, and gives some of them other arguments, or computes them in another way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch.tracing.calls import (
    Arguments,
    CallMode,
    Function,
    custom_functions_seen,
    key_of,
    name_of,
)
from modelfleet.frameworks.torch.tracing.recording import OUTSIDE, Call, Described, Recording

Change = Callable[[Arguments, Call], Any]
"""Takes the arguments of a call and its record, and returns its result."""


class Replay(CallMode):
    """Context in which the calls of a recording are made once more, some of them in another way.

    Args:
        expected: The recording of the same Python.
        changes: For the numbers of some calls, what to do in their place.
    """

    def __init__(self, expected: Recording, changes: Mapping[int, Change]) -> None:
        super().__init__()
        self._calls = expected.calls
        self._changes = changes
        self._next = 0

    def seen(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make one call."""
        number, self._next = self._next, self._next + 1
        call = self._calls[number]
        if call.key != key_of(function):
            raise CannotFuseError(f"it calls {name_of(function)} while it is traced, and {call.name} otherwise")
        arguments = None
        for path, leaf in call.arguments:
            if isinstance(leaf, Described) and leaf.origin.kind == OUTSIDE:
                arguments = arguments or Arguments(function, args, kwargs)
                _refuse_computed(arguments.at(path), call)
        change = self._changes.get(number)
        return function(*args, **kwargs) if change is None else change(Arguments(function, args, kwargs), call)

    def finish(self) -> None:
        """Raise `CannotFuseError` if the Python has made fewer calls than were recorded."""
        if self._next != len(self._calls) - 1:  # the last one is "return"
            raise CannotFuseError(f"it does not call {self._calls[self._next].name} while it is traced")


@contextmanager
def replaying(expected: Recording, changes: Mapping[int, Change]) -> Iterator[None]:
    """Replay a recording in a context. Only one thread may record or replay at a time."""
    replay = Replay(expected, changes)
    with custom_functions_seen(), replay:
        yield
    replay.finish()


def _refuse_computed(tensor: Any, call: Call) -> None:
    """Raise `CannotFuseError` if a tensor was computed by something that no recording shows, such as a script."""
    functorch: Any = torch._C._functorch
    if not isinstance(tensor, Tensor):
        return
    if functorch.is_functorch_wrapped_tensor(tensor) or isinstance(tensor, FakeTensor):
        raise CannotFuseError(f"{call.name} takes a tensor that was computed in a way that can't be compared")
