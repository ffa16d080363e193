"""Checkpoints of a running fit: weights, optimizer state, positions, random state, history and callbacks."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias, get_args

from modelfleet.callbacks import Callback, Checkpoint
from modelfleet.errors import StoreError
from modelfleet.fingerprints import alike, fingerprint
from modelfleet.frameworks import files as numpy_files
from modelfleet.frameworks.adapter_protocol import Adapter
from modelfleet.frameworks.global_generators import State as GeneratorState
from modelfleet.frameworks.stacked import PARTS, WEIGHTS, by_part, by_path
from modelfleet.history import History
from modelfleet.planning.plan import Plan
from modelfleet.planning.stored import StoredPlan
from modelfleet.runs.changed_numbers import ChangedNumbers
from modelfleet.runs.lane_run import LaneRun
from modelfleet.store import Saved, is_unused, read_folder, read_manifest, tidy, write_folder
from modelfleet.store.json_schema import check
from modelfleet.store.reading import Files
from modelfleet.types import Json, SharingName, State, Tensor

KIND = "checkpoint"
IN_WORDS = {"params": "", "frozen": "a frozen ", "buffers": "a buffer "}  # the parts in WEIGHTS
FINGERPRINTS = ("tasks", "schedules")  # the parts of an identity that hold them
SINGULAR = ("initial epoch",)  # the parts of an identity that are one thing
MAX_TEXT = 80  # characters of a setting in an error

# Schema of a manifest. A question mark marks an entry that may be missing.
_RUN = {
    "members": [[str]],
    "seeds?": [[int]],
    "weights?": [({str: str}, [{str: str}])],
    "epochs": [[int]],
    "started?": [[int]],
}
_HISTORY = {
    "metrics": {str: {str: [(float, str)]}},
    "failed": {str: {"epoch": int, "step": int, "reason": str}},
    "stopped": {str: int},
    "kept": {str: int},
    "initial_epoch?": int,
    "steps?": {str: {str: [(float, str)]}},
    "copied?": {str: [{"epoch": int, "source": str, "hyperparameters": {str: float}}]},
}
_LANE = {
    "members": [str],
    "steps": [int],
    "epochs": [int],
    "slots": [int],
    "on": [bool],
    "failed": [bool],
    "fused": bool,
    "place?": int,
    "factors?": {str: [float]},
}
_CHECKPOINT = {
    "run": _RUN,
    "epoch": int,
    "step": int,
    "epochs": [int],
    "positions": [int],
    "history": _HISTORY,
    "lanes": [_LANE],
    "devices?": int,
    "sharing": str,
    "schedules": [object],
    "callbacks": [object],
    "numbers?": {str: {str: (float, str)}},
}
SHARINGS: tuple[str, ...] = get_args(SharingName)

Manifest: TypeAlias = Mapping[str, Json]
Identity: TypeAlias = Mapping[str, Json]
"""Settings by which two fits count as the same one, lane by lane."""
Tensors: TypeAlias = dict[str, dict[str, Tensor]]
"""Tensors of each data file, by path."""


class CheckpointedFit(Protocol):
    """Part of a fit that a checkpoint uses."""

    plan: Plan
    runs: list[LaneRun]
    callbacks: list[Callback]
    history: History
    epoch: int
    step: int
    generators: GeneratorState
    changed_numbers: ChangedNumbers
    devices: list[str]

    def framework(self, name: str) -> Adapter:
        """Return the adapter of a member's framework."""
        ...


def resumable(callbacks: Sequence[Callback]) -> list[Checkpoint]:
    """Return the callbacks whose folders have a checkpoint to continue from."""
    found = [callback for callback in callbacks if isinstance(callback, Checkpoint) and callback.resume]
    return [callback for callback in found if callback.folder.is_dir() and not is_unused(callback.folder)]


def stored_plan_of(callbacks: Sequence[Callback]) -> StoredPlan | None:
    """Return the plan of the run that a checkpoint would resume. A resumed run must have the same lanes."""
    for callback in resumable(callbacks):
        manifest = read_manifest(callback.folder, kind=KIND, verify=callback.verify)
        check_manifest(callback.folder, manifest)
        lanes = [(tuple(lane["members"]), lane["fused"]) for lane in manifest["lanes"]]
        places = [lane.get("place", 0) for lane in manifest["lanes"]]
        return StoredPlan(lanes, manifest["sharing"], places, manifest.get("devices", 1))
    return None


