"""Fleets on disk: stacked safetensors, a file per group, and a JSON manifest.

The weights of a group are in `group-N`, a row for each member. The training state of members that have taken steps
is in `optimizer-N`, also a row for each. Their recipes are in the manifest.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from modelfleet import frameworks
from modelfleet.argument_checks import check_path
from modelfleet.each import Each, per_member
from modelfleet.errors import InputError, StoreError
from modelfleet.formatting import without_period
from modelfleet.frameworks.model_building import build_model, check_factory, is_made
from modelfleet.frameworks.stacked import by_part, by_path
from modelfleet.lanes import saved_state
from modelfleet.lanes.saved_state import TrainingState
from modelfleet.members import Member
from modelfleet.recipe import NUMBERS, Recipe
from modelfleet.store import Saved, read_folder, recipe_json, write_folder
from modelfleet.store.json_schema import check
from modelfleet.store.manifest import plain
from modelfleet.trees import leaves
from modelfleet.types import Json, Model, Tensor
from modelfleet.unknown_names import unknown

Origin: TypeAlias = dict[str, Any]
"""Origin of a member: its "factory", as `module:name` or None, and the "arguments" of the factory."""

Trained: TypeAlias = tuple[Sequence[str], TrainingState]
"""Training state of some members, and their names."""

Factory: TypeAlias = Callable[..., Model] | Mapping[str, Callable[..., Model] | Model] | Each | None
"""Factory for all members, or for each member a factory or a model to fill. None to import the saved one."""

_Place: TypeAlias = tuple[str, str]  # a data file, and the framework whose tensors it has

KIND = "fleet"
UNTRAINED = TrainingState({}, np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
_COUNT = range(2**63)  # whole numbers that fit a signed integer of every framework
_NUMBER = (float, str, None, {"$each?": [[(float, str, None, {str: object})]]})  # of a recipe: anything but true
_RECIPE = {f"{name}?": _NUMBER for name in NUMBERS}
_MEMBER = {  # the schema of a member's entry in the manifest
    "name": str,
    "seed": _COUNT,
    "framework": str,
    "file": str,
    "row": int,
    "class": str,
    "factory": (str, None),
    "arguments": (None, {str: object}),
    # Since recipes and training states are saved:
    "recipe?": (int, None),
    "compiled?": (None, {"config?": {str: object}, "lost?": {str: object}}),
    "training?": (None, {"file": str, "row": int, "steps": _COUNT, "epochs": _COUNT}),
}
_FLEET = {"seed": int, "members": [_MEMBER], "recipe?": (int, None), "recipes?": [_RECIPE]}


@dataclass(frozen=True)
class SavedFleet:
    """Contents of a saved fleet: `save` writes them, and `read` returns them."""

    members: Mapping[str, Member]
    seed: int
    origins: Mapping[str, Origin]
    recipes: Mapping[str, Recipe | None]
    recipe: Recipe | None
    """Recipe for members that join later."""
    trained: Sequence[Trained] | None
    """Training state of the members that have one. None if it is not saved."""
    compiled: Mapping[str, dict[str, Json]] = field(default_factory=dict)
    """How models that hold their own optimizers were compiled. `save` reads it from the models."""


def save(given: str | Path, fleet: SavedFleet) -> None:
    """Save a fleet in a folder. Members of one structure share a file, in which each has a row."""
    check_path("save: folder", given)
    folder = Path(given)
    members, origins = fleet.members, fleet.origins
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
    for number, together in enumerate(_by_form(fleet)):
        file, names = f"optimizer-{number}", [name for own, _ in together for name in own]
        framework = members[names[0]].framework
        state = saved_state.join([one for _, one in together], framework.arrays.concatenate)
        files[file], writers[file] = by_path(state.state), framework.files
        for row, name in enumerate(names):
            counts = {"steps": int(state.steps[row]), "epochs": int(state.epochs[row])}
            listed[name]["training"] = {"file": file, "row": row, **counts}
    kept = dict(fleet.recipes)
    for name, member in members.items():
        if _own_training(member) is not None and member.model.compiled:
            listed[name]["compiled"], outdated = _compiled(member, kept[name])
            kept[name] = None if outdated else kept[name]
    known = {id(recipe): recipe for recipe in (fleet.recipe, *kept.values()) if recipe is not None}
    numbers = {key: number for number, key in enumerate(known)}
    for name, entry in listed.items():
        entry["recipe"] = numbers.get(id(kept[name]))
    manifest = {
        "seed": fleet.seed,
        "members": [listed[name] for name in members],
        "recipe": numbers.get(id(fleet.recipe)),
        "recipes": [recipe_json.encode(recipe) for recipe in known.values()],
    }
    write_folder(folder, files, manifest, kind=KIND, writer=writers, by_row=True)


def _own_training(member: Member) -> Any:
    """Return the adapter's `own_training`; None if its models don't hold their own optimizers."""
    return getattr(member.framework, "own_training", None)


def _by_form(fleet: SavedFleet) -> Iterable[Sequence[Trained]]:
    """Return the training states that can share a file together."""
    if fleet.trained is None:
        return []
    trained: list[Trained] = []
    steps = {name: (state, row) for names, state in fleet.trained for row, name in enumerate(names)}
    for name, member in fleet.members.items():
        own = _own_training(member)
        if own is None:
            continue
        state, row = steps.get(name, (UNTRAINED, 0))
        optimizer = own.optimizer_state(member.model)
        if name in steps or optimizer:
            state = state.row(row)
            trained.append(
                ([name], replace(state, state=state.state | ({"optimizer": optimizer} if optimizer else {})))
            )
    trained += [(names, state) for names, state in fleet.trained if _own_training(fleet.members[names[0]]) is None]
    by_form: dict[object, list[Trained]] = {}
    for names, state in trained:
        by_form.setdefault((fleet.members[names[0]].framework.NAME, state.form), []).append((names, state))
    return by_form.values()


def _compiled(member: Member, recipe: Recipe | None) -> tuple[dict[str, Json], bool]:
    """Return how a model was compiled, and True if that was not by its recipe."""
    own = _own_training(member)
    lost = own.unsaved(member.model)
    try:
        if not lost:
            return {"config": plain(own.config_of(member.model))}, False
    except StoreError as error:
        return {"lost": {"compile": recipe_json.left_out(without_period(error))}}, True
    given = [] if recipe is None else leaves([recipe.optimizer, recipe.loss, recipe.metrics])
    outdated = any(all(value is not one for one in given) for value in lost.values())
    return {"lost": {name: recipe_json.left_out(value) for name, value in lost.items()}}, outdated


def check_manifest(folder: Path, manifest: Mapping[str, Json]) -> None:
    """Raise `StoreError` if a manifest does not describe a fleet as `save` writes it."""
    try:
        check(manifest, _FLEET, "the manifest")
        names: set[str] = set()
        rows = {name: _rows_of(spec) for name, spec in manifest["files"].items()}
        for entry in manifest["members"]:
            name = entry["name"]
            if not name.strip() or name in names:
                raise ValueError(f"it has two members named {name!r}" if name in names else "a name is empty")
            names.add(name)
            for place, kind in ((entry, "group-"), (entry.get("training"), "optimizer-")):
                if place is not None:
                    _check_row(name, place["file"], place["row"], rows)
                    if not place["file"].startswith(kind):
                        raise ValueError(f"{place['file']!r} is no {kind}file, which member {name!r} needs")
        for number in (manifest.get("recipe"), *(entry.get("recipe") for entry in manifest["members"])):
            if number is not None and not 0 <= number < len(manifest.get("recipes", [])):
                raise ValueError(f"it has no recipe {number}")
        if not names:
            raise ValueError("it has no members")
    except ValueError as error:
        raise StoreError(f"{folder} has a manifest that is not a fleet's: {error}. Load another copy.") from error


def _rows_of(file: Mapping[str, Json]) -> int | None:
    """Return the rows of a data file's shortest tensor; None if it has no tensors."""
    return min((len(spec["shape"]) and spec["shape"][0] for spec in file["tensors"].values()), default=None)


