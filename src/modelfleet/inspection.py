"""Tables of what a saved folder holds. Only its manifest is read, so no framework is needed."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from modelfleet import checkpoints, saving
from modelfleet.errors import StoreError
from modelfleet.history import History
from modelfleet.store import read_manifest
from modelfleet.types import Json
from modelfleet.words import count, size, some

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_MAX_LISTED = 10  # members listed by name


def describe(folder: Path) -> "RenderableType":
    """Return the tables for a folder that `fleet.save` or a `Checkpoint` wrote.

    Raises:
        StoreError: If the folder is neither, or is damaged.
    """
    manifest = read_manifest(folder, kind=None)
    if manifest["kind"] == saving.KIND:
        saving.check_manifest(folder, manifest)
        return _fleet(folder, manifest)
    if manifest["kind"] == checkpoints.KIND:
        checkpoints.check_manifest(folder, manifest)
        return _checkpoint(folder, manifest)
    raise StoreError(f"{folder} holds a {manifest['kind']}, which this version does not know. Upgrade modelfleet.")


def _fleet(folder: Path, manifest: Mapping[str, Json]) -> "RenderableType":
    from rich.console import Group

    members = manifest["members"]
    groups = _table("group", "members", "class", "numbers per member", "size")
    for name, entry in manifest["files"].items():
        own = [member for member in members if member["file"] == name]
        numbers = sum(prod(tensor["shape"][1:]) for tensor in entry["tensors"].values())
        kinds = dict.fromkeys(str(member["class"]).rpartition(":")[2] for member in own)
        _add(groups, name, f"{len(own):,}", ", ".join(kinds), f"{numbers:,}", size(entry["bytes"]))

    listed = _table("member", "group", "row", "built by", "with")
    for member in members[:_MAX_LISTED]:
        arguments = member["arguments"]
        given = "not kept: JSON can't hold them" if arguments is None else _arguments(arguments)
        _add(listed, member["name"], member["file"], str(member["row"]), member["factory"] or "–", given)
    more = len(members) - _MAX_LISTED
    total = sum(entry["bytes"] for entry in manifest["files"].values())
    frameworks = ", ".join(dict.fromkeys(member["framework"] for member in members))
    title = (
        f"{folder}: a fleet of {count(len(members), 'member')} ({frameworks}), {size(total)}, "
        f"seed {manifest['seed']}"
    )
    return Group(_text(title), groups, listed, *([_text(f"… and {more:,} more")] if more > 0 else []))


def _checkpoint(folder: Path, manifest: Mapping[str, Json]) -> "RenderableType":
    from rich.console import Group

    history = History.from_dict(manifest["history"])
    epochs = max(max(own) for own in manifest["run"]["epochs"])
    lanes = _table("lane", "members", "training", "failed", "size")
    for number, lane in enumerate(manifest["lanes"]):
        taken = manifest["files"][f"lane-{number}"]["bytes"]
        failed = sum(name in history.failed for name in lane["members"])
        _add(lanes, str(number), some(lane["members"]), f"{sum(lane['on']):,}", f"{failed:,}", size(taken))
    position = max(manifest["positions"])
    within = f", {position:,} steps into the next" if position else ""
    total = sum(entry["bytes"] for entry in manifest["files"].values())
    title = (
        f"{folder}: a checkpoint after epoch {manifest['epoch']:,} of {epochs:,}{within} "
        f"(step {manifest['step']:,}), {size(total)}"
    )
    return Group(_text(title), lanes, _text(repr(history)))


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _add(table: "Table", *cells: str) -> None:
    table.add_row(*map(_text, cells))  # as plain text, since a member's name may have brackets


def _text(text: str) -> "RenderableType":
    from rich.text import Text

    return Text(text)


def _arguments(arguments: Mapping[str, Json]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "–"