def check_manifest(folder: Path, manifest: Manifest) -> None:
    """Raise `StoreError` if a manifest does not describe a checkpoint as `save` writes it."""
    try:
        check(manifest, _CHECKPOINT, "the manifest")
        lanes, run = manifest["lanes"], manifest["run"]
        if [lane["members"] for lane in lanes] != run["members"] or not lanes:
            raise ValueError("its lanes have other members than its run")
        if manifest["sharing"] not in SHARINGS:
            raise ValueError(f"its lanes share a device by {manifest['sharing']!r}")
        for key in ("epochs", "positions", "schedules"):
            _check_length(manifest[key], len(lanes), key)
        for key in ("seeds", "weights", "epochs", "started"):
            own = run.get(key)
            _check_length(own, len(lanes), key)
            for lane, values in zip(lanes, own or (), strict=False):
                _check_length(values if isinstance(values, list) else None, len(lane["members"]), key)
        for number, lane in enumerate(lanes):
            _check_lane(lane, manifest.get("devices", 1))
            if f"lane-{number}" not in manifest["files"]:
                raise ValueError(f"it has no data file of lane {number}")
        history = manifest["history"]
        for name in (
            *history["failed"],
            *history["stopped"],
            *history["kept"],
            *history.get("steps", ()),
            *history.get("copied", ()),
        ):
            if name not in history["metrics"]:
                raise ValueError(f"its history has no member {name!r}")
    except ValueError as error:
        raise StoreError(
            f"{folder} has a manifest that is not a checkpoint's: {error}. Load another copy."
        ) from error


def _check_length(values: Sequence[Json] | None, length: int, what: str) -> None:
    if values is not None and len(values) != length:
        raise ValueError(f"it has {len(values)} {what}, expected {length}")


def _check_lane(lane: Manifest, devices: int) -> None:
    members, slots = len(lane["members"]), lane["slots"]
    for key in ("steps", "epochs"):
        _check_length(lane[key], members, f"{key} of a lane")
    for name, factors in lane.get("factors", {}).items():
        _check_length(factors, members, f"factors of {name} of a lane")
    for key in ("on", "failed"):
        _check_length(lane[key], len(slots), f"slots of a lane that are {key}")
    if not slots or sorted(set(slots)) != sorted(slots) or not set(slots) <= set(range(members)):
        raise ValueError(f"its slots are {slots}, for {members} members")
    if not 0 <= lane.get("place", 0) < max(1, devices):
        raise ValueError(f"a lane is on device {lane['place']} of {devices}")


def save(folder: Path, fit: CheckpointedFit) -> None:
    """Save the run as it is now. If that fails, the checkpoint that was there before stays whole."""
    files: Tensors = {"random": fit.generators}
    writers: dict[str, Files] = {"random": numpy_files}
    for number, run in enumerate(fit.runs):
        files[f"lane-{number}"] = by_path(run.bring_here().read(run.names, PARTS))
        writers[f"lane-{number}"] = run.lane.members[0].framework.files
    for number, callback in enumerate(fit.callbacks):
        for name, framework in _frameworks(fit).items():
            arrays = {
                f"{part}/{parameter}/{member}": tensor
                for member, snapshot in callback.arrays().items()
                if fit.framework(member) is framework
                for part, own in snapshot.items()
                for parameter, tensor in own.items()
            }
            if arrays:
                files[f"callback-{number}-{name}"] = arrays
                writers[f"callback-{number}-{name}"] = framework.files
    manifest = {
        "run": _identity(fit),
        "epoch": fit.epoch,
        "step": fit.step,
        "epochs": [run.epoch for run in fit.runs],
        "positions": [run.step_in_epoch for run in fit.runs],
        "history": fit.history.to_dict(),
        "lanes": [
            {
                **run.lane.progress(),
                "fused": run.lane.engine.fused,
                "place": _device_number(fit, run),
                "factors": run.factors.state(),
            }
            for run in fit.runs
        ],
        "devices": len(fit.devices),
        "sharing": fit.plan.sharing,
        "schedules": [run.schedules.state() for run in fit.runs],
        "callbacks": [callback.state() for callback in fit.callbacks],
        # Workers do not get numbers that are changed here, so a resumed run must not have them either.
        "numbers": fit.changed_numbers.state([n for run in fit.runs if run.remote is None for n in run.names]),
    }
    write_folder(folder, files, manifest, kind=KIND, writer=writers)