def _check_row(name: str, file: str, row: int, files: Mapping[str, int | None]) -> None:
    if file not in files:
        raise ValueError(f"it has no data file {file!r} for member {name!r}")
    rows = files[file]
    if row < 0 or (rows is not None and row >= rows):
        raise ValueError(f"the data file of member {name!r} has no row {row}")


def read(
    given: str | Path,
    factory: Factory,
    allow_import: bool,
    members: Sequence[str] | None,
    *,
    verify: bool = True,
) -> SavedFleet:
    """Return a saved fleet, or some of its members.

    Args:
        given: The folder that `save` wrote.
        factory: Makes the models to fill with weights.
        allow_import: Allow to import and call the factory that the folder names.
        members: The members to read; None for all.
        verify: Compare checksums.

    Raises:
        StoreError: If the folder can't be read, or does not fit the models of the factory.
        InputError: If a member does not exist.
    """
    check_path("load: folder", given)
    if members is not None and (isinstance(members, str) or not isinstance(members, Iterable)):
        raise InputError(f"load: members is {members!r}, expected a list of names.")
    folder = Path(given)
    built: dict[str, tuple[dict[str, Json], Model]] = {}  # so that reading again builds no model twice
    factories: dict[str, Any] = {}  # by member

    def model_of(entry: dict[str, Json]) -> Model:
        known = {key: entry[key] for key in ("framework", "factory", "arguments", "seed")}
        name = entry["name"]
        if name not in built or built[name][0] != known:
            built[name] = known, _build(folder, entry, factories[name], allow_import)
        return built[name][1]

    def read_all(saved: Saved) -> SavedFleet:
        check_manifest(folder, saved.manifest)
        entries = {entry["name"]: entry for entry in saved.manifest["members"]}
        chosen = list(entries) if members is None else members
        for name in chosen:
            if name not in entries:
                raise unknown("member", name, entries)
        factories.update(_by_member(factory, chosen, entries))
        known = [recipe_json.decode(own, allow_import=allow_import) for own in saved.manifest.get("recipes", [])]
        found: dict[str, Member] = {}
        trained: list[Trained] = []
        weights = _rows(saved, [entries[name] for name in chosen])
        training = [entries[name] for name in chosen if entries[name].get("training") is not None]
        states = _rows(saved, training, "training")
        for name in chosen:
            entry = entries[name]
            model = model_of(entry)
            _fill(saved, entry, model, next(weights[_place(entry)]))
            found[name] = Member(name, model, entry["seed"], frameworks.adapter(entry["framework"]))
            if entry.get("training") is not None:
                trained.append(([name], _training(entry["training"], next(states[_place(entry, "training")]))))
        return SavedFleet(
            found,
            saved.manifest["seed"],
            {
                name: {"factory": entries[name]["factory"], "arguments": entries[name]["arguments"] or {}}
                for name in found
            },
            {name: _chosen(known, entries[name].get("recipe")) for name in found},
            _chosen(known, saved.manifest.get("recipe")),
            trained,
            {name: entries[name]["compiled"] for name in found if entries[name].get("compiled")},
        )

    return read_folder(folder, read_all, kind=KIND, verify=verify)


