"""manifest.json: what a saved folder says about itself.

    {"checksum": "6e340b9cffb37a989ca544e6bb780a2c",
     "format": "modelfleet", "version": 2, "kind": "fleet",
     "files": {"group-0": {"file": "group-0.5d41402abc4b2a76.safetensors", "bytes": 4096,
                           "tensors": {"head.weight": {"dtype": "F32", "shape": [3, 10, 64]}},
                           "header": "…", "rows": ["…", "…", "…"]}},
     … and what the caller keeps, under keys of its own}

The checksum in front is that of all bytes after it. A data file that is read row by row has a checksum of its
header and of every row; another one has `"checksum"`, that of the whole file. Version 1 had no checksums.

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
from modelfleet.store.checksums import checksum_of
from modelfleet.store.fields import check
from modelfleet.store.header import check_tensor

MANIFEST = "manifest.json"
FORMAT = "modelfleet"
VERSION = 2
RESERVED = frozenset({"checksum", "format", "version", "kind", "files"})
LONGEST = 1 << 30  # bytes: a file that claims to be longer is not read into memory

# Lower case only: on some disks "A" and "a" are one file. Nothing that matches leads out of the folder.
FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
DATA_FILE = re.compile(r"([a-z0-9][a-z0-9_-]*)\.[0-9a-f]{16}\.safetensors")

_SEAL = re.compile(rb'\{"checksum": "([0-9a-f]{32})", ')
_FLOAT = "$float"
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_ENTRY = {"file": str, "bytes": int, "tensors": {str: object}, "checksum?": str, "header?": str, "rows?": [str]}


_TRUST = "Load another copy; or, if you trust this one, give verify=False."


class UnusableError(ValueError):
    """A text is not a manifest that can be used; says why, and what to do."""

    def __init__(self, reason: str, advice: str = "Load another copy.") -> None:
        super().__init__(f"{reason}. {advice}")


def encode(manifest: Mapping[str, Any]) -> bytes:
    """A manifest of plain values as JSON text, with its checksum in front."""
    rest = json.dumps(manifest, allow_nan=False).encode()[1:]
    if len(rest) > LONGEST:
        raise StoreError(
            f"the manifest would have {len(rest):,} bytes, more than {LONGEST:,}. Save fewer members to a folder, "
            f"or train for fewer epochs in one fit."
        )
    return b'{"checksum": "%s", %s' % (checksum_of(rest).encode(), rest)


def decode(text: bytes, *, verify: bool = True) -> dict[str, Any]:
    """The manifest in a JSON text, checked; raises `UnusableError`."""
    try:
        manifest = json.loads(text, object_hook=_float_hook, parse_constant=_refuse_constant)
    except RecursionError:
        raise UnusableError("it is nested too deeply") from None
    except ValueError as error:
        raise UnusableError(f"it is not valid JSON ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UnusableError("it was not written by modelfleet", "Check the path, or load another copy.")
    version = manifest.get("version")
    if type(version) is not int or version < 1:
        raise UnusableError(f"its format version is {version!r}")
    if version > VERSION:
        raise UnusableError(
            f"its format version is {version}, newer than {VERSION}", "Upgrade modelfleet to read it."
        )
    if verify:
        _check_seal(text, required=version > 1 or "checksum" in manifest)
    manifest.pop("checksum", None)
    try:
        check(manifest, {"kind": str, "files": {str: _ENTRY}}, "the manifest")
        for name, entry in manifest["files"].items():
            _check_entry(name, entry, summed=version > 1)
    except ValueError as error:
        raise UnusableError(str(error)) from None
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


def _check_seal(text: bytes, *, required: bool) -> None:
    """Raise `UnusableError` if a manifest is not as it was written."""
    seal = _SEAL.match(text)
    if seal is None:
        if required:
            raise UnusableError("it is damaged: its checksum is not where it should be", _TRUST)
        return
    found = checksum_of(text[seal.end() :])
    if found != seal[1].decode():
        raise UnusableError(
            f"it is damaged or was edited: its checksum is {found}, expected {seal[1].decode()}", _TRUST
        )


def _check_entry(name: str, entry: dict[str, Any], *, summed: bool) -> None:
    """A data file's entry is used as a path and a size: it must be one that we could have written."""
    match = DATA_FILE.fullmatch(entry["file"])
    if match is None or match[1] != name:
        raise ValueError(f"the data file of {name!r} can't be {entry['file']!r}")
    if summed and "checksum" not in entry and not ("header" in entry and "rows" in entry):
        raise ValueError(f"it has no checksum for the data file of {name!r}")
    for tensor, spec in entry["tensors"].items():
        try:
            check_tensor(spec)
        except ValueError as error:
            raise ValueError(f"tensor {tensor!r} of {name!r} can't be used: {error}") from None