def resume(
    folder: Path, fit: CheckpointedFit, *, verify: bool = True
) -> tuple[int, int, History, GeneratorState] | None:
    """Bring a fit to where a checkpoint was taken.

    Returns:
        The epoch, the step, the history and the state of the random generators. None if the checkpoint is of
        another fit of the same fleet: this one begins where that one ended.

    Raises:
        StoreError: The checkpoint is damaged, or belongs to another fleet or a fit with other settings. It is not
            overwritten.
    """
    # Everything is read and checked first: a damaged file must change nothing.
    found = read_folder(folder, lambda saved: _read(saved, fit), kind=KIND, verify=verify)
    if found is None:
        return None
    tidy(folder)  # a run that was over when it was killed saves no more
    manifest, files = found
    known = _frameworks(fit)
    try:  # weights come last: if anything else can't be used, they have not been changed
        for run, state in zip(fit.runs, manifest["schedules"], strict=True):
            run.schedules.restore(state)
        for number, (callback, state) in enumerate(zip(fit.callbacks, manifest["callbacks"], strict=True)):
            callback.restore_state(state)
            arrays: dict[str, State] = {}
            for name in known:
                arrays.update(_by_member(files.get(f"callback-{number}-{name}", {})))
            if arrays:
                callback.restore_arrays(arrays)
        fit.changed_numbers.restore(manifest.get("numbers", {}))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"{folder} holds a state of schedules or callbacks that can't be used "
            f"({type(error).__name__}: {error}). Load another copy."
        ) from error
    history = History.from_dict(manifest["history"])
    for number, (run, lane) in enumerate(zip(fit.runs, manifest["lanes"], strict=True)):
        run.lane.write(run.names, by_part(files[f"lane-{number}"]))
        run.resume(lane, manifest["epochs"][number], manifest["positions"][number])
        run.factors.restore(lane.get("factors", {}))
    randomness = files.get("random")
    if randomness is None:  # of an earlier version, which kept the frameworks' own only
        kept = {name: files[f"random-{name}"]["generator"] for name in known if f"random-{name}" in files}
        randomness = {name: known[name].arrays.host(generator) for name, generator in kept.items()}
    return manifest["epoch"], manifest["step"], history, randomness


def _read(saved: Saved, fit: CheckpointedFit) -> tuple[Manifest, Tensors] | None:
    """Return the manifest and the tensors of a checkpoint; None if it is of another fit of the same fleet."""
    folder, manifest = saved.folder, saved.manifest
    check_manifest(folder, manifest)
    now = _identity(fit)
    then = {"initial epoch": 0, "data": now["data"], **manifest["run"]}  # earlier versions did not store these
    if then != now:
        same_fleet = all(_by_name(then, key) == _by_name(now, key) for key in ("members", "seeds"))
        if same_fleet and _by_name(then, "started") != _by_name(now, "started"):
            return None
        found = _difference(then, now)
        if found is not None:
            what, there, here = found
            its, here_it = ("is", "it is") if what in SINGULAR else ("are", "they are")
            raise StoreError(
                f"{folder} holds a checkpoint of another run: its {what} {its} {there}, here {here_it} {here}. "
                f"Give another folder, or delete this one. To continue that run, use the settings it started with."
            )
    if len(manifest["callbacks"]) != len(fit.callbacks):
        raise StoreError(
            f"{folder} holds a checkpoint of another run: it has {len(manifest['callbacks'])} callbacks, this fit "
            f"has {len(fit.callbacks)}. Give another folder, or delete this one."
        )
    known = _frameworks(fit)
    files: Tensors = {}
    for name in manifest["files"]:
        kind, _, rest = name.partition("-")
        if name == "random":
            files[name] = saved.tensors(name, numpy_files)
        elif kind == "lane" and rest.isdecimal() and int(rest) < len(fit.runs):
            files[name] = saved.tensors(name, fit.runs[int(rest)].lane.members[0].framework.files)
        elif kind in ("callback", "random") and rest.split("-")[-1] in known:
            files[name] = saved.tensors(name, known[rest.split("-")[-1]].files)
        else:
            raise StoreError(f"{folder} has a data file {name!r} that no lane here needs. Load another copy.")
    for number, run in enumerate(fit.runs):
        _check_weights(folder, number, files[f"lane-{number}"], run)
    return manifest, files


def _check_weights(folder: Path, number: int, tensors: Mapping[str, Tensor], run: LaneRun) -> None:
    """Raise `StoreError` if the tensors of a lane are not those that its members need."""
    for path, own in _first_weights(run).items():
        shape = (len(run.names), *own.shape[1:])
        found = tuple(tensors[path].shape) if path in tensors else "missing"
        if found != shape:
            raise StoreError(
                f"{folder}: {path!r} of lane {number} is {found}, expected {shape}. Load another copy."
            )


def _device_number(fit: CheckpointedFit, run: LaneRun) -> int:
    return fit.devices.index(run.lane.device) if run.lane.device in fit.devices else 0


def _frameworks(fit: CheckpointedFit) -> dict[str, Adapter]:
    """Return the frameworks of a fit's members, by name."""
    adapters = [run.lane.members[0].framework for run in fit.runs]
    return {adapter.NAME: adapter for adapter in adapters}


