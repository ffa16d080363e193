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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from modelfleet.errors import unknown
from modelfleet.frameworks.torch.tracing import Program, Spec

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
    """Decides for one program whether to compile it, and does so beside the training."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._worker: _Worker | None = None
        self._done = program.graph is None or len(program.graph.graph.nodes) > MOST_NODES

    @property
    def busy(self) -> bool:
        """Whether the program is being compiled now."""
        return self._worker is not None

    def consider(self, steps_left: int, seconds_per_step: float | None) -> None:
        """Start compiling if the steps that are left will win it back; take over what is ready."""
        if self._done:
            return
        if self._worker is not None:
            self._finish()
            return
        wanted = mode()
        if wanted == "never":
            self._done = True
        elif wanted == "now":
            self._load()
        elif seconds_per_step is not None:
            self._weigh(steps_left * seconds_per_step * SAVING)

    def stop(self) -> None:
        """End the worker, if there is one."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _weigh(self, saving: float) -> None:
        graph = self._program.graph
        assert graph is not None
        cost = max(SECONDS_AT_LEAST, SECONDS_PER_NODE * len(graph.graph.nodes))
        if saving > SECONDS_TO_LOAD and _marker(self._program).exists():
            self._load()
        elif saving > cost:
            self._worker = _Worker(self._program)

    def _finish(self) -> None:
        assert self._worker is not None
        code = self._worker.poll()
        if code is None:
            return
        self._worker.stop()
        self._worker = None
        if code == 0:
            self._load()
        else:  # the traced graph goes on: compiling is never needed for a result
            self._done = True

    def _load(self) -> None:
        self._done = True
        source, constants = export(self._program.graph)
        self._program.run = compile_source(source, constants, self._program.inputs)
        self._program.compiled = True
        mark = _marker(self._program)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


class _Worker:
    """A process that compiles one program into torch's cache."""

    def __init__(self, program: Program) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="modelfleet-compile-"))
        source, constants = export(program.graph)
        (self._folder / "graph.py").write_text(source)
        (self._folder / "inputs.json").write_text(json.dumps([_describe(spec) for spec in program.inputs]))
        if constants:
            from modelfleet.frameworks.torch.files import write

            write(self._folder / "constants.safetensors", constants)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "modelfleet.frameworks.torch.compile_worker", str(self._folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C reaches the training, not the compiler
        )
        self._next_look = 0.0

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


def export(graph: torch.fx.GraphModule | None) -> tuple[str, dict[str, Tensor]]:
    """A traced graph as Python text, and the constant tensors it refers to."""
    assert graph is not None
    constants = {name: t for name, t in graph.named_buffers()} | {
        node.target: getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"
    }
    return graph.graph.python_code("self").src, constants


def compile_source(source: str, constants: dict[str, Tensor], inputs: Sequence[Spec]) -> Any:
    """Compile a graph's text, or load it from torch's cache if it has been compiled before.

    Both processes come through here, so that both ask the cache for the very same graph.
    """
    from torch._inductor.compile_fx import compile_fx

    holder = torch.nn.Module()
    for name, tensor in constants.items():
        holder.register_buffer(name, tensor)
    scope: dict[str, Any] = {
        "torch": torch,
        "device": torch.device,
        "inf": float("inf"),
        "nan": float("nan"),
        "NoneType": type(None),
    }
    exec(compile(source, "<modelfleet program>", "exec"), scope)  # text that `export` made from a traced graph
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = [spec.empty() for spec in inputs]
        graph = make_fx(lambda *leaves: scope["forward"](holder, *leaves), tracing_mode="real")(*fake)
        return compile_fx(graph, fake)


def _describe(spec: Spec) -> dict[str, Any]:
    dtype = str(spec.dtype).removeprefix("torch.")
    return {"shape": spec.shape, "stride": spec.stride, "dtype": dtype, "device": str(spec.device)}


def _marker(program: Program) -> Path:
    """A file that is there if this very program has been compiled on this machine before."""
    source, _ = export(program.graph)
    text = f"{torch.__version__} {source} {[_describe(spec) for spec in program.inputs]}"
    base = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "modelfleet" / "compiled" / hashlib.sha256(text.encode()).hexdigest()[:32]
