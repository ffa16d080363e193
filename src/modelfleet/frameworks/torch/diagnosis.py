"""What `modelfleet doctor` asks of torch alone."""

from pathlib import Path


def cache_folder() -> Path:
    """Where torch keeps compiled programs."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())
