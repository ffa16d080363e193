"""Manifests that somebody has edited: with a checksum that fits, so that only what they say can be wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelfleet.store.manifest import encode


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a folder's manifest says."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    change(manifest)
    path.write_bytes(encode(manifest))


def put(*path: Any, value: object) -> Callable[[dict[str, Any]], None]:
    """Set what is found by these keys."""

    def change(manifest: dict[str, Any]) -> None:
        inner: Any = manifest
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return change


def older(folder: Path) -> None:
    """Make a folder one of the version that had no checksums."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    manifest["version"] = 1
    for entry in manifest["files"].values():
        for key in ("checksum", "header", "rows"):
            entry.pop(key, None)
    path.write_text(json.dumps(manifest))
