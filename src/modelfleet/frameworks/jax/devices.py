"""Devices that JAX can use."""

import jax

from modelfleet.devices import Device, Memory, chosen

_PLATFORMS = {"gpu": "cuda", "cuda": "cuda", "rocm": "cuda", "METAL": "mps"}  # modelfleet's names by JAX's


def choose(wanted: tuple[Device, ...] | None) -> tuple[Device, ...]:
    """Return the devices to use: those wanted, if they exist; for None, all accelerators or else the CPU."""
    return chosen(wanted, accelerators(), "JAX")


def accelerators() -> list[Device]:
    """Return every accelerator that JAX can use in this process."""
    found = [device for device in jax.devices() if device.platform in _PLATFORMS]
    return [Device(_PLATFORMS[device.platform], number) for number, device in enumerate(found)]


def memory(device: jax.Device) -> Memory | None:
    """Return the memory of an accelerator that JAX may use; None for the CPU, which uses the host's."""
    known = None if device.platform == "cpu" else device.memory_stats()
    if not known or "bytes_limit" not in known:
        return None
    return Memory(int(known["bytes_limit"]), int(known["bytes_limit"] - known["bytes_in_use"]))


def hardware(device: jax.Device) -> str | None:
    """Return the name of an accelerator's model; None for the CPU."""
    return None if device.platform == "cpu" else str(device.device_kind)


def native(device: Device) -> jax.Device:
    """Return a device as JAX names it. Logical CPUs that JAX does not have are its first CPU."""
    if device.kind == "cpu":
        cpus = jax.devices("cpu")
        return cpus[device.index] if device.index is not None and device.index < len(cpus) else cpus[0]
    found = [one for one in jax.devices() if _PLATFORMS.get(one.platform) == device.kind]
    return found[device.index or 0]
