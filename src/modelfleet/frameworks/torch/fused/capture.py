"""Train steps as captured graphs: a step is one launch on an accelerator that can capture.

Launching an operation takes the host some microseconds, and on a GPU the operations of small models take less than
that. A graph that was captured does all operations of a step again, on the memory that they had then. So the state
stays where it is, and what is new at each step (the rows, the optimizer's numbers, the mask) is copied to tensors
that stay.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from modelfleet.frameworks.torch.devices import in_order, new_stream
from modelfleet.frameworks.torch.tracing.trace import Program

WARM_UP = 3  # steps that are taken before one is captured: in them, libraries prepare what a graph can't
STEPS_LEFT = 50  # fewer are not worth it: to capture a step takes as long as a few steps
MAX_GRAPHS = 4  # of a lane, for batches of different sizes: each graph keeps the memory that a step needs
MODE: Literal["thread_local"] = "thread_local"  # other threads may allocate and copy meanwhile
_LOCK = threading.Lock()  # torch captures in one thread at a time


class Graph(Protocol):
    """A captured graph: `torch.cuda.CUDAGraph`, or `torch.accelerator.Graph` for other kinds of devices."""

    def capture_end(self) -> None:
        """End the capture."""
        ...

    def replay(self) -> None:
        """Do what was captured again, on the current stream."""
        ...


class Capture:
    """Takes the train steps of a lane, and replays them as soon as they are captured.

    Attributes:
        failure: Why the steps can't be captured; None if they could be, or if this has not been tried.
        graphs: The number of graphs that were captured; tests check that it stays small.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self.graphs = 0
        self._state: Sequence[Tensor] = ()  # the graphs are for these tensors
        self._known: dict[Program, _Captured] = {}
        self._taken: Counter[Program] = Counter()  # steps without a graph

    def run(
        self, program: Program, state: Sequence[Tensor], given: Sequence[Tensor], steps_left: int
    ) -> Sequence[Tensor]:
        """Take a step, and return its flat results. The next step may overwrite them.

        Args:
            program: The program of the step.
            state: The inputs that are the same tensors at every step.
            given: The inputs after these.
            steps_left: The number of steps until the end of the fit.
        """
        if program.graph is not None and self.failure is None:
            captured = self._find(program, state, given, steps_left)
            if captured is not None:
                return captured.replay(given)
        return program.run(*state, *given, *program.outside)

    def forget(self) -> None:
        """Drop all graphs, with the memory that they keep."""
        self._state = ()
        self._known.clear()
        self._taken.clear()

    def _find(
        self, program: Program, state: Sequence[Tensor], given: Sequence[Tensor], steps_left: int
    ) -> "_Captured | None":
        if state is not self._state:
            if len(state) != len(self._state) or any(a is not b for a, b in zip(state, self._state, strict=True)):
                self.forget()
            self._state = state
        known = self._known.get(program)
        if known is not None and known.fits(program, state):
            return known
        if known is not None:  # the program was compiled, or its seeds were changed
            del self._known[program], self._taken[program]
        self._taken[program] += 1
        if self._taken[program] <= WARM_UP or steps_left < STEPS_LEFT or len(self._known) >= MAX_GRAPHS:
            return None
        try:
            self._known[program] = _Captured(program, state, given)
        except Exception as error:  # a kernel that waits for the device, no memory, …: no result depends on it
            self.failure = f"{type(error).__name__}: {error}".strip().partition("\n")[0].rstrip(".")
            self.forget()
            return None
        self.graphs += 1
        return self._known[program]


def capture_on(device: torch.device) -> Capture | None:
    """Return what captures the steps of a lane on a device; None if its kind can't capture."""
    if device.type == "cpu":
        return None
    try:
        _new_graph(device)
    except (AttributeError, RuntimeError):  # an older torch, or a device without graphs
        return None
    return Capture()


class _Captured:
    """A captured step, and the tensors that it reads and writes.

    Nothing is computed while a step is captured.
    """

    def __init__(self, program: Program, state: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        device = state[0].device
        self._own = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in given]
        inputs = (*state, *self._own)
        self._run, self._steady = program.run, program.steady
        self._versions = [state[index]._version for index in self._steady]
        self._written = [inputs[index] for index in program.written]
        # Numbers of members, such as the mask, are often the same tensors again. Rows are not held on to.
        self._few = [index for index, tensor in enumerate(given) if tensor.dim() < 2]
        self._last: dict[int, tuple[Tensor, int]] = {}
        self._step = program.bound((*inputs, *program.outside))  # it holds on to all that the graph uses
        self._copy(given)  # what is captured must be valid: labels, for one
        self._graph, begin = _new_graph(device)
        stream = new_stream(device)
        assert stream is not None
        with _LOCK, torch.accelerator.device_index(device.index):
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()  # a graph has memory of its own
            with in_order(stream), torch.no_grad():
                self._results = _record(self._graph, begin, self._step)

    def fits(self, program: Program, state: Sequence[Tensor]) -> bool:
        """Return True if the graph does what the program would do."""
        return program.run is self._run and self._versions == [state[index]._version for index in self._steady]

    def replay(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """Take a step with these inputs."""
        self._copy(given)
        self._graph.replay()
        if self._written:  # whoever asks if the weights have changed asks torch, which has not seen this
            torch.autograd.graph.increment_version(self._written)
        return self._results

    def _copy(self, given: Sequence[Tensor]) -> None:
        same = set()
        for index in self._few:
            now = given[index], given[index]._version
            before = self._last.get(index)
            if before is not None and before[0] is now[0] and before[1] == now[1]:
                same.add(index)
            self._last[index] = now
        pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for index, (own, new) in enumerate(zip(self._own, given, strict=True)):
            if index not in same:
                to, source = pairs.setdefault(own.dtype, ([], []))
                to.append(own)
                source.append(new)
        for to, source in pairs.values():
            torch._foreach_copy_(to, source)  # one launch, for tensors of one dtype


def _new_graph(device: torch.device) -> tuple[Graph, Callable[[], None]]:
    """Return a graph, and what begins to capture it on the current stream."""
    if device.type == "cuda":  # torch.accelerator.Graph does not have it in torch 2.13
        graph = torch.cuda.CUDAGraph()
        return graph, partial(graph.capture_begin, capture_error_mode=MODE)
    other = torch.accelerator.Graph(capture_error_mode=MODE)
    return other, other.capture_begin


def _record(graph: Graph, begin: Callable[[], None], step: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Capture a step on the current stream, and return its results."""
    begin()
    try:
        results = step()
    except BaseException:
        with suppress(RuntimeError):  # torch refuses to end what has failed
            graph.capture_end()
        raise
    graph.capture_end()
    return results
