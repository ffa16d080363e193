"""Devices that torch can use."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from modelfleet.devices import Device, Memory, chosen

# Messages of torch's allocators, of CUDA, its libraries and SYCL, and of C++.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "_ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "OUT_OF_DEVICE_MEMORY",
    "OUT_OF_HOST_MEMORY",
    "cudaErrorMemoryAllocation",
    "std::bad_alloc",
    "Cannot allocate memory",
)


def choose(wanted: tuple[Device, ...] | None) -> tuple[Device, ...]:
    """Return the devices to use: those wanted, if they exist; for None, all accelerators or else the CPU.

    An accelerator without an index is the current one: torch's tensors say which device they are on, and "cuda" is
    not equal to "cuda:0".
    """
    return tuple(
        Device(device.kind, torch.accelerator.current_device_index())
        if device.kind != "cpu" and device.index is None
        else device
        for device in chosen(wanted, accelerators(), "torch")
    )


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
    # torch keeps freed memory for its next tensors. The driver counts it as used.
    kept = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return Memory(int(total), int(free) + max(0, kept))


def hardware(device: torch.device) -> str | None:
    """Return the name of an accelerator's model, such as "NVIDIA A100-SXM4-40GB"; None for the CPU."""
    return None if device.type == "cpu" else _model(device)


@cache  # every step asks
def _model(device: torch.device) -> str:
    find = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return device.type if find is None else str(find(device))


def native(device: Device) -> torch.device:
    """Return a device as torch names it. Every logical CPU is the one CPU."""
    return torch.device("cpu") if device.kind == "cpu" else torch.device(str(device))


def new_stream(device: torch.device) -> torch.Stream | None:
    """Return a new stream of an accelerator; None if its kind has none, like Apple's."""
    try:
        return torch.Stream(device)
    except (RuntimeError, NotImplementedError):
        return None


@contextmanager
def in_order(stream: torch.Stream) -> Iterator[None]:
    """Give an accelerator its work on a stream within this context, in order with the work on the caller's.

    The stream waits for what the caller's was given before, such as a batch. At the end the caller's waits for
    this one, so that memory that was used here may be read, written and freed there. The host waits for neither.
    """
    callers = torch.accelerator.current_stream(stream.device)
    stream.wait_stream(callers)
    try:
        with stream:
            yield
    finally:
        callers.wait_stream(stream)


def out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that the device is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's generator of a device within this context, and restore it afterwards."""
    if device.type == "cpu":
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)
        return
    module = torch.get_device_module(device)
    before = module.get_rng_state(device)
    try:
        with torch.accelerator.device_index(device.index):
            module.manual_seed(seed)
        yield
    finally:
        module.set_rng_state(before, device)


@contextmanager
def restoring_generators(*devices: torch.device) -> Iterator[None]:
    """Restore torch's generators of the CPU and of some devices after this context."""
    indices = sorted({device.index or 0 for device in devices if device.type != "cpu"})
    kind = next((device.type for device in devices if device.type != "cpu"), None)
    with torch.random.fork_rng(devices=indices, device_type=kind or "cuda"):
        yield


def threads() -> int:
    """Return the number of threads that a step uses on the CPU, if called from this thread."""
    return torch.get_num_threads()


def use_threads(count: int) -> None:
    """Use `count` threads for steps that are called from this thread, and from new threads."""
    torch.set_num_threads(count)
