"""Loading fleets that `Fleet.save` has saved."""

from collections.abc import Callable, Sequence
from pathlib import Path

from modelfleet import saving
from modelfleet.fleet import Fleet
from modelfleet.types import Model


def load(
    folder: str | Path,
    factory: Callable[..., Model] | None = None,
    *,
    members: Sequence[str] | None = None,
    allow_import: bool = False,
    devices: str | Sequence[str] = "auto",
    verify: bool = True,
) -> Fleet:
    """Load a fleet that `Fleet.save` has saved.

    Args:
        folder: The folder.
        factory: Makes a model to fill with weights. It gets the keywords that the member was built with.
        members: Load only these, without reading the others.
        allow_import: Import the factory from where the folder says it was, if none is given. This runs code of the
            folder's choice: only for folders you trust.
        devices: See `Fleet`.
        verify: Compare the checksums of what is read.

    Returns:
        The fleet.

    Raises:
        StoreError: The folder is damaged, or holds no fleet.
    """
    models, seed, origins = saving.read(Path(folder), factory, allow_import, members, verify=verify)
    fleet = Fleet(models, seed=seed, devices=devices)
    fleet._exposed.clear()
    fleet._origins = origins
    return fleet
