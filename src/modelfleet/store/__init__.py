"""Keep stacked tensors and JSON in a folder that is whole at every moment."""

from modelfleet.store.folder import Files, read_file, read_manifest, read_row, write_folder

__all__ = ["Files", "read_file", "read_manifest", "read_row", "write_folder"]
