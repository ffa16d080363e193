"""What `modelfleet doctor` asks of torch."""

from pathlib import Path

from modelfleet.devices import Device
from modelfleet.frameworks.torch.devices import accelerators


def devices() -> list[str]:
    """Every device that a fleet can be given."""
    return [str(device) for device in (Device("cpu"), *accelerators())]


def cache_folder() -> Path:
    """Where torch keeps compiled programs."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())