def _by_member(factory: Factory, chosen: Sequence[str], known: Collection[str]) -> dict[str, Any]:
    """Return each member's factory, or the model to fill. A mapping may name members that are not to be read.

    Raises:
        InputError: There is none for a member, or it is neither a factory nor a model.
    """
    if not isinstance(factory, Each | Mapping):
        if factory is not None:
            check_factory(factory, " To fill models, give one for each member: factory={name: model}.")
        return dict.fromkeys(chosen, factory)
    given = factory if isinstance(factory, Each) else Each(factory)
    if isinstance(given.values, dict):
        given = Each({name: own for name, own in given.values.items() if name in chosen or name not in known})
    found = dict(zip(chosen, per_member(given, chosen, "factory"), strict=True))
    for own in found.values():
        if not is_made(own):
            check_factory(own)
    return found


def _build(folder: Path, entry: Mapping[str, Json], factory: Any, allow_import: bool) -> Model:
    """Build a member's model, without its saved weights. A model that is given in place of a factory is used."""
    name = entry["name"]
    if entry["framework"] not in frameworks.ADAPTERS:
        raise StoreError(
            f"member {name!r} of {folder} is of {entry['framework']!r}, which this version of modelfleet does not "
            f"know. Upgrade modelfleet."
        )
    framework = frameworks.adapter(entry["framework"])
    if is_made(factory):
        model = factory
    else:
        make = _factory(folder, entry, factory, allow_import)
        model = build_model(make, entry["arguments"], entry["seed"], name)
    if not framework.is_model(model):
        raise StoreError(
            f"the factory made a {type(model).__name__} for member {name!r} of {folder}, which was of "
            f"{framework.NAME}. {_advice(name)}"
        )
    return model


