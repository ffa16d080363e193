"""Tables of what a saved folder holds. Only its manifest is read, so no framework is needed."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from modelfleet import checkpoints, saving
from modelfleet.errors import StoreError
from modelfleet.formatting import count, size, some
from modelfleet.graph import checkpoints as graph_checkpoints
from modelfleet.graph import saving as graph_saving
from modelfleet.history import History
from modelfleet.store import read_manifest, recipe_json
from modelfleet.types import Json

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_MAX_LISTED = 10  # members listed by name


def describe(folder: Path) -> "RenderableType":
    """Return the tables for a folder that `fleet.save`, a graph's `save` or a `Checkpoint` wrote.

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
    if manifest["kind"] == graph_saving.KIND:
        graph_saving.check_manifest(folder, manifest)
        return _graph(folder, manifest)
    if manifest["kind"] == graph_checkpoints.KIND:
        graph_checkpoints.check_manifest(folder, manifest)
        return _graph_checkpoint(folder, manifest)
    raise StoreError(f"{folder} holds a {manifest['kind']}, which this version does not know. Upgrade modelfleet.")


def _fleet(folder: Path, manifest: Mapping[str, Json]) -> "RenderableType":
    from rich.console import Group

    members = manifest["members"]
    groups = _table("group", "members", "class", "numbers per member", "size")
    states = {member["training"]["file"] for member in members if member.get("training")}
    for name, entry in manifest["files"].items():
        if name in states:
            continue
        own = [member for member in members if member["file"] == name]
        numbers = sum(prod(tensor["shape"][1:]) for tensor in entry["tensors"].values())
        kinds = dict.fromkeys(str(member["class"]).rpartition(":")[2] for member in own)
        _add(groups, name, f"{len(own):,}", ", ".join(kinds), f"{numbers:,}", size(entry["bytes"]))

    listed = _table("member", "group", "row", "built by", "with", "trained")
    for member in members[:_MAX_LISTED]:
        arguments = member["arguments"]
        given = "not kept: JSON can't hold them" if arguments is None else _arguments(arguments)
        _add(
            listed,
            member["name"],
            member["file"],
            str(member["row"]),
            member["factory"] or "–",
            given,
            _trained(member),
        )
    more = len(members) - _MAX_LISTED
    total = sum(entry["bytes"] for entry in manifest["files"].values())
    frameworks = ", ".join(dict.fromkeys(member["framework"] for member in members))
    title = (
        f"{folder}: a fleet of {count(len(members), 'member')} ({frameworks}), {size(total)}, "
        f"seed {manifest['seed']}"
    )
    notes = [f"… and {more:,} more"] if more > 0 else []
    for number, recipe in enumerate(manifest.get("recipes", [])):
        own = [member["name"] for member in members if member.get("recipe") == number]
        if own:
            notes.append(f"compiled with {recipe_json.describe(recipe)}: {some(own)}")
    own = [member["name"] for member in members if "config" in (member.get("compiled") or {})]
    if own:
        notes.append(f"compiled by their own compile: {some(own)}")
    taken = sum(manifest["files"][name]["bytes"] for name in states)
    trained = sum(member.get("training") is not None for member in members)
    notes.append(
        f"optimizer state of {count(trained, 'member')}, {size(taken)}" if trained else "no optimizer state"
    )
    return Group(_text(title), groups, listed, *map(_text, notes))


def _checkpoint(folder: Path, manifest: Mapping[str, Json]) -> "RenderableType":
    from rich.console import Group

    history = History.from_dict(manifest["history"])
    epochs = max(max(own) for own in manifest["run"]["epochs"])
    lanes = _table("lane", "members", "training", "failed", "size")
    for number, lane in enumerate(manifest["lanes"]):
        taken = manifest["files"][f"lane-{number}"]["bytes"]
        failed = sum(name in history.failed for name in lane["members"])
        _add(lanes, str(number), some(lane["members"]), f"{sum(lane['on']):,}", f"{failed:,}", size(taken))
    title = _checkpoint_title(folder, manifest, "a checkpoint", epochs, max(manifest["positions"]))
    return Group(_text(title), lanes, _text(repr(history)))


def _checkpoint_title(folder: Path, manifest: Mapping[str, Json], what: str, epochs: int, position: int) -> str:
    within = f", {position:,} steps into the next" if position else ""
    total = sum(entry["bytes"] for entry in manifest["files"].values())
    return (
        f"{folder}: {what} after epoch {manifest['epoch']:,} of {epochs:,}{within} "
        f"(step {manifest['step']:,}), {size(total)}"
    )


def _graph(folder: Path, manifest: Mapping[str, Json]) -> "RenderableType":
    from rich.console import Group

    total = sum(entry["bytes"] for entry in manifest["files"].values())
    nodes = manifest["nodes"]
    title = (
        f"{folder}: a {manifest['graph']} of {count(len(nodes), 'node')} ({', '.join(nodes)}), {size(total)}, "
        f"seed {manifest['seed']}, {count(manifest['epochs'], 'epoch')} trained"
    )
    recipe = manifest["recipe"]
    notes = [] if recipe is None else [f"compiled with {recipe_json.describe(recipe)}"]
    return Group(_text(title), _tensors(manifest), *map(_text, notes))


def _graph_checkpoint(folder: Path, manifest: Mapping[str, Json]) -> "RenderableType":
    from rich.console import Group

    what = f"a checkpoint of a {manifest['graph']}"
    title = _checkpoint_title(folder, manifest, what, manifest["epochs"], manifest["position"])
    history = History.from_dict(manifest["history"])
    return Group(_text(title), _tensors(manifest), _text(repr(history)))


def _tensors(manifest: Mapping[str, Json]) -> "Table":
    """Return the table of a graph's tensors, by what they are."""
    table = _table("part", "tensors", "numbers")
    shapes: dict[str, list[int]] = {}
    for path, tensor in manifest["files"][graph_saving.STATE]["tensors"].items():
        shapes.setdefault(path.partition("/")[0], []).append(prod(tensor["shape"]))
    for part, sizes in shapes.items():
        _add(table, part, f"{len(sizes):,}", f"{sum(sizes):,}")
    return table


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


def _trained(member: Mapping[str, Json]) -> str:
    state = member.get("training")
    return "–" if state is None else f"{count(state['epochs'], 'epoch')}, {count(state['steps'], 'step')}"


def _arguments(arguments: Mapping[str, Json]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "–"
