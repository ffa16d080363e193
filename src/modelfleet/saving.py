"""Fleets on disk: stacked safetensors, a file per group, and a JSON manifest."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from modelfleet import frameworks
from modelfleet.errors import StoreError, unknown
from modelfleet.members import Member
from modelfleet.store import Saved, read_folder, write_folder
from modelfleet.store.manifest import plain
from modelfleet.store.schema import check
from modelfleet.types import Json, Model
from modelfleet.words import without_period

Origin: TypeAlias = dict[str, Any]
"""How a member was built: its "factory", as `module:name` or None, and the "arguments" of the factory."""

KIND = "fleet"
_MEMBER = {  # the schema of a member's entry in the manifest
    "name": str,
    "seed": int,
    "framework": str,
    "file": str,
    "row": int,
    "class": str,
    "factory": (str, None),
    "arguments": (None, {str: object}),
}


def save(
    folder: Path,
    members: Mapping[str, Member],
    origins: Mapping[str, Origin],
    seed: int,
) -> None:
    """Save every member's weights. Members of one structure share a file, in which each has a row."""
    groups: dict[tuple[str, Any], list[Member]] = {}
    for member in members.values():
        try:
            key = member.framework.NAME, member.framework.weights_key(member.model)
        except StoreError as error:
            raise StoreError(f"member {member.name!r}: {error}") from error
        groups.setdefault(key, []).append(member)
    files, writers, listed = {}, {}, {}
    for number, together in enumerate(groups.values()):
        framework = together[0].framework
        files[f"group-{number}"] = framework.stacked_weights([member.model for member in together])
        writers[f"group-{number}"] = framework.files
        for row, member in enumerate(together):
            origin = origins.get(member.name, {})
            listed[member.name] = {
                "name": member.name,
                "seed": member.seed,
                "framework": framework.NAME,
                "file": f"group-{number}",
                "row": row,
                "class": f"{type(member.model).__module__}:{type(member.model).__qualname__}",
                "factory": origin.get("factory"),
                "arguments": _as_json(origin.get("arguments", {})),
            }
    manifest = {"seed": seed, "members": [listed[name] for name in members]}
    write_folder(folder, files, manifest, kind=KIND, writer=writers, by_row=True)


def check_manifest(folder: Path, manifest: Mapping[str, Json]) -> None:
    """Raise `StoreError` if a manifest does not describe a fleet as `save` writes it."""
    try:
        check(manifest, {"seed": int, "members": [_MEMBER]}, "the manifest")
        names: set[str] = set()
        for entry in manifest["members"]:
            name, file, row = entry["name"], entry["file"], entry["row"]
            if not name.strip() or name in names:
                raise ValueError(f"it has two members named {name!r}" if name in names else "a name is empty")
            names.add(name)
            if file not in manifest["files"]:
                raise ValueError(f"it has no data file {file!r} for member {name!r}")
            rows = [
                len(spec["shape"]) and spec["shape"][0] for spec in manifest["files"][file]["tensors"].values()
            ]
            if not 0 <= row < min(rows, default=row + 1):
                raise ValueError(f"the data file of member {name!r} has no row {row}")
        if not names:
            raise ValueError("it has no members")
    except ValueError as error:
        raise StoreError(f"{folder} has a manifest that is not a fleet's: {error}. Load another copy.") from error


