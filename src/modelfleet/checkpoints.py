"""Checkpoints of a fit under way: weights, optimizer state, positions, random state, history and callbacks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelfleet.callbacks import Callback
from modelfleet.errors import StoreError
from modelfleet.history import History
from modelfleet.store import read_file, read_manifest, write_folder

KIND = "checkpoint"


def exists(folder: Path) -> bool:
    """Whether there is something to go on from."""
    return folder.is_dir() and any(folder.iterdir())


def save(folder: Path, run: Any, callbacks: Sequence[Callback], framework: Any) -> None:
    """Keep the run as it is now; a checkpoint that was there before stays whole until this one is."""
    files: dict[str, dict[str, Any]] = {"random": {"generator": run.randomness}}
    for number, shift in enumerate(run.shifts):
        files[f"lane-{number}"] = shift.lane.engine.tensors()
    for number, callback in enumerate(callbacks):
        arrays = {
            f"{path}/{name}": tensor
            for name, snapshot in callback.arrays().items()
            for path, tensor in _named(snapshot).items()
        }
        if arrays:
            files[f"callback-{number}"] = arrays
    manifest = {
        "run": _identity(run),
        "epoch": run.epoch,
        "step": run.step,
        "position": run.position,
        "history": run.history.to_dict(),
        "lanes": [shift.lane.standing() for shift in run.shifts],
        "schedules": [shift.schedules.state() for shift in run.shifts],
        "callbacks": [callback.state() for callback in callbacks],
    }
    write_folder(folder, files, manifest, kind=KIND, writer=framework.files)


def resume(folder: Path, run: Any, callbacks: Sequence[Callback], framework: Any) -> tuple[Any, ...] | None:
    """Bring a run to where a checkpoint was taken: (epoch, step, position, history, randomness).

    None if the checkpoint is of another fit of the same fleet: this one begins where that one ended. One of
    another fleet or with other settings raises `StoreError`, so that nothing of it is overwritten.
    """
    manifest = read_manifest(folder, kind=KIND)
    then, now = manifest["run"], _identity(run)
    if then != now:
        same_fleet = all(then.get(key) == now[key] for key in ("members", "seeds"))
        if same_fleet and then.get("started") != now["started"]:
            return None
        what = next(key for key in now if then.get(key) != now[key])
        raise StoreError(
            f"{folder} holds a checkpoint of another run: its {what} are {_brief(then.get(what))}, here they are "
            f"{_brief(now[what])}. Give another folder, or delete this one."
        )
    # All is read before anything is taken up: a file that can't be read must change nothing.
    files = {name: read_file(folder, manifest, name, framework.files) for name in manifest["files"]}
    for number, (shift, standing) in enumerate(zip(run.shifts, manifest["lanes"], strict=True)):
        shift.lane.engine.load(files[f"lane-{number}"])
        slots = shift.lane.take_up(standing)
        shift.schedules.restore(manifest["schedules"][number])
        if len(slots) < len(shift.lane.members):
            shift.feed = shift.feed.select(slots)
            shift.validation = shift.validation and shift.validation.select(slots)
    for number, (callback, state) in enumerate(zip(callbacks, manifest["callbacks"], strict=True)):
        callback.restore_state(state)
        if f"callback-{number}" in files:
            callback.restore_arrays(_by_member(files[f"callback-{number}"]))
    history = History.from_dict(manifest["history"])
    return manifest["epoch"], manifest["step"], manifest["position"], history, files["random"]["generator"]


def _identity(run: Any) -> dict[str, Any]:
    """What makes two fits the same one."""
    return {
        "members": [shift.lane.names for shift in run.shifts],
        "seeds": [[member.seed for member in shift.lane.members] for shift in run.shifts],
        "tasks": [shift.lane.engine.task.summary for shift in run.shifts],
        "hyperparameters": [
            {name: column.tolist() for name, column in shift.lane.columns.items()} for shift in run.shifts
        ],
        "epochs": [shift.epochs.tolist() for shift in run.shifts],
        "rows": [None if shift.rows is None else shift.rows.tolist() for shift in run.shifts],
        "steps per epoch": [None if s.steps_per_epoch is None else s.steps_per_epoch.tolist() for s in run.shifts],
        "callbacks": [type(callback).__name__ for callback in run.callbacks],
        "started": [shift.started.tolist() for shift in run.shifts],
    }


def _named(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found.update(_named(value, f"{prefix}/{key}" if prefix else key))
    return found


def _by_member(arrays: dict[str, Any]) -> dict[str, Any]:
    """`part/parameter/member` back to {member: {part: {parameter: tensor}}}; a member's name may hold slashes."""
    snapshots: dict[str, Any] = {}
    for path, tensor in arrays.items():
        part, parameter, name = path.split("/", 2)
        member = snapshots.setdefault(name, {"params": {}, "frozen": {}, "buffers": {}})
        member[part][parameter] = tensor
    return snapshots


def _brief(value: Any, most: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= most else text[: most - 1] + "…"
