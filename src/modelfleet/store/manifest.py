"""manifest.json: what a saved folder says about itself.

    {"format": "modelfleet", "version": 1, "kind": "fleet",
     "files": {"group-0": {"file": "group-0.5d41402abc4b2a76.safetensors", "bytes": 4096,
                           "tensors": {"head.weight": {"dtype": "F32", "shape": [3, 10, 64]}}}},
     … and what the caller keeps, under keys of its own}

JSON has no NaN and no infinities: they are written as `{"$float": "nan"}`, `{"$float": "inf"}` and
`{"$float": "-inf"}`, and read back as floats.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from modelfleet.errors import StoreError

MANIFEST = "manifest.json"
FORMAT = "modelfleet"
VERSION = 1
RESERVED = frozenset({"format", "version", "kind", "files"})

# Lower case only: on some disks "A" and "a" are one file. Nothing that matches leads out of the folder.
FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
DATA_FILE = re.compile(r"([a-z0-9][a-z0-9_-]*)\.[0-9a-f]{16}\.safetensors")

_FLOAT = "$float"
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(manifest: Mapping[str, Any]) -> bytes:
    """A manifest of plain values as JSON text."""
    return json.dumps(manifest, allow_nan=False).encode()


def decode(text: bytes) -> dict[str, Any]:
    """The manifest in a JSON text, checked; a ValueError says what is wrong with it."""
    try:
        manifest = json.loads(text, object_hook=_float_hook, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not valid JSON ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError("it was not written by modelfleet")
    version = manifest.get("version")
    if type(version) is not int or version < 1:
        raise ValueError(f"its format version is {version!r}")
    if version > VERSION:
        raise ValueError(f"its format version is {version}, newer than {VERSION}: upgrade modelfleet to read it")
    if not isinstance(manifest.get("kind"), str):
        raise ValueError("it does not say what kind of folder this is")
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise ValueError("it does not list its data files")
    for name, entry in files.items():
        _check_entry(name, entry)
    return manifest


def plain(value: Any, path: str = "manifest") -> Any:
    """The value in JSON's own types, NumPy's numbers and special floats too; `path` names it in errors."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        number = float(value)
        return number if math.isfinite(number) else {_FLOAT: str(number)}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _FLOAT:
                raise StoreError(f"{path} has the key {key!r}: keys are strings other than {_FLOAT!r}.")
        return {key: plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    raise StoreError(
        f"{path} is a {type(value).__name__}, which JSON can't hold. Use numbers, strings, lists and dicts."
    )


def _float_hook(value: dict[str, Any]) -> Any:
    if value.keys() != {_FLOAT}:
        return value
    name = value[_FLOAT]
    if not isinstance(name, str) or name not in _SPECIAL:
        raise ValueError(f"{_FLOAT} is {name!r}")
    return _SPECIAL[name]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_entry(name: str, entry: Any) -> None:
    """A data file's entry is used as a path and a size: it must be one that we could have written."""
    file = entry.get("file") if isinstance(entry, dict) else None
    match = DATA_FILE.fullmatch(file) if isinstance(file, str) else None
    if match is None or match[1] != name:
        raise ValueError(f"the data file of {name!r} can't be {file!r}")
    if type(entry.get("bytes")) is not int or not isinstance(entry.get("tensors"), dict):
        raise ValueError(f"it does not list the size and tensors of {name!r}")
    for tensor, spec in entry["tensors"].items():
        if not isinstance(spec, dict) or spec.keys() != {"dtype", "shape"}:
            raise ValueError(f"it does not list the dtype and shape of tensor {tensor!r} of {name!r}")
