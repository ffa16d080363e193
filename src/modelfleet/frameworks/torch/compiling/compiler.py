"""Compile programs while training continues, if that saves more time than it costs (`decision.py`).

Training starts on the traced graph at once. When enough work remains, the graph goes as text to a second process,
which compiles it into torch's own cache on disk; this process then loads it from there in about a second. A second
run of the same structure finds it in the cache right away. `compile_queue.py` has one such process at a time.
"""

import hashlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from modelfleet.errors import FleetError
from modelfleet.frameworks.torch.compiling import settings
from modelfleet.frameworks.torch.compiling.any_width import FixedWidthError, merge_widths
from modelfleet.frameworks.torch.compiling.compile_queue import QUEUE, CompileProcess
from modelfleet.frameworks.torch.compiling.decision import (
    COMPILABLE,
    compile_mode,
    loading_pays,
    seconds_saved,
    seconds_won,
    too_large,
)
from modelfleet.frameworks.torch.compiling.experience import learn
from modelfleet.frameworks.torch.compiling.graph_source import ANY_WIDTH, ONE_WIDTH, Form, GraphSource, describe
from modelfleet.frameworks.torch.compiling.one_library import one_library
from modelfleet.frameworks.torch.compiling.vectors import knows_vectors
from modelfleet.frameworks.torch.devices import hardware
from modelfleet.frameworks.torch.doctor_facts import cache_folder
from modelfleet.frameworks.torch.tracing.scans import DECOMPOSITIONS
from modelfleet.frameworks.torch.tracing.trace import TRACE_LOCK, Program, TensorSpec, forgetting_sources

JUDGE_SECONDS = 3.0  # of compiled steps, after which their time is compared with that of the uncompiled ones
CHECK_SECONDS = 0.1  # between two checks of a compile process, or of the queue for one

logger = logging.getLogger("modelfleet")


