"""Save stacked tensors and JSON to a folder that is complete at every moment, and detect damage to it."""

from modelfleet.store.folder import is_unused, tidy, write_folder
from modelfleet.store.reading import Files, Saved, read_folder, read_manifest

__all__ = ["Files", "Saved", "is_unused", "read_folder", "read_manifest", "tidy", "write_folder"]
