"""Compiled programs: made beside the training, and only where they win back what they cost.

Training starts on the traced graph at once. When enough work remains, the graph goes as text to a second process,
which compiles it into torch's own cache on disk; this process then loads it from there in about a second. A second
run of the same structure finds it in the cache right away. `compile_queue.py` has one such process at a time.

`MODELFLEET_COMPILE` says otherwise: `now` compiles before the first step, `never` does not compile.
"""

import hashlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from modelfleet.errors import FleetError, unknown
from modelfleet.frameworks.torch.compiling.any_width import FixedWidthError, merge_widths
from modelfleet.frameworks.torch.compiling.compile_queue import QUEUE, CompileProcess
from modelfleet.frameworks.torch.compiling.graph_source import ANY_WIDTH, ONE_WIDTH, GraphSource, describe
from modelfleet.frameworks.torch.diagnosis import cache_folder
from modelfleet.frameworks.torch.tracing.trace import TRACE_LOCK, Program, TensorSpec

MODES = ("auto", "now", "never")
LOOK = 0.1  # seconds between two looks at a process that compiles, or at the queue for one

logger = logging.getLogger("modelfleet")

# What compiling costs and gives, as measured on two cores; only the decision hangs on it, never a result.
SECONDS_PER_NODE = 0.05
SECONDS_AT_LEAST = 10.0
SECONDS_TO_LOAD = 2.0
SAVED_FRACTION = 0.5  # the part of a step's time that compiling usually saves
MOST_NODES = 6000  # beyond this, compiling takes minutes


def compile_mode() -> str:
    """What `MODELFLEET_COMPILE` asks for."""
    asked = os.environ.get("MODELFLEET_COMPILE", "auto")
    if asked not in MODES:
        raise unknown("MODELFLEET_COMPILE", asked, MODES)
    return asked


class Compiler:
    """Decides for one program whether to compile it, and does so beside the training.

    at_width: traces the same step at another width, so that what is compiled serves any width; None: only its own.
    """

    def __init__(self, program: Program, at_width: Callable[[int], Program] | None = None) -> None:
        self._program = program
        self._at_width = at_width if program.width > 1 else None
        self._process: CompileProcess | None = None
        self._known: Path | None = None
        self._next_look = 0.0
        self._done = program.graph is None or len(program.graph.graph.nodes) > MOST_NODES

    @property
    def busy(self) -> bool:
        """Whether the program is being compiled now."""
        return self._process is not None

    def consider(self, steps_left: int, seconds_per_step: float | None) -> None:
        """Start compiling if the steps that are left will win it back; take over what is ready."""
        if not self._done and time.monotonic() >= self._next_look:
            with TRACE_LOCK:
                self._consider(steps_left, seconds_per_step)

    def _consider(self, steps_left: int, seconds_per_step: float | None) -> None:
        if self._done:  # by another thread, meanwhile
            return
        if self._process is not None:
            self._finish(self._process)
            return
        wanted = compile_mode()
        if wanted == "never":
            self._done = True
        elif wanted == "now":
            self._load(self._forms())
        elif seconds_per_step is not None:
            self._weigh(steps_left, seconds_per_step)

    def stop(self) -> None:
        """End what compiles it, if there is something."""
        QUEUE.withdraw(self)
        if self._process is not None:
            self._process.stop()
            self._process = None
        self._next_look = 0.0

    def _weigh(self, steps_left: int, seconds_per_step: float) -> None:
        saving = steps_left * seconds_per_step * SAVED_FRACTION
        graph = self._program.graph
        assert graph is not None
        cost = max(SECONDS_AT_LEAST, SECONDS_PER_NODE * len(graph.graph.nodes))
        if saving >= SECONDS_TO_LOAD and self._marker().exists():
            QUEUE.withdraw(self)
            form = self._marker().read_text()
            self._load([source for source in self._forms() if source.form == form] or self._forms())
        elif saving > cost:
            try:
                self._process = QUEUE.ask(self, saving - cost, seconds_per_step, self._forms)
            except Exception as error:  # no room for its folder, say
                self._done = True
                _tell(f"{type(error).__name__}: {error}")
            self._next_look = time.monotonic() + LOOK
        else:
            QUEUE.withdraw(self)

    def _marker(self) -> Path:
        if self._known is None:  # the same for as long as the program is: its text is long
            self._known = _marker(self._program)
        return self._known

    def _forms(self) -> list[GraphSource]:
        """What to compile, the best first: for any width if that can be had, and for this width alone."""
        graph = self._program.graph
        assert graph is not None
        forms = [GraphSource.of(graph, self._program.inputs, ONE_WIDTH)]
        if self._at_width is not None:
            width = 3 if self._program.width != 3 else 2
            try:
                twin = self._at_width(width).graph
                assert twin is not None
                merged = merge_widths(graph, self._program.width, twin, width)
                forms.insert(0, GraphSource.of(merged, self._program.inputs, ANY_WIDTH))
            except (FixedWidthError, FleetError):
                pass  # for its own width, then
        return forms

    def _finish(self, process: CompileProcess) -> None:
        outcome = process.outcome
        self._next_look = time.monotonic() + LOOK
        if outcome is None:
            return
        self._process = None
        ready = [source for source in process.forms if source.form == outcome.form]
        if ready:
            self._load(ready)
        else:  # the traced graph goes on: compiling is never needed for a result
            self._done = True
            _tell(outcome.reason)

    def _load(self, forms: Sequence[GraphSource]) -> None:
        self._done = True
        try:
            self._program.run, form = compile_first(forms)
        except (
            Exception
        ) as error:  # no C++ compiler, say: the traced graph goes on, unless compiling was insisted on
            if compile_mode() == "now":
                raise
            _tell(f"{type(error).__name__}: {error}")
            return
        self._program.compiled = True
        self._program.any_width = form == ANY_WIDTH
        mark = self._marker()
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(form)


