"""Inductor's CUDA code for programs, generated without a GPU: `python -m tests.standin.cuda_code FOLDER`.

FOLDER has the sources of programs that were traced on the stand-in. Their tensors are taken to be on a CUDA
device that is an A100. Inductor works with fake tensors, so only what asks the device itself has to be replaced.
The code is never compiled. Writes "launches.json" to FOLDER: by source, the number of kernels that the code
launches, with calls of cuBLAS and cuDNN.
"""

import contextlib
import ctypes
import json
import os
import re
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tests.standin.building import PRETEND_CUDA, build

from modelfleet.frameworks.torch.compiling.compiler import compile_first
from modelfleet.frameworks.torch.compiling.graph_source import GraphSource

A100 = types.SimpleNamespace(
    name="NVIDIA A100-SXM4-40GB",
    major=8,
    minor=0,
    multi_processor_count=108,
    total_memory=40 * 2**30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=166912,
    shared_memory_per_multiprocessor=167936,
    L2_cache_size=40 * 2**20,
    gcnArchName="",
)
CUDA = torch.device("cuda", 0)
_LAUNCH = re.compile(r"\.run\(|\bextern_kernels\.\w+\(|\btorch\.ops\.\w+\.\w+\.\w+\(")


class _Generated(Exception):  # noqa: N818  no error: the code is all that is wanted
    """Raised with the code once it has been generated."""


def pretend_cuda() -> None:
    """Have torch and triton take this machine for one with a CUDA device."""
    ctypes.CDLL(str(build(PRETEND_CUDA))).pretend()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch._dynamo.device_interface as interfaces
    import torch._dynamo.utils
    import torch._functorch.aot_autograd
    import torch._inductor.compile_fx
    import torch._inductor.graph
    from torch._inductor import config

    target = import_module("triton.backends.compiler").GPUTarget("cuda", 80, A100.warp_size)

    class NoDevice(contextlib.nullcontext[None]):
        """Context of a device that is the only one."""

        def __init__(self, device: object) -> None:
            super().__init__()

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: A100,
        "get_device_capability": lambda *_: (A100.major, A100.minor),
        "synchronize": lambda *_: None,
        "_lazy_init": lambda: None,
    }
    of_interface: dict[str, Callable[..., Any]] = {
        **answers,
        "get_compute_capability": lambda *_: 80,
        "get_raw_stream": lambda *_: 0,
        "set_device": lambda *_: None,
        "exchange_device": lambda *_: 0,
        "maybe_exchange_device": lambda *_: 0,
        "is_triton_capable": lambda *_: True,
        "raise_if_triton_unavailable": lambda *_: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for name, answer in of_interface.items():
        setattr(interfaces.CudaInterface, name, staticmethod(answer))
    for name in ("get_device_properties", "current_device"):
        setattr(interfaces.CudaInterface.Worker, name, staticmethod(answers[name]))
    replaced: list[tuple[Any, str, object]] = [
        (torch.cuda, "device", NoDevice),
        (torch.cuda, "_DeviceGuard", NoDevice),
        (interfaces.CudaInterface, "device", NoDevice),
        (torch.version, "cuda", "12.8"),
        (torch._C, "_cuda_getDevice", lambda: 0),
        (torch._C, "_cuda_getCurrentRawStream", lambda _: 0),
        # There is no state of a generator to keep.
        (torch._dynamo.utils, "preserve_rng_state", contextlib.nullcontext),
        (torch._functorch.aot_autograd, "preserve_rng_state", contextlib.nullcontext),
        # These passes look for patterns, such as attention by products, that they trace on a real device.
        (torch._inductor.compile_fx, "joint_graph_passes", lambda graph, *_: graph),
        (torch._inductor.graph.GraphLowering, "compile_to_module", _stop),
    ]
    for owner, name, answer in replaced:
        setattr(owner, name, answer)
    config.pattern_matcher = False
    config.fx_graph_cache = False

    class Driver:
        """Driver of triton for a device that is not there."""

        def get_current_target(self) -> object:
            return target

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return CUDA

        def get_device_interface(self) -> Any:
            return torch.cuda

    import_module("triton.runtime").driver.set_active(Driver())


def _stop(graph: Any) -> None:
    code, *_ = graph.codegen()
    raise _Generated(getattr(code, "value", code))


def code_of(source: GraphSource) -> str:
    """Return the code that inductor generates for a program that was traced on the stand-in."""
    inputs = tuple(replace(spec, device=CUDA) for spec in source.inputs)
    text = source.text.replace("type='standin'", "type='cuda'")
    try:
        compile_first([replace(source, text=text, inputs=inputs)], to_run=False)
    except Exception as error:
        found = error
        while found is not None and not isinstance(found, _Generated):
            found = found.__cause__ or found.__context__
        if found is None:
            raise
        return str(found.args[0])
    raise AssertionError("no code was generated")


def launches(code: str) -> int:
    """Return the number of kernels that generated code launches."""
    _, _, calls = code.partition("\nclass Runner")
    assert calls
    return len(_LAUNCH.findall(calls))


def main(folder: Path) -> None:
    """Count the launches of every source in a folder."""
    pretend_cuda()
    found = {}
    for path in sorted(entry for entry in folder.iterdir() if entry.is_dir()):
        code = code_of(GraphSource.read(path))
        (folder / f"{path.name}.py").write_text(code)
        found[path.name] = launches(code)
    (folder / "launches.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
