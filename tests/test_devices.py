import os
from pathlib import Path

import pytest
import torch

from modelfleet import devices as module
from modelfleet.devices import Device, Memory, chosen, cores, host_memory, parse_devices, threads_of
from modelfleet.errors import InputError
from modelfleet.frameworks.torch.devices import accelerators, choose, memory, native, out_of_memory

GPUS = [Device("cuda", 0), Device("cuda", 1)]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("cpu", (Device("cpu"),)),
        ("cuda:0", (Device("cuda", 0),)),
        ("mps", (Device("mps"),)),
        ("xpu:12", (Device("xpu", 12),)),
        ("cpu:0,cpu:1", (Device("cpu", 0), Device("cpu", 1))),
        (" cuda:1 , cpu,", (Device("cuda", 1), Device("cpu"))),
        (["cuda:0", "cuda:1"], (Device("cuda", 0), Device("cuda", 1))),
        (("cpu",), (Device("cpu"),)),
        ("ray", (Device("ray"),)),
        ("ray:0,ray:2", (Device("ray", 0), Device("ray", 2))),
        ("auto", None),
        (["auto"], None),
    ],
)
def test_devices_are_read_by_name(devices: str | list[str], expected: tuple[Device, ...] | None) -> None:
    assert parse_devices(devices) == expected


@pytest.mark.parametrize("name", ["cpu", "cpu:1", "cuda:0", "mps", "xpu:3"])
def test_a_device_is_shown_as_it_is_written(name: str) -> None:
    parsed = parse_devices(name)
    assert parsed is not None
    assert str(parsed[0]) == name


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("gpu:0", "unknown kind of device in 'gpu:0'. Known: cpu, cuda, mps, xpu, ray."),
        ("CPU", "unknown kind of device in 'CPU'. Known: cpu, cuda, mps, xpu, ray."),
        ("cpu:0,cpu:0", "device 'cpu:0' is named twice. Name each device once."),
        (["cuda", "cuda:1"], "devices 'cuda' and 'cuda:1' may be the same. Name them as 'cuda:0', …"),
        (["cpu:1", "cpu"], "devices 'cpu:1' and 'cpu' may be the same. Name them as 'cpu:0', …"),
        ("cuda:-1", "device 'cuda:-1' is not a kind and an index. Write it as in 'cuda:0'."),
        ("cuda:01", "device 'cuda:01' is not a kind and an index. Write it as in 'cuda:0'."),
        ("cuda:", "device 'cuda:' is not a kind and an index. Write it as in 'cuda:0'."),
        ("auto,cpu", '"auto" can\'t be combined with device names. Give "auto", or name the devices.'),
        ("", 'no device was given. Name one, as in "cpu" or "cuda:0", or say "auto".'),
        ([], 'no device was given. Name one, as in "cpu" or "cuda:0", or say "auto".'),
        ([""], "device '' is not a kind and an index. Write it as in 'cuda:0'."),
        (0, 'devices=0 names no devices. Give "auto", a name as "cuda:0", or a list of names.'),
        (
            ["cpu", 1],
            'devices=[\'cpu\', 1] names no devices. Give "auto", a name as "cuda:0", or a list of names.',
        ),
    ],
)
def test_a_name_that_is_no_device_is_refused(devices: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_devices(devices)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("wanted", "here", "expected"),
    [
        (None, [], ["cpu"]),
        (None, GPUS[:1], ["cuda:0"]),
        (None, GPUS, ["cuda:0", "cuda:1"]),
        (None, [*GPUS, Device("xpu", 0)], ["cuda:0", "cuda:1"]),  # of one kind
        ("cuda:1,cpu", GPUS, ["cuda:1", "cpu"]),
        ("cuda", GPUS, ["cuda"]),
        ("cpu:7,cpu:0", [], ["cpu:7", "cpu:0"]),  # logical CPUs always are here
    ],
)
def test_devices_are_chosen_of_those_that_are_here(
    wanted: str | None, here: list[Device], expected: list[str]
) -> None:
    asked = None if wanted is None else parse_devices(wanted)
    assert [str(device) for device in chosen(asked, here, "torch")] == expected


@pytest.mark.parametrize("absent", ["cuda:2", "xpu", "mps:0"])
def test_a_device_that_is_not_here_is_refused_with_those_that_are(absent: str) -> None:
    with pytest.raises(InputError) as caught:
        chosen(parse_devices(f"cpu,{absent}"), GPUS, "JAX")
    here = "JAX sees cpu, cuda:0, cuda:1. Name one of these, or say 'auto'."
    assert str(caught.value) == f"device '{absent}' does not exist: {here}"