class Compiler:
    """Decides whether to compile one program, and compiles it while training continues.

    Args:
        program: The program. Its `run` is replaced by the compiled form.
        at_width: Traces the same step at another width, so that the compiled form serves any width. With None, it
            serves the program's own width only.
    """

    def __init__(self, program: Program, at_width: Callable[[int], Program] | None = None) -> None:
        self._program = program
        self._at_width = at_width if program.width > 1 else None
        self._process: CompileProcess | None = None
        self._next_look = 0.0
        self._begun: tuple[float, float] | None = (
            None  # when the process was started, and the seconds per step then
        )
        self._fixed_width = False  # True if a width turned out to be built into what was compiled
        self.compilable_seconds: float | None = None
        """How long a step spends in operations that a compiler can merge. None if it was not measured."""
        self.failure: str | None = None
        """Why the program could not be compiled; None if it was, or has not been tried."""
        self._judge_at: float | None = None  # when the compiled steps have run long enough to be timed
        self._done = program.graph is None or too_large(program.operations)

    @property
    def busy(self) -> bool:
        """Return True while the program is being compiled."""
        return self._process is not None

    def consider(self, steps_left: int, seconds_per_step: float | None) -> None:
        """Start compiling if that pays for the remaining steps, and take over what has been compiled."""
        if self._done:
            if self._judge_at is not None:
                self._judge(seconds_per_step)
        elif time.monotonic() >= self._next_look or compile_mode() == "now":
            with TRACE_LOCK:
                try:
                    self._consider(steps_left, seconds_per_step)
                except Exception as error:  # no C++ compiler, a full disk, …: no result depends on compiling
                    self._fail(f"{type(error).__name__}: {error}")

    def _consider(self, steps_left: int, seconds_per_step: float | None) -> None:
        if self._done:  # another thread was faster
            return
        if self._process is not None:
            self._finish(self._process, seconds_per_step)
            return
        wanted = compile_mode()
        if wanted == "never":
            self._done = True
        elif wanted == "now" and _no_compiler():
            self._fail(_failures[-1])
        elif wanted == "now":
            self._load(self._forms())
        elif seconds_per_step is not None:
            self._load_or_compile(steps_left, seconds_per_step)

    def stop(self) -> None:
        """End the compile process, if there is one."""
        QUEUE.withdraw(self)
        if self._process is not None:
            self._process.stop()
            self._process = None
        self._next_look = 0.0

    def _load_or_compile(self, steps_left: int, seconds_per_step: float) -> None:
        known, part = self.hardware, self._compilable_part(seconds_per_step)
        won = seconds_won(self._program.operations, steps_left, seconds_per_step, known, compilable=part)
        saved = seconds_saved(steps_left, seconds_per_step, known, compilable=part)
        if loading_pays(saved) and self._marker.exists():
            QUEUE.withdraw(self)
            form = self._marker.read_text()
            self._load([source for source in self._forms() if source.form == form] or self._forms())
        elif won:
            self._process = QUEUE.request(self, won, seconds_per_step, self._forms)
            self._begun = time.monotonic(), seconds_per_step
        else:
            QUEUE.withdraw(self)
        self._next_look = time.monotonic() + CHECK_SECONDS

    def _compilable_part(self, seconds_per_step: float) -> float | None:
        return None if self.compilable_seconds is None else min(1.0, self.compilable_seconds / seconds_per_step)

    @property
    def _marker(self) -> Path:
        """Return the path of a file that exists if this program has been compiled before under these settings.

        It holds the form.
        """
        text = f"{self._digest} {json.dumps(settings.present(), sort_keys=True)}"
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        return cache_folder() / "modelfleet" / name  # next to torch's own files, so that both are deleted together

    @cached_property
    def hardware(self) -> str | None:
        """Return the name of the accelerator's model that the program runs on; None for the CPU."""
        return hardware(self._program.inputs[0].device)

    @cached_property
    def _digest(self) -> str:
        graph = self._program.graph
        assert graph is not None
        source = GraphSource.of(graph, self._program.inputs, ONE_WIDTH)
        text = f"{torch.__version__} {source.text} {[describe(spec) for spec in source.inputs]}"
        text += self.hardware or ""  # torch compiles for one model of accelerator
        return hashlib.sha256(text.encode()).hexdigest()

    def _forms(self) -> list[GraphSource]:
        """Return the graphs to compile, the best first: for any width if possible, and for this width alone."""
        graph = self._program.graph
        assert graph is not None
        forms = [GraphSource.of(graph, self._program.inputs, ONE_WIDTH)]
        if self._at_width is not None and not self._fixed_width:
            width = 3 if self._program.width != 3 else 2
            try:
                twin = self._at_width(width).graph
                assert twin is not None
                merged = merge_widths(graph, self._program.width, twin, width)
                forms.insert(0, GraphSource.of(merged, self._program.inputs, ANY_WIDTH))
            except (FixedWidthError, FleetError):
                pass  # only for its own width
        return forms

    def _finish(self, process: CompileProcess, seconds_per_step: float | None) -> None:
        outcome = process.outcome
        self._next_look = time.monotonic() + CHECK_SECONDS
        if outcome is None:
            return
        self._process = None
        ready = [source for source in process.forms if source.form == outcome.form]
        if not ready:
            self._fail(outcome.reason)
            return
        self._learn_cost(seconds_per_step)
        if process.settings == settings.present():
            self._load(ready)
        # Under settings that were changed meanwhile, torch would compile it again, and the training would wait.

    def _learn_cost(self, seconds_per_step: float | None) -> None:
        """Record how long compiling took, and how much it slowed down the steps meanwhile."""
        assert self._begun is not None
        assert self._program.graph is not None
        begun, before = self._begun
        now = time.monotonic()
        learn(self.hardware, seconds_per_node=(now - begun) / len(self._program.graph.graph.nodes))
        if seconds_per_step:
            learn(self.hardware, slowed=1 - before / seconds_per_step)
        self._judge_at = now + JUDGE_SECONDS

    def _judge(self, seconds_per_step: float | None) -> None:
        """Record how much of a step's time compiling has saved, once that is known."""
        if self._judge_at is not None and time.monotonic() >= self._judge_at and seconds_per_step is not None:
            self._judge_at = None
            if self._begun is not None and self._program.compiled:
                part = self._compilable_part(self._begun[1]) or COMPILABLE
                learn(self.hardware, saved=(1 - seconds_per_step / self._begun[1]) / part)

    def _load(self, forms: Sequence[GraphSource]) -> None:
        self._done = True
        try:
            self._program.run, form = compile_first(forms)
        except FixedWidthError:
            self._fixed_width, self._done = True, False  # to be compiled for its own width
            return
        self._program.compiled = True
        self._program.any_width = form == ANY_WIDTH
        with suppress(OSError):  # without it, the next run does not know
            self._marker.parent.mkdir(parents=True, exist_ok=True)
            self._marker.write_text(form)

    def _fail(self, reason: str) -> None:
        """Leave the traced graph in use: no result depends on compiling."""
        self._done = True
        self.failure = reason.strip().rstrip(".")
        _report_failure(self.failure)


