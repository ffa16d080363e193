"""Checkpoints of a running fit of a graph.

They say nothing of devices or cuts, so a run may continue on others.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from modelfleet.callbacks import Callback, Checkpoint, Snapshot
from modelfleet.errors import StoreError
from modelfleet.feeds import Feed
from modelfleet.fingerprints import fingerprint
from modelfleet.frameworks import files, global_generators
from modelfleet.frameworks.stacked import PARTS, WEIGHTS
from modelfleet.graph.units import Units
from modelfleet.history import History
from modelfleet.store import Saved, is_unused, read_folder, tidy, write_folder
from modelfleet.store.json_schema import check
from modelfleet.types import Array, Arrays, Json, ScheduleLike, State

if TYPE_CHECKING:
    from modelfleet.graph.fitting import GraphFit

KIND = "graph-checkpoint"
MAX_TEXT = 200  # characters of a setting in an error
STATE, RANDOM = "state", "random"  # data files
_SCHEMA = {
    "graph": str,
    "run": {str: object},
    "seed": int,
    "epoch": int,
    "step": int,
    "position": int,
    "epochs_before": int,
    "epochs": int,
    "history": {str: object},
    "sums": {str: {str: (float, str)}},
    "schedules": object,
    "callbacks": [object],
}

Paths = Mapping[str, Mapping[str, str]]
"""By node, names of parameters and buffers in the undivided model, where there is one."""


@dataclass(frozen=True)
class Resumed:
    """What a fit continues from."""

    states: dict[str, State]
    schedules: Json
    epochs_before: int
    """Epochs of earlier fits, on which shuffles depend."""


def save(folder: Path, fit: "GraphFit") -> None:
    """Save the run as it is now. If that fails, the checkpoint that was there before stays whole."""
    snapshots = {
        f"callback-{number}": {
            f"{name}/{path}": array
            for name, snapshot in callback.arrays().items()
            for path, array in by_global_path(snapshot, fit.paths, fit.fleets).items()
        }
        for number, callback in enumerate(fit.callbacks)
    }
    tensors = {STATE: by_global_path(fit.states, fit.paths, fit.fleets), RANDOM: fit.generators}
    tensors |= {name: own for name, own in snapshots.items() if own}
    manifest = {
        "graph": fit.name,
        "run": fit.identity,
        "seed": fit.seed,
        "epoch": fit.epoch,
        "step": fit.step,
        "position": fit.position,
        "epochs_before": fit.epochs_before,
        "epochs": fit.epochs,
        "history": fit.history.to_dict(),
        "sums": fit.sums,
        "schedules": fit.schedules_state,
        "callbacks": [callback.state() for callback in fit.callbacks],
    }
    write_folder(folder, tensors, manifest, kind=KIND, writer=files)


def folder_to_resume(callbacks: list[Callback]) -> Checkpoint | None:
    """Return the first callback whose folder has a checkpoint to continue from."""
    for callback in callbacks:
        if isinstance(callback, Checkpoint) and callback.resume:
            folder = callback.folder
            if folder.is_dir() and not is_unused(folder):
                return callback
    return None


def resume(fit: "GraphFit", own: Mapping[str, State]) -> Resumed | None:
    """Bring a fit to where a checkpoint was taken, if there is one.

    Args:
        fit: The fit.
        own: The state of the nodes as it is now, which says what they need.

    Raises:
        StoreError: The checkpoint is damaged, or of another graph. It is not overwritten.
    """
    callback = folder_to_resume(fit.callbacks)
    if callback is None:
        return None
    folder = callback.folder
    found = read_folder(folder, lambda saved: _read(saved, fit, own), kind=KIND, verify=callback.verify)
    if found is None:
        return None
    tidy(folder)
    manifest, states, random, snapshots = found
    for number, (one, state) in enumerate(zip(fit.callbacks, manifest["callbacks"], strict=True)):
        one.restore_state(state)
        if number in snapshots:
            one.restore_arrays(snapshots[number])
    fit.epoch, fit.step, fit.position = manifest["epoch"], manifest["step"], manifest["position"]
    fit.history = History.from_dict(manifest["history"])
    fit.sums = _sums(manifest["sums"], fit.sums)
    global_generators.restore(random)
    return Resumed(states, manifest["schedules"], manifest["epochs_before"])


def check_manifest(folder: Path, manifest: Mapping[str, Json]) -> None:
    """Raise StoreError for a manifest that is not one of a graph's checkpoint."""
    try:
        check(manifest, _SCHEMA, "the manifest")
    except ValueError as error:
        raise StoreError(f"{folder} has a manifest that is not a graph's checkpoint: {error}.") from error


