"""Copies of Keras's callbacks for each member, with their own paths, and the state to keep in checkpoints."""

import copy
import os
from collections.abc import Sequence
from pathlib import PurePath

import numpy as np
from keras import callbacks

from modelfleet.errors import InputError
from modelfleet.formatting import without_period
from modelfleet.types import Json

_FILES = ("filepath", "filename")
_FOLDERS = ("log_dir", "directory")
_ADDRESSES = ("root", "path")  # of RemoteMonitor
_REMADE = (  # attributes that every fit makes again, and that often can't be copied
    *("_model", "members", "csv_file", "writer"),
    *("_summary_module", "_writers", "checkpointer", "_async_futures"),
)


def by_member(callback: callbacks.Callback, names: Sequence[str]) -> dict[str, callbacks.Callback]:
    """Return each member's callback: the one of an earlier fit, the given object, or a copy of it."""
    before: dict[str, callbacks.Callback] = vars(callback).get("members", {})
    found = {name: before[name] for name in names if name in before}
    given = any(own is callback for own in found.values())
    if names and not given and (len(names) == 1 or names[0] not in found):
        found[names[0]] = callback
    kept = [vars(callback).get(attribute) for attribute in _REMADE]
    for name in names:
        if name in found:
            continue
        try:
            found[name] = copy.deepcopy(callback, {id(one): one for one in kept if one is not None})
        except Exception as error:  # an attribute may raise anything
            raise InputError(
                f"{type(callback).__name__} can't be copied for member {name!r}: {without_period(error)}. "
                f"Every Keras member needs a callback of its own. Give the class a __deepcopy__, or use a "
                f"modelfleet.Callback."
            ) from error
        vars(found[name]).pop("members", None)
    vars(callback)["members"] = {**before, **found}
    return {name: found[name] for name in names}


class OwnPaths:
    """Files and folders of members' callbacks: each has its own for the duration of a fit."""

    def __init__(self) -> None:
        self._given: list[tuple[callbacks.Callback, str, object]] = []

    def set(self, own: callbacks.Callback, name: str, *, alone: bool) -> None:
        """Give a member's callback paths of its own. A member that is alone keeps those without "{name}"."""
        for attribute in (*_FILES, *_FOLDERS, *_ADDRESSES):
            path = getattr(own, attribute, None)
            if not isinstance(path, str | os.PathLike):
                continue
            path = os.fspath(path)
            if "{name}" in path or not (alone or attribute in _ADDRESSES):
                changed = own_path(path, name) if attribute in _FILES else own_folder(path, name)
                self._replace(own, attribute, changed)
                if isinstance(own, callbacks.OrbaxCheckpoint):  # its checkpointer has the folder
                    fresh = callbacks.OrbaxCheckpoint(changed, max_to_keep=own.max_to_keep)
                    self._replace(own, "checkpointer", fresh.checkpointer)

    def restore(self) -> None:
        """Give all callbacks the paths that they were given with."""
        for own, attribute, value in self._given:
            setattr(own, attribute, value)
        self._given.clear()

    def _replace(self, own: callbacks.Callback, attribute: str, value: object) -> None:
        self._given.append((own, attribute, getattr(own, attribute)))
        setattr(own, attribute, value)


def own_path(path: str, name: str) -> str:
    """Return a member's own file: with its name for "{name}", or else before the suffix."""
    text = _file_name(name).replace("{", "{{").replace("}", "}}")  # Keras formats it
    if "{name}" in path:
        return path.replace("{name}", text)
    suffix = ".weights.h5" if path.endswith(".weights.h5") else PurePath(path).suffix
    return f"{path.removesuffix(suffix)}-{text}{suffix}"


def own_folder(path: str, name: str) -> str:
    """Return a member's own folder: with its name for "{name}", or else within the given one."""
    if "{name}" in path:
        return path.replace("{name}", _file_name(name))
    return os.path.join(path, _file_name(name))


def remembered(own: callbacks.Callback) -> dict[str, Json]:
    """Return the attributes of a callback that JSON can hold, but no paths: a resumed run may have others."""
    return {
        key: value.item() if isinstance(value, np.generic) else value
        for key, value in vars(own).items()
        if isinstance(value, bool | int | float | str | np.number | type(None))
        and key not in (*_FILES, *_FOLDERS, *_ADDRESSES, *_REMADE)
        and not key.endswith("_dir")
    }


def _file_name(name: str) -> str:
    text = name.replace("/", "_").replace("\\", "_")
    return text if text.strip(".") else text.replace(".", "_")