_failures: list[str] = []  # why steps could not be compiled


def _no_compiler() -> bool:
    """Return True if two programs could not be compiled for the same reason: it is not in the programs."""
    return len(_failures) > 1 and _failures[-1] == _failures[-2]


def _report_failure(reason: str) -> None:
    """Log that compiling failed: as a warning the first time, then for debugging only."""
    logger.log(
        logging.DEBUG if _failures else logging.WARNING,
        "a step could not be compiled: %s. Its members continue to train, uncompiled. Fix the cause, or set "
        "MODELFLEET_COMPILE=never, so that compiling is not tried.",
        reason,
    )
    _failures.append(reason)


def compile_first(forms: Sequence[GraphSource], *, to_run: bool = True) -> tuple[Callable[..., Any], Form]:
    """Compile the first form that can be compiled, or load it from torch's cache.

    Both processes call this function, so that both look up the same graph in the cache. With `to_run=False` the
    function is not meant to be called, and no accelerator is used.

    Returns:
        The compiled function, and the form that it was compiled from.
    """
    for source in forms[:-1]:
        try:
            return _compile(source, to_run), source.form
        except FixedWidthError:
            pass
    return _compile(forms[-1], to_run), forms[-1].form


def _compile(source: GraphSource, to_run: bool) -> Callable[..., Any]:
    # Imported here because these imports take half a second, and most processes do not need them.
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 warns of its own use of torch.jit when this is imported
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

    forward = source.function()
    general = source.form == ANY_WIDTH
    shapes = ShapeEnv()
    with torch.no_grad(), forgetting_sources():
        # torch's cache does not take graphs without a `ShapeEnv`.
        fakes = FakeTensorMode(shape_env=shapes, static_shapes=not general, allow_non_fake_inputs=True)
        width = _unknown_width(fakes, source.inputs[0].shape[0]) if general else None
        with fakes:
            inputs = [spec.empty(width) for spec in source.inputs]
        mode = "symbolic" if general else "real"
        with nullcontext() if general else fakes:  # so that constants are not made on the accelerator
            graph = make_fx(forward, decomposition_table=DECOMPOSITIONS, tracing_mode=mode)(*inputs)
        chosen = config.cpp.vec_isa_ok  # the user's own, from `TORCHINDUCTOR_VEC_ISA_OK`
        options = {
            "cpp.vec_isa_ok": knows_vectors() if chosen is None else chosen,
            "cpp.dynamic_threads": True,  # so that a program serves any number of threads
        }
        with config.patch(options), one_library(wraps=source.draws):
            compiled: Any = compile_fx(graph, inputs)
    if general and (shapes.replacements or shapes.guards):
        raise FixedWidthError("an operation depends on the width")
    if general and (to_run or source.on_cpu):
        _try_widths(compiled, source.inputs)
    if source.lifted:
        return lambda *inputs: compiled(*inputs, *source.lifted)
    return compiled


def _try_widths(compiled: Callable[..., Any], inputs: Sequence[TensorSpec]) -> None:
    # A graph from torch's cache does not say if an operation, such as a convolution, has a width built in.
    for width in (2, 3):
        try:
            with torch.no_grad():
                compiled(*(spec.empty(width).zero_() for spec in inputs))
        except Exception as error:  # the compiled code checks its inputs' sizes
            raise FixedWidthError("a width is built in") from error


def _unknown_width(fakes: FakeTensorMode, hint: int) -> Any:  # a SymInt
    """Return a width that a compiler must leave open. `hint` is the value to expect."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    axis = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    return fakes.from_tensor(torch.empty(hint), symbolic_context=axis).shape[0]