def _identity(fit: CheckpointedFit) -> Identity:
    """Return the settings by which two fits count as the same one."""
    return {
        "members": [run.lane.names for run in fit.runs],
        "seeds": [[member.seed for member in run.lane.members] for run in fit.runs],
        "weights": [_weights(run) for run in fit.runs],
        "tasks": [_tasks(run) for run in fit.runs],
        "schedules": [[fingerprint(schedule) for schedule in run.lane.schedules] for run in fit.runs],
        "hyperparameters": [
            {name: [_number(own) for own in column.tolist()] for name, column in run.lane.columns.items()}
            for run in fit.runs
        ],
        "epochs": [(fit.history.initial_epoch + run.epochs).tolist() for run in fit.runs],
        "initial epoch": fit.history.initial_epoch,
        "batches": [run.batches for run in fit.runs],
        "data": [run.feed.form for run in fit.runs],
        "rows": [None if run.rows is None else run.rows.tolist() for run in fit.runs],
        "steps per epoch": [None if s.known_steps is None else s.known_steps.tolist() for s in fit.runs],
        "callbacks": [
            kind
            for callback in fit.callbacks
            for kind in getattr(callback, "kinds", (type(callback).__name__,))  # of a framework's own, each
        ],
        "started": [run.before["steps"].tolist() for run in fit.runs],
    }


def _tasks(run: LaneRun) -> Json:
    """Return the summary of a lane's task; of each member, if their tasks differ."""
    found = [task.summary for task in run.lane.tasks]
    return found[0] if len(set(found)) == 1 else found


def _number(value: float) -> float | None:
    """Return a hyperparameter; None for NaN, which means that a member's optimizer does not have it."""
    return None if math.isnan(value) else value


def _first_weights(run: LaneRun) -> dict[str, Tensor]:
    """Return the weights of a lane's first member, `(1, …)`, by path."""
    return by_path(run.lane.read(run.names[:1], WEIGHTS))


def _weights(run: LaneRun) -> dict[str, str] | list[dict[str, str]]:
    """Return the shape and dtype of every weight, by path; for each member, if they are not equally wide."""
    widths = run.lane.by_width(run.lane.names)
    found: dict[str, dict[str, str]] = {}
    for names in widths:
        ((_, state),) = run.lane.read_apart(names[:1], WEIGHTS)
        found |= dict.fromkeys(names, _in_words(by_path(state)))
    return found[run.lane.names[0]] if len(widths) == 1 else [found[name] for name in run.lane.names]


def _in_words(weights: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        path: f"{tuple(tensor.shape[1:])} {str(tensor.dtype).removeprefix('torch.')}"
        for path, tensor in weights.items()
    }


def _difference(then: Identity, now: Identity) -> tuple[str, str, str] | None:
    """Return the first difference between two runs: its name and both values; None if they are the same."""
    for key in ("members", "seeds"):
        if _by_name(then, key) != _by_name(now, key):
            return key, _brief(then.get(key)), _brief(now[key])
    known = _by_name(then, "weights")
    for name, here in _by_name(now, "weights").items():
        there = known.get(name) or {}
        for path in {**there, **here}:
            if there.get(path) != here.get(path):
                words = [f"{_weight_in_words(path, weights)} of {name!r}" for weights in (there, here)]
                return "weights", words[0], words[1]
    for key, value in now.items():
        before = then.get(key)
        if before == value or (key in FINGERPRINTS and _alike(before, value)):
            continue
        return key, _brief(before), _brief(value)
    return None


def _by_name(identity: Identity, key: str) -> dict[str, Json]:
    """Return the entries of an identity by member, instead of by lane."""
    found: dict[str, Json] = {}
    lanes = identity["members"]
    for names, own in zip(lanes, identity.get(key) or [None] * len(lanes), strict=True):
        found.update(zip(names, own if isinstance(own, list) else [own] * len(names), strict=True))
    return found


def _weight_in_words(path: str, weights: Mapping[str, str]) -> str:
    """Return a weight in words: trained, frozen, a buffer, or missing."""
    _, _, name = path.partition("/")
    for part, kind in IN_WORDS.items():
        if f"{part}/{name}" in weights:
            return f"{kind}{name!r} {weights[f'{part}/{name}']}"
    return f"without {name!r}"


def _alike(then: Json, now: Json) -> bool:
    """Return True if fingerprints, nested in lists, stand for the same settings."""
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        return all(_alike(one, other) for one, other in zip(then, now, strict=True))
    return isinstance(then, str) and isinstance(now, str) and alike(then, now)


def _by_member(arrays: Mapping[str, Tensor]) -> dict[str, State]:
    """Return snapshots by member from tensors by `part/parameter/member`. A member's name may have slashes."""
    snapshots: dict[str, State] = {}
    for path, tensor in arrays.items():
        part, parameter, name = path.split("/", 2)
        snapshots.setdefault(name, {}).setdefault(part, {})[parameter] = tensor
    return snapshots


def _brief(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