def _read(
    saved: Saved, fit: "GraphFit", own: Mapping[str, State]
) -> tuple[Mapping[str, Json], dict[str, State], Arrays, dict[int, Mapping[str, Snapshot]]] | None:
    folder, manifest = saved.folder, saved.manifest
    check_manifest(folder, manifest)
    before = manifest["epochs_before"]
    if before < fit.epochs_before and before + manifest["epoch"] <= fit.epochs_before:
        return None  # of an earlier fit, which is over
    for key, here in (("seed", fit.seed), ("epochs_before", fit.epochs_before)):
        if manifest[key] != here:
            raise StoreError(
                f"{folder} holds a checkpoint of another run: its {key} is {manifest[key]}, here it is {here}. "
                "Give another folder, or delete this one."
            )
    _refuse_another_run(folder, manifest["run"], fit.identity)
    if len(manifest["callbacks"]) != len(fit.callbacks):
        raise StoreError(
            f"{folder} holds a checkpoint of another run: it has {len(manifest['callbacks'])} callbacks, this "
            f"fit has {len(fit.callbacks)}. Give another folder, or delete this one."
        )
    weights = {node: {part: own for part, own in state.items() if part in WEIGHTS} for node, state in own.items()}
    snapshots: dict[int, Mapping[str, Snapshot]] = {}
    for number in range(len(fit.callbacks)):
        if f"callback-{number}" in manifest["files"]:  # of the graph, which is the only member
            tensors = saved.tensors(f"callback-{number}", files)
            tensors = {path.partition("/")[2]: array for path, array in tensors.items()}
            snapshots[number] = {fit.name: by_node(tensors, weights, fit.paths, fit.fleets, folder)}
    tensors = saved.tensors(STATE, files)
    states = by_node(tensors, own, fit.paths, fit.fleets, folder)
    return manifest, states, saved.tensors(RANDOM, files), snapshots


def identity_of(
    units: Units,
    losses: Collection[str],
    feed: Feed,
    epochs: int,
    clip_norm: float | None,
    frozen: Collection[str],
    *,
    by_node: bool,
) -> dict[str, Json]:
    """Return the settings by which two fits count as the same one.

    Args:
        units: What has an optimizer of its own.
        losses: The nodes that have a loss.
        feed: The feed of the training data.
        epochs: The number of the last epoch.
        clip_norm: The largest norm of the gradient.
        frozen: Paths of the weights that take no gradient.
        by_node: False for a split model, which may be cut otherwise: then only what its stages have in common
            counts.
    """
    tasks = {unit.name: str(getattr(unit.task, "summary", "")) for unit in units.all}
    numbers = {
        unit.name: {
            key: repr(float(column[row])) for key, column in sorted(units.columns.items()) if key != "clip_norm"
        }
        for row, unit in enumerate(units.all)
    }
    schedules = {unit.name: _schedule(unit.schedule) for unit in units.all}
    found: dict[str, Json] = {"optimizer and loss": tasks, "hyperparameters": numbers, "schedule": schedules}
    if not by_node:
        # Stages without a loss may come and go with the cuts.
        found["optimizer and loss"] = {unit.name: tasks[unit.name] for unit in units.all if unit.node in losses}
        found["optimizers"] = {unit.name: str(getattr(unit.task, "optimizer_name", "")) for unit in units.all}
        found = {key: _distinct(own) for key, own in found.items()}
    return {
        **found,
        "clip_norm": None if clip_norm is None else float(clip_norm),
        "epochs": epochs,
        "data": {"rows": None if feed.rows is None else feed.rows.tolist(), **feed.settings},
        "frozen weights": sorted(frozen),
    }