@pytest.mark.parametrize("name", ["ray", "ray:1"])
def test_a_framework_has_no_device_of_a_cluster(name: str) -> None:
    with pytest.raises(
        InputError, match=f"'{name}' is one of a Ray cluster, not one that torch sees.*cpu, cuda:0"
    ):
        chosen(parse_devices(name), GPUS, "torch")


@pytest.mark.parametrize(
    ("usable", "names", "expected"),
    [(8, "cpu:0,cpu:1", 4), (8, "cpu:0,cpu:1,cpu:2", 2), (2, "cpu:0,cpu:1,cpu:5", 1), (8, "cuda:0,cpu", 8)],
)
def test_logical_cpus_share_the_cores_that_the_process_may_use(
    usable: int, names: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(usable)), raising=False)
    found = parse_devices(names)
    assert found is not None
    assert cores() == usable
    assert threads_of(found) == expected


def test_without_an_affinity_all_cores_are_the_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert threads_of(GPUS) == 12


def test_the_host_has_memory_and_some_of_it_is_free() -> None:
    found = host_memory()
    assert found is not None
    assert 0 < found.free < found.total


def container(folder: Path, limit: str, current: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text("anon 100\ninactive_file 50\nactive_file 7\n")
    return folder


def test_a_container_s_limit_is_its_memory_and_files_read_before_are_free(tmp_path: Path) -> None:
    assert module._container_memory(container(tmp_path, "1000", 400)) == Memory(1000, 650)
    assert module._container_memory(container(tmp_path, "max", 400)) is None
    assert module._container_memory(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("machine", "limited", "expected"),
    [
        (Memory(1000, 500), Memory(800, 700), Memory(800, 500)),
        (Memory(1000, 500), Memory(5000, 300), Memory(1000, 300)),
        (Memory(1000, 500), None, Memory(1000, 500)),
        (None, Memory(800, 700), Memory(800, 700)),
        (None, None, None),
    ],
)
def test_the_smaller_of_machine_and_container_counts(
    machine: Memory | None, limited: Memory | None, expected: Memory | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_machine_memory", lambda: machine)
    monkeypatch.setattr(module, "_container_memory", lambda: limited)
    assert host_memory() == expected


def test_torch_has_logical_cpus_as_many_as_are_named() -> None:
    chosen = choose(parse_devices("cpu:0,cpu:7"))
    assert chosen == (Device("cpu", 0), Device("cpu", 7))
    assert [native(device) for device in chosen] == [torch.device("cpu")] * 2


def test_torch_takes_each_accelerator_by_its_index() -> None:
    assert native(Device("cuda", 1)) == torch.device("cuda", 1)
    assert native(Device("mps")) == torch.device("mps")


def test_auto_is_what_torch_has_here() -> None:
    if torch.accelerator.is_available():
        chosen = choose(None)
        assert len(chosen) == torch.accelerator.device_count()
        assert [torch.empty(1, device=native(device)).device for device in chosen]
    else:
        assert choose(None) == (Device("cpu"),)


def test_torch_names_its_accelerators_and_takes_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def current(check_available: bool = False) -> torch.device:
        return torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert accelerators() == GPUS
    assert choose(None) == tuple(GPUS)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert choose((Device("cuda"), Device("cpu"))) == (Device("cuda", 1), Device("cpu"))
    with pytest.raises(InputError, match="device 'cuda:2' does not exist: torch sees cpu, cuda:0, cuda:1"):
        choose((Device("cuda", 2),))


def test_torch_tells_an_accelerator_s_memory_and_not_the_cpu_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (30, 80), raising=False)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 25)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 20)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 100)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 40)
    assert memory(torch.device("cpu")) is None
    assert memory(torch.device("cuda", 1)) == Memory(80, 35)  # with the 5 that torch keeps for its next tensors
    assert memory(torch.device("mps")) == Memory(100, 60)
    monkeypatch.delattr(torch.accelerator, "get_memory_info")
    assert memory(torch.device("xpu", 0)) is None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_torch_knows_when_memory_has_run_out(error: Exception) -> None:
    assert out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("out of memory"),
    ],
)
def test_other_errors_are_no_lack_of_memory(error: Exception) -> None:
    assert not out_of_memory(error)


def test_a_framework_s_own_kinds_of_accelerators_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kind_finders", [lambda: {"npu"}])
    assert parse_devices("npu:1") == (Device("npu", 1),)
    with pytest.raises(
        InputError, match=r"unknown kind of device in 'tpu'\. Known: cpu, cuda, mps, xpu, ray, npu"
    ):
        parse_devices("tpu")
