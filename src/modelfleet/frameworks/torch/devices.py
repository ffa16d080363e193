"""Devices that torch can use."""

import torch

from modelfleet.devices import Device, Memory, chosen

# Messages of torch's allocators, of cuBLAS and cuDNN, and of C++.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "_ALLOC_FAILED",
    "std::bad_alloc",
    "Cannot allocate memory",
)


def choose(wanted: tuple[Device, ...] | None) -> tuple[Device, ...]:
    """Return the devices to use: those wanted, if they exist; for None, all accelerators or else the CPU."""
    return chosen(wanted, accelerators(), "torch")


def accelerators() -> list[Device]:
    """Return every accelerator that torch can use in this process."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return []
    return [Device(found.type, index) for index in range(torch.accelerator.device_count())]


def memory(device: torch.device) -> Memory | None:
    """Return the memory of an accelerator; None for the CPU, which uses the host's, or if torch can't say."""
    if device.type == "cpu":
        return None
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return Memory(total, max(0, total - torch.mps.driver_allocated_memory()))
    if not hasattr(torch.accelerator, "get_memory_info"):  # in older releases
        return None
    free, total = torch.accelerator.get_memory_info(device)
    return Memory(int(total), int(free))


def hardware(device: torch.device) -> str | None:
    """Return the name of an accelerator's model, such as "NVIDIA A100-SXM4-40GB"; None for the CPU."""
    if device.type == "cpu":
        return None
    find = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return device.type if find is None else str(find(device))


def native(device: Device) -> torch.device:
    """Return a device as torch names it. Every logical CPU is the one CPU."""
    return torch.device("cpu") if device.kind == "cpu" else torch.device(str(device))


def out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that the device is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def threads() -> int:
    """Return the number of threads that a step uses on the CPU, if called from this thread."""
    return torch.get_num_threads()


def use_threads(count: int) -> None:
    """Use `count` threads for steps that are called from this thread, and from new threads."""
    torch.set_num_threads(count)
