"""Keep stacked tensors and JSON in a folder that is whole at every moment, and notice when it was damaged."""

from modelfleet.store.folder import write_folder
from modelfleet.store.reading import Files, Saved, read_folder, read_manifest

__all__ = ["Files", "Saved", "read_folder", "read_manifest", "write_folder"]
