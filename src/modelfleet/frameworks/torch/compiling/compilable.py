"""How much of a program's time a compiler can work on.

It merges small operations into few loops. Products of matrices, convolutions and the loops of C that draw are
calls of libraries, before and after. So what compiling saves depends on how much of a step is spent elsewhere.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, Target

from modelfleet.frameworks.torch.random.threefry import NOISE, WORDS

aten = torch.ops.aten

_CALLS = {
    aten.addmm.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.mm.default,
    aten.mv.default,
    NOISE,
    WORDS,
}


def compilable_seconds(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> float:
    """Return how long the operations of a graph take that a compiler can merge. The graph must write to no input.

    It runs once, operation by operation.
    """
    timed = _Timed(graph)
    with torch.no_grad():
        timed.run(*inputs)
    return timed.seconds


class _Timed(fx.Interpreter):
    """Runs a graph, and adds up the time of the operations that a compiler can merge."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.seconds = 0.0

    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        begun = time.perf_counter()
        found = super().call_function(target, args, kwargs)
        if target not in _CALLS:
            self.seconds += time.perf_counter() - begun
        return found