_told: list[str] = []  # why steps could not be compiled


def _tell(reason: str) -> None:
    """Say that compiling failed: loudly the first time, whatever the number of lanes."""
    logger.log(
        logging.DEBUG if _told else logging.WARNING,
        "a step could not be compiled: %s. Its members train on at the speed of before. To have it compiled, "
        "see to this; with MODELFLEET_COMPILE=never it is not tried.",
        reason.strip().rstrip("."),
    )
    _told.append(reason)


def compile_first(forms: Sequence[GraphSource]) -> tuple[Any, str]:
    """Compile the first of the forms that can be, or load it from torch's cache; gives it and which it was.

    Both processes come through here, so that both ask the cache for the very same graph.
    """
    for source in forms[:-1]:
        try:
            return _compile(source), source.form
        except FixedWidthError:
            pass
    return _compile(forms[-1]), forms[-1].form


def _compile(source: GraphSource) -> Any:
    # Imported here, as what follows: they take half a second, which most processes can do without.
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 warns of its own use of torch.jit when this is imported
        from torch._inductor.compile_fx import compile_fx

    forward = source.function()
    general = source.form == ANY_WIDTH
    shapes = ShapeEnv()
    with torch.no_grad():
        fakes = FakeTensorMode(shape_env=shapes if general else None, allow_non_fake_inputs=True)
        width = _unknown_width(fakes, source.inputs[0].shape[0]) if general else None
        with fakes:
            inputs = [spec.empty(width) for spec in source.inputs]
        graph = make_fx(forward, tracing_mode="symbolic" if general else "real")(*inputs)
        compiled = compile_fx(graph, inputs)
    if general and (shapes.replacements or shapes.guards):
        raise FixedWidthError("an operation of it asks for the width")
    if general:
        _try_widths(compiled, source.inputs)
    return compiled


def _try_widths(compiled: Any, inputs: Sequence[TensorSpec]) -> None:
    # What comes from torch's cache has no note of a width that an operation (a convolution, say) has built in.
    for width in (2, 3):
        try:
            with torch.no_grad():
                compiled(*(spec.empty(width).zero_() for spec in inputs))
        except Exception as error:  # the compiled code checks its inputs' sizes
            raise FixedWidthError("a width is built in") from error


def _unknown_width(fakes: FakeTensorMode, hint: int) -> Any:
    """A width that a compiler must leave open; `hint` tells it what to expect."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    axis = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    return fakes.from_tensor(torch.empty(hint), symbolic_context=axis).shape[0]


def _marker(program: Program) -> Path:
    """A file that is there if this very program has been compiled here before; it says in which form."""
    assert program.graph is not None
    source = GraphSource.of(program.graph, program.inputs, ONE_WIDTH)
    text = f"{torch.__version__} {source.text} {[describe(spec) for spec in program.inputs]}"
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    return cache_folder() / "modelfleet" / name  # beside what torch keeps there: they come and go together
