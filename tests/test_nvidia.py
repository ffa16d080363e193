"""What NVIDIA's tools say, as programs that answer like them."""

from pathlib import Path

import pytest

from modelfleet import nvidia
from modelfleet.devices import Device


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the whole path."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install(tools: Path, name: str, script: str) -> None:
    path = tools / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


SMI = """
case "$1" in
  --query-gpu=uuid,index,name) echo "GPU-a, 0, NVIDIA A100"; echo "GPU-b, 1, NVIDIA A100";;
  --query-compute-apps=*) echo "GPU-b, 41, /usr/bin/python3, 1024"; echo "GPU-a, 42, train, [N/A]"; echo "";;
  *) exit 2;;
esac
[ "$2" = "--format=csv,noheader,nounits" ]
"""


def test_memory_is_told_by_process(tools: Path) -> None:
    install(tools, "nvidia-smi", SMI)
    assert nvidia.processes() == [
        nvidia.GpuProcess("GPU 1, NVIDIA A100", 41, "/usr/bin/python3", 1 << 30),
        nvidia.GpuProcess("GPU 0, NVIDIA A100", 42, "train", None),
    ]


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'", None])
def test_a_tool_that_fails_or_is_missing_says_nothing(script: str | None, tools: Path) -> None:
    if script is not None:
        install(tools, "nvidia-smi", script)
        install(tools, "nvidia-cuda-mps-control", "exit 1")
    assert nvidia.processes() == []
    assert not nvidia.multi_process_service()


def test_the_service_runs_if_its_daemon_answers(tools: Path) -> None:
    install(tools, "nvidia-cuda-mps-control", 'read command; [ "$command" = get_server_list ]')
    assert nvidia.multi_process_service()


def test_processes_share_a_cpu_and_a_gpu_under_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for runs in (False, True):
        monkeypatch.setattr(nvidia, "multi_process_service", lambda runs=runs: runs)
        assert nvidia.shared_by_processes(Device("cpu", 1))
        assert nvidia.shared_by_processes(Device("cuda", 0)) == runs
        assert not nvidia.shared_by_processes(Device("mps"))