def _distinct(values: Mapping[str, Json]) -> Json:
    """Return values without those that are there already, in an order that does not depend on names."""
    return sorted({json.dumps(value, sort_keys=True) for value in values.values()})


def _schedule(schedule: ScheduleLike) -> str:
    return (
        schedule if isinstance(schedule, str) else fingerprint(schedule) if callable(schedule) else repr(schedule)
    )


def _refuse_another_run(folder: Path, then: Mapping[str, Json], now: Mapping[str, Json]) -> None:
    """Raise StoreError if a checkpoint is of a run with other settings."""
    found = _first_difference(then, now)
    if found is not None:
        what, there, here = found
        raise StoreError(
            f"{folder} holds a checkpoint of another run: its {what} was {_shown(there)}, here it is "
            f"{_shown(here)}. Give another folder, or delete this one. To continue that run, use the settings "
            "it started with."
        )


def _first_difference(then: Json, now: Json, path: str = "") -> tuple[str, Json, Json] | None:
    """Return where two settings first differ, and both values; None if they are equal."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in {**now, **then}:
            inside = _first_difference(then.get(key), now.get(key), f"{path}, {key}" if path else key)
            if inside is not None:
                return inside
        return None
    return None if json.dumps(then, sort_keys=True) == json.dumps(now, sort_keys=True) else (path, then, now)


def _shown(value: Json) -> str:
    text = str(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def _sums(saved: Mapping[str, Json], own: Mapping[str, Json]) -> dict[str, dict[str, float]]:
    """Return saved sums of an epoch. The last stage has another name if a split model was cut otherwise."""
    if len(saved) == len(own) == 1:
        saved = dict(zip(own, saved.values(), strict=True))
    return {name: {key: float(value) for key, value in saved.get(name, {}).items()} for name in own}


def by_global_path(states: Mapping[str, State], paths: Paths, fleets: Collection[str]) -> Arrays:
    """Return the state of all nodes as arrays by path. Paths do not depend on how a split model was cut.

    Args:
        states: The state of every node.
        paths: Names of parameters in the undivided model.
        fleets: The nodes that are fleets. Their arrays are `(member, …)`.
    """
    found: dict[str, Array] = {}
    for node, state in states.items():
        for part, own in state.items():
            for name, array in own.items():
                found[_path(node, part, name, paths, fleets)] = np.asarray(array)
    return found


def by_node(
    tensors: Mapping[str, Array], own: Mapping[str, State], paths: Paths, fleets: Collection[str], folder: Path
) -> dict[str, State]:
    """Return saved arrays as the state of nodes. `own` says what each node needs.

    Raises:
        StoreError: Something is missing, or has another shape.
    """
    found: dict[str, State] = {}
    for node, state in own.items():
        found[node] = {}
        for part, needed in state.items():
            found[node][part] = {}
            for name, array in needed.items():
                path = _path(node, part, name, paths, fleets)
                if path not in tensors or tensors[path].shape != np.shape(array):
                    what = f"is {tensors[path].shape}" if path in tensors else "is missing"
                    raise StoreError(
                        f"{folder} does not fit this graph: {path!r} {what}, and node {node!r} needs "
                        f"{np.shape(array)}. Give the models that were saved."
                    )
                found[node][part][name] = tensors[path]
    return found


def _path(node: str, part: str, name: str, paths: Paths, fleets: Collection[str]) -> str:
    assert part in PARTS, part
    if part == "member":
        # The same for all nodes, but each member of a fleet has a seed of its own, and may have failed.
        return f"{part}/{node}.{name}" if node in fleets else f"{part}/{name}"
    tensor, slash, parameter = name.rpartition("/")  # the optimizer's tensors have a name of their own in front
    inside = paths.get(node, {})
    whole = inside.get(parameter, f"{node}.{parameter}")
    # A parameter may be frozen in one run and not in another.
    kept = "weights" if part in ("params", "frozen") else part
    return f"{kept}/{tensor}{slash}{whole}"
