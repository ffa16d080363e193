"""Facts about torch for `modelfleet doctor`."""

from pathlib import Path


def cache_folder() -> Path:
    """Return the folder in which torch keeps compiled programs."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())
