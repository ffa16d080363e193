"""The devices that torch sees."""

import torch

from modelfleet.devices import Device, Memory, chosen

# As torch's allocators, cuBLAS and cuDNN, and C++ say it.
_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "_ALLOC_FAILED",
    "std::bad_alloc",
    "Cannot allocate memory",
)


def choose(wanted: tuple[Device, ...] | None) -> tuple[Device, ...]:
    """The devices to use: those wanted, if they are here; for None all accelerators, or else the CPU."""
    return chosen(wanted, accelerators(), "torch")


def accelerators() -> list[Device]:
    """Every accelerator that torch can use in this process."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return []
    return [Device(found.type, index) for index in range(torch.accelerator.device_count())]


def memory(device: torch.device) -> Memory | None:
    """The memory of an accelerator; None for the CPU, whose memory is the host's, or if torch does not tell."""
    if device.type == "cpu":
        return None
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return Memory(total, max(0, total - torch.mps.driver_allocated_memory()))
    if not hasattr(torch.accelerator, "get_memory_info"):  # as in older releases
        return None
    free, total = torch.accelerator.get_memory_info(device)
    return Memory(int(total), int(free))


def native(device: Device) -> torch.device:
    """The device as torch knows it; every logical CPU is the one CPU."""
    return torch.device("cpu") if device.kind == "cpu" else torch.device(str(device))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def threads() -> int:
    """How many threads a step has on the CPU, in this thread."""
    return torch.get_num_threads()


def use_threads(count: int) -> None:
    """Have so many threads for the steps of this thread, and of threads that are new."""
    torch.set_num_threads(count)
