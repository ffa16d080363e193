"""What NVIDIA's own tools say of this machine, without a framework: the multi-process service, memory by process.

A tool that is missing, hangs or fails says nothing: then the answer is "no", or empty.
"""

import shutil
import subprocess
from dataclasses import dataclass

from modelfleet.devices import Device

_CONTROL, _SMI = "nvidia-cuda-mps-control", "nvidia-smi"
_TIMEOUT = 10.0  # seconds. A driver that is in trouble makes its tools hang
START_MPS = f"{_CONTROL} -d"
"""Command that starts the daemon of the multi-process service."""


@dataclass(frozen=True)
class GpuProcess:
    """Memory that a process has on a GPU."""

    gpu: str
    """The GPU's number and name, as `nvidia-smi` has them."""
    pid: int
    name: str
    bytes: int | None
    """None if the driver does not say, as in some containers."""


def multi_process_service() -> bool:
    """Return True if NVIDIA's multi-process service (MPS) runs: processes then compute on a GPU side by side."""
    return _said(_CONTROL, stdin="get_server_list\n") is not None


def shared_by_processes(device: Device) -> bool:
    """Return True if several processes can compute on a device at once. On an accelerator they take turns."""
    return device.kind == "cpu" or (device.kind == "cuda" and multi_process_service())


def processes() -> list[GpuProcess]:
    """Return the processes that have memory on a GPU of this machine."""
    gpus = {row[0]: f"GPU {row[1]}, {row[2]}" for row in _table("gpu", "uuid,index,name")}
    return [
        GpuProcess(gpus.get(uuid, uuid), int(pid), name, int(used) << 20 if used.isdigit() else None)
        for uuid, pid, name, used in _table("compute-apps", "gpu_uuid,pid,process_name,used_gpu_memory")
        if pid.isdigit()
    ]


def _table(what: str, columns: str) -> list[list[str]]:
    said = _said(_SMI, f"--query-{what}={columns}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in (said or "").splitlines()]
    return [row for row in rows if len(row) == columns.count(",") + 1]


def _said(command: str, *arguments: str, stdin: str = "") -> str | None:
    """Return what a command has written; None if it is missing, has failed or takes too long."""
    path = shutil.which(command)
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *arguments], input=stdin, capture_output=True, text=True, timeout=_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
