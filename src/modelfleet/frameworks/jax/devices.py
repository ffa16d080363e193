"""The devices that JAX sees."""

import jax

from modelfleet.devices import Device, Memory, chosen

_PLATFORMS = {"gpu": "cuda", "cuda": "cuda", "rocm": "cuda", "METAL": "mps"}  # by JAX's names


def choose(wanted: tuple[Device, ...] | None) -> tuple[Device, ...]:
    """The devices to use: those wanted, if they are here; for None all accelerators, or else the CPU."""
    return chosen(wanted, accelerators(), "JAX")


def accelerators() -> list[Device]:
    """Every accelerator that JAX can use in this process."""
    found = [device for device in jax.devices() if device.platform in _PLATFORMS]
    return [Device(_PLATFORMS[device.platform], number) for number, device in enumerate(found)]


def memory(device: jax.Device) -> Memory | None:
    """The memory of an accelerator that JAX may use; None for the CPU, whose memory is the host's."""
    known = None if device.platform == "cpu" else device.memory_stats()
    if not known or "bytes_limit" not in known:
        return None
    return Memory(int(known["bytes_limit"]), int(known["bytes_limit"] - known["bytes_in_use"]))


def native(device: Device) -> jax.Device:
    """The device as JAX knows it; logical CPUs beyond those that JAX was told to make are its first."""
    if device.kind == "cpu":
        cpus = jax.devices("cpu")
        return cpus[device.index] if device.index is not None and device.index < len(cpus) else cpus[0]
    found = [one for one in jax.devices() if _PLATFORMS.get(one.platform) == device.kind]
    return found[device.index or 0]