def read(
    folder: Path,
    factory: Callable[..., Model] | None,
    allow_import: bool,
    members: Sequence[str] | None,
    *,
    verify: bool = True,
) -> tuple[dict[str, Model], int, dict[str, Origin]]:
    """Return the models of a saved fleet by name, its seed, and how each model was built.

    Args:
        folder: The folder that `save` wrote.
        factory: Makes a model to fill with weights; None to import the saved one.
        allow_import: Permit to import and call the factory that the folder names.
        members: The members to read; None for all.
        verify: Compare checksums.

    Raises:
        StoreError: If the folder can't be read, or does not fit the models of the factory.
        InputError: If a member does not exist.
    """
    built: dict[str, tuple[dict[str, Json], Model]] = {}  # so that reading again builds no model twice

    def model_of(entry: dict[str, Json]) -> Model:
        known = {key: entry[key] for key in ("framework", "factory", "arguments", "seed")}
        name = entry["name"]
        if name not in built or built[name][0] != known:
            built[name] = known, _build(folder, entry, factory, allow_import)
        return built[name][1]

    def read_all(saved: Saved) -> tuple[dict[str, Model], int, dict[str, Origin]]:
        check_manifest(folder, saved.manifest)
        entries = {entry["name"]: entry for entry in saved.manifest["members"]}
        chosen = list(entries) if members is None else members
        for name in chosen:
            if name not in entries:
                raise unknown("member", name, entries)
        models = {}
        for name in chosen:
            models[name] = model_of(entries[name])
            _fill(saved, entries[name], models[name])
        origins = {
            name: {"factory": entries[name]["factory"], "arguments": entries[name]["arguments"] or {}}
            for name in models
        }
        return models, saved.manifest["seed"], origins

    return read_folder(folder, read_all, kind=KIND, verify=verify)


def _build(
    folder: Path, entry: Mapping[str, Json], factory: Callable[..., Model] | None, allow_import: bool
) -> Model:
    """Build a member's model, without its saved weights."""
    name = entry["name"]
    if entry["framework"] not in frameworks.ADAPTERS:
        raise StoreError(
            f"member {name!r} of {folder} is of {entry['framework']!r}, which this version of modelfleet does not "
            f"know. Upgrade modelfleet."
        )
    framework = frameworks.adapter(entry["framework"])
    make = _factory(folder, entry, factory, allow_import)
    model = frameworks.build(make, entry["arguments"], entry["seed"], name)
    if not framework.is_model(model):
        raise StoreError(
            f"the factory made a {type(model).__name__} for member {name!r} of {folder}, which was of "
            f"{framework.NAME}. Give the factory that the fleet was built with."
        )
    return model


def _fill(saved: Saved, entry: Mapping[str, Json], model: Model) -> None:
    """Give a model the weights of its row."""
    framework = frameworks.adapter(entry["framework"])
    tensors = saved.row(entry["file"], entry["row"], framework.files)
    difference = framework.fill(model, tensors)
    if difference:
        raise StoreError(
            f"member {entry['name']!r} of {saved.folder} does not fit the model that the factory made: "
            f"{difference}. Give the factory that the fleet was built with."
        )


def import_path(factory: Callable[..., Model]) -> str | None:
    """Return `module:name` of a factory that can be imported; None for lambdas and local functions."""
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", "<")
    return None if module in (None, "__main__") or "<" in name else f"{module}:{name}"


def _factory(
    folder: Path, entry: Mapping[str, Json], factory: Callable[..., Model] | None, allow_import: bool
) -> Callable[..., Model]:
    if entry["arguments"] is None:
        raise StoreError(
            f"member {entry['name']!r} of {folder} was built with arguments that JSON can't hold. "
            f"Build the fleet again, and load its weights member by member."
        )
    return _imported(folder, entry, allow_import) if factory is None else factory


def _imported(folder: Path, entry: Mapping[str, Json], allow_import: bool) -> Callable[..., Model]:
    path = entry["factory"]
    if path is None:
        raise StoreError(
            f"{folder} does not say how to build member {entry['name']!r} (a {entry['class']}). "
            f"Give load a factory: mf.load(folder, factory=make_net)."
        )
    if not allow_import:
        raise StoreError(
            f"{folder} asks to import and call {path!r}. Give load a factory, or, if you trust the folder, "
            f"mf.load(folder, allow_import=True)."
        )
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise StoreError(
            f"the factory {path!r} of {folder} can't be imported: {without_period(error)}. Give load a factory."
        ) from error
    return found


def _as_json(arguments: Mapping[str, object]) -> dict[str, Json] | None:
    try:
        return plain(dict(arguments), "arguments")
    except Exception:  # JSON can't hold them
        return None
