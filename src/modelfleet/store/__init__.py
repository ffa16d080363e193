"""Keep stacked tensors and JSON in a folder that is whole at every moment, and notice when it was damaged."""

from modelfleet.store.folder import is_unused, tidy, write_folder
from modelfleet.store.reading import Files, Saved, read_folder, read_manifest

__all__ = ["Files", "Saved", "is_unused", "read_folder", "read_manifest", "tidy", "write_folder"]
