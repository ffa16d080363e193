"""Compiled programs: made beside the training, and only where they win back what they cost.

Training starts on the traced graph at once. When enough work remains, the graph goes as text to a second process,
which compiles it into torch's own cache on disk; this process then loads it from there in about a second. A second
run of the same structure finds it in the cache right away.

`MODELFLEET_COMPILE` says otherwise: `now` compiles before the first step, `never` does not compile.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from modelfleet.errors import FleetError, unknown
from modelfleet.frameworks.torch.diagnosis import cache_folder
from modelfleet.frameworks.torch.sources import ANY_WIDTH, ONE_WIDTH, Source, describe
from modelfleet.frameworks.torch.tracing import TRACING, Program, Spec
from modelfleet.frameworks.torch.widths import NotGeneralError, merge

MODES = ("auto", "now", "never")

# What compiling costs and gives, as measured on two cores; only the decision hangs on it, never a result.
SECONDS_PER_NODE = 0.05
SECONDS_AT_LEAST = 10.0
SECONDS_TO_LOAD = 2.0
SAVING = 0.5  # the part of a step's time that compiling usually saves
MOST_NODES = 6000  # beyond this, compiling takes minutes


def mode() -> str:
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
        self._worker: _Worker | None = None
        self._done = program.graph is None or len(program.graph.graph.nodes) > MOST_NODES

    @property
    def busy(self) -> bool:
        """Whether the program is being compiled now."""
        return self._worker is not None

    def consider(self, steps_left: int, seconds_per_step: float | None) -> None:
        """Start compiling if the steps that are left will win it back; take over what is ready."""
        if not self._done:
            with TRACING:
                self._consider(steps_left, seconds_per_step)

    def _consider(self, steps_left: int, seconds_per_step: float | None) -> None:
        if self._done:  # by another thread, meanwhile
            return
        if self._worker is not None:
            self._finish()
            return
        wanted = mode()
        if wanted == "never":
            self._done = True
        elif wanted == "now":
            self._load(self._forms())
        elif seconds_per_step is not None:
            self._weigh(steps_left * seconds_per_step * SAVING)

    def stop(self) -> None:
        """End the worker, if there is one."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _weigh(self, saving: float) -> None:
        if saving < SECONDS_TO_LOAD:
            return
        graph = self._program.graph
        assert graph is not None
        known = _marker(self._program)
        if known.exists():
            form = known.read_text()
            self._load([source for source in self._forms() if source.form == form] or self._forms())
        elif saving > max(SECONDS_AT_LEAST, SECONDS_PER_NODE * len(graph.graph.nodes)):
            self._worker = _Worker(self._forms())

    def _forms(self) -> list[Source]:
        """What to compile, the best first: for any width if that can be had, and for this width alone."""
        graph = self._program.graph
        assert graph is not None
        forms = [Source.of(graph, self._program.inputs, ONE_WIDTH)]
        if self._at_width is not None:
            width = 3 if self._program.width != 3 else 2
            try:
                twin = self._at_width(width).graph
                assert twin is not None
                merged = merge(graph, self._program.width, twin, width)
                forms.insert(0, Source.of(merged, self._program.inputs, ANY_WIDTH))
            except (NotGeneralError, FleetError):
                pass  # for its own width, then
        return forms

    def _finish(self) -> None:
        assert self._worker is not None
        code = self._worker.poll()
        if code is None:
            return
        ready = self._worker.ready()
        self._worker.stop()
        self._worker = None
        if code == 0 and ready is not None:
            self._load([ready])
        else:  # the traced graph goes on: compiling is never needed for a result
            self._done = True

    def _load(self, forms: Sequence[Source]) -> None:
        self._done = True
        try:
            self._program.run, form = compile_first(forms)
        except Exception:  # no C++ compiler, say: the traced graph goes on, unless compiling was insisted on
            if mode() == "now":
                raise
            return
        self._program.compiled = True
        self._program.any_width = form == ANY_WIDTH
        mark = _marker(self._program)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(form)


class _Worker:
    """A process that compiles one program into torch's cache."""

    def __init__(self, forms: Sequence[Source]) -> None:
        self._forms = forms
        self._folder = Path(tempfile.mkdtemp(prefix="modelfleet-compile-"))
        for source in forms:
            source.write(self._folder / source.form)
        (self._folder / "forms.json").write_text(json.dumps([source.form for source in forms]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "modelfleet.frameworks.torch.compile_worker", str(self._folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C reaches the training, not the compiler
        )
        self._next_look = 0.0

    def ready(self) -> Source | None:
        """What it has compiled."""
        done = self._folder / "done"
        form = done.read_text() if done.exists() else None
        return next((source for source in self._forms if source.form == form), None)

    def poll(self) -> int | None:
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + 0.1
        return self._process.poll()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def compile_first(forms: Sequence[Source]) -> tuple[Any, str]:
    """Compile the first of the forms that can be, or load it from torch's cache; gives it and which it was.

    Both processes come through here, so that both ask the cache for the very same graph.
    """
    for source in forms[:-1]:
        try:
            return _compile(source), source.form
        except NotGeneralError:
            pass
    return _compile(forms[-1]), forms[-1].form


def _compile(source: Source) -> Any:
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
        raise NotGeneralError("an operation of it asks for the width")
    if general:
        _try_widths(compiled, source.inputs)
    return compiled


def _try_widths(compiled: Any, inputs: Sequence[Spec]) -> None:
    # What comes from torch's cache has no note of a width that an operation (a convolution, say) has built in.
    for width in (2, 3):
        try:
            with torch.no_grad():
                compiled(*(spec.empty(width).zero_() for spec in inputs))
        except Exception as error:  # the compiled code checks its inputs' sizes
            raise NotGeneralError("a width is built in") from error


def _unknown_width(fakes: FakeTensorMode, hint: int) -> Any:
    """A width that a compiler must leave open; `hint` tells it what to expect."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    axis = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    return fakes.from_tensor(torch.empty(hint), symbolic_context=axis).shape[0]


def _marker(program: Program) -> Path:
    """A file that is there if this very program has been compiled here before; it says in which form."""
    assert program.graph is not None
    source = Source.of(program.graph, program.inputs, ONE_WIDTH)
    text = f"{torch.__version__} {source.text} {[describe(spec) for spec in program.inputs]}"
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    return cache_folder() / "modelfleet" / name  # beside what torch keeps there: they come and go together