def _rows(
    saved: Saved, entries: Iterable[Mapping[str, Json]], part: str | None = None
) -> dict[_Place, Iterator[dict[str, Tensor]]]:
    """Return, by place, the rows of some members in their order. Nothing is read before the first is taken.

    The file and the row are in a `part` of each entry, or in the entry itself.
    """
    numbers: dict[_Place, list[int]] = {}
    for entry in entries:
        numbers.setdefault(_place(entry, part), []).append((entry if part is None else entry[part])["row"])

    def rows(place: _Place) -> Iterator[dict[str, Tensor]]:
        file, framework = place
        yield from saved.rows(file, numbers[place], frameworks.adapter(framework).files)

    return {place: rows(place) for place in numbers}


def _place(entry: Mapping[str, Json], part: str | None = None) -> _Place:
    return (entry if part is None else entry[part])["file"], entry["framework"]


def _fill(saved: Saved, entry: Mapping[str, Json], model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Give a model the weights of its row."""
    difference = frameworks.adapter(entry["framework"]).fill(model, tensors)
    if difference:
        raise StoreError(
            f"member {entry['name']!r} of {saved.folder} does not fit the model that the factory made: "
            f"{difference}. {_advice(entry['name'])}"
        )


def _advice(name: str) -> str:
    own = f"{{{name!r}: make, …}}"
    return f"Give the factory that makes its model. If members are unlike, give each its own: {own}."


def _chosen(known: Sequence[Recipe], number: int | None) -> Recipe | None:
    return None if number is None else known[number]


def _training(place: Mapping[str, Json], tensors: Mapping[str, Tensor]) -> TrainingState:
    """Return the training state of a member from its row."""
    state = by_part({path: tensor[None] for path, tensor in tensors.items()})
    return TrainingState(state, np.array([place["steps"]]), np.array([place["epochs"]]))


def _factory(folder: Path, entry: Mapping[str, Json], factory: Any, allow_import: bool) -> Callable[..., Model]:
    if entry["arguments"] is None:
        raise StoreError(
            f"member {entry['name']!r} of {folder} was built with arguments that JSON can't hold. "
            f"Build its model, and give it in place of the factory: "
            f"mf.load(folder, factory={{{entry['name']!r}: model, …}})."
        )
    return _imported(folder, entry, allow_import) if factory is None else factory


def _imported(folder: Path, entry: Mapping[str, Json], allow_import: bool) -> Callable[..., Model]:
    path = entry["factory"]
    if path is None:
        raise StoreError(
            f"{folder} does not say how to build member {entry['name']!r} (a {entry['class']}). "
            f"Give load a factory: mf.load(folder, factory=make_net). If members are unlike, give a factory or a "
            f"model for each: factory={{{entry['name']!r}: make_net, …}}."
        )
    if not allow_import:
        raise StoreError(
            f"{folder} asks to import and call {path!r}. Give load a factory, or, if you trust the folder, "
            f"mf.load(folder, allow_import=True)."
        )
    try:
        return recipe_json.imported(path)
    except (ImportError, AttributeError) as error:
        raise StoreError(
            f"the factory {path!r} of {folder} can't be imported: {without_period(error)}. Give load a factory."
        ) from error


def _as_json(arguments: Mapping[str, object]) -> dict[str, Json] | None:
    try:
        return plain(dict(arguments), "arguments")
    except Exception:  # JSON can't hold them
        return None
