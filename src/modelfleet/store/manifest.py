"""manifest.json: the description of a saved folder.

    {"checksum": "6e340b9cffb37a989ca544e6bb780a2c",
     "format": "modelfleet", "version": 2, "kind": "fleet",
     "files": {"group-0": {"file": "group-0.5d41402abc4b2a76.safetensors", "bytes": 4096,
                           "tensors": {"head.weight": {"dtype": "F32", "shape": [3, 10, 64]}},
                           "header": "…", "rows": ["…", "…", "…"]}},
     … and the caller's own keys}

The checksum in front covers all bytes after it. A data file that is read row by row has a checksum of its header
and of every row. Any other file has one `"checksum"`. Version 1 had no checksums.

JSON has no NaN and no infinities: they are written as `{"$float": "nan"}`, `{"$float": "inf"}` and
`{"$float": "-inf"}`, and read back as floats.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from modelfleet.errors import StoreError
from modelfleet.store.checksums import checksum_of
from modelfleet.store.header import check_tensor
from modelfleet.store.json_schema import check
from modelfleet.types import Json

MANIFEST = "manifest.json"
FORMAT = "modelfleet"
VERSION = 2
RESERVED = frozenset({"checksum", "format", "version", "kind", "files"})
MAX_BYTES = 1 << 30  # a longer manifest is not read into memory

# Lower case only: on some disks "A" and "a" are one file. No name that matches leads out of the folder.
FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
DATA_FILE = re.compile(r"([a-z0-9][a-z0-9_-]*)\.[0-9a-f]{16}\.safetensors")

_CHECKSUM = re.compile(rb'\{"checksum": "([0-9a-f]{32})", ')
_FLOAT = "$float"
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_ENTRY = {"file": str, "bytes": int, "tensors": {str: object}, "checksum?": str, "header?": str, "rows?": [str]}
_TRUST = "Load another copy; or, if you trust this one, give verify=False."


class UnusableError(ValueError):
    """Raised if a text is not a usable manifest. The message says why, and what to do."""

    def __init__(self, reason: str, advice: str = "Load another copy.") -> None:
        super().__init__(f"{reason}. {advice}")


def encode(manifest: Mapping[str, Json]) -> bytes:
    """Return a manifest of plain values as JSON text, with its checksum in front."""
    rest = json.dumps(manifest, allow_nan=False).encode()[1:]
    if len(rest) > MAX_BYTES:
        raise StoreError(
            f"the manifest would have {len(rest):,} bytes, more than {MAX_BYTES:,}. Save fewer members to "
            f"a folder, or train for fewer epochs in one fit."
        )
    return b'{"checksum": "%s", %s' % (checksum_of(rest).encode(), rest)


def decode(text: bytes, *, verify: bool = True) -> dict[str, Json]:
    """Return the manifest in a JSON text. Raise `UnusableError` if a check fails."""
    try:
        manifest = json.loads(text, object_pairs_hook=_mapping, parse_constant=_refuse_constant)
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
        _check_checksum(text, required=version > 1 or "checksum" in manifest)
    manifest.pop("checksum", None)
    try:
        check(manifest, {"kind": str, "files": {str: _ENTRY}}, "the manifest")
        for name, entry in manifest["files"].items():
            _check_entry(name, entry, has_checksums=version > 1)
    except ValueError as error:
        raise UnusableError(str(error)) from None
    return manifest


def plain(value: object, path: str = "manifest") -> Json:
    """Convert a value to JSON's own types, including NumPy's numbers and special floats.

    Raises:
        StoreError: If JSON can't hold the value. `path` names it in the message.
    """
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


def _mapping(pairs: list[tuple[str, Json]]) -> Json:
    """Return a mapping of JSON, or the special float that it stands for."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    if value.keys() != {_FLOAT}:
        return value
    name = value[_FLOAT]
    if not isinstance(name, str) or name not in _SPECIAL:
        raise ValueError(f"{_FLOAT} is {name!r}")
    return _SPECIAL[name]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_checksum(text: bytes, *, required: bool) -> None:
    """Raise `UnusableError` if a manifest is not as it was written."""
    match = _CHECKSUM.match(text)
    if match is None:
        if required:
            raise UnusableError("it is damaged: its checksum is not where it should be", _TRUST)
        return
    found, expected = checksum_of(text[match.end() :]), match[1].decode()
    if found != expected:
        raise UnusableError(f"it is damaged or was edited: its checksum is {found}, expected {expected}", _TRUST)


def _check_entry(name: str, entry: dict[str, Json], *, has_checksums: bool) -> None:
    """Raise ValueError unless modelfleet could have written the entry, which is used as a path and a size."""
    match = DATA_FILE.fullmatch(entry["file"])
    if match is None or match[1] != name:
        raise ValueError(f"the data file of {name!r} can't be {entry['file']!r}")
    if has_checksums and "checksum" not in entry and not ("header" in entry and "rows" in entry):
        raise ValueError(f"it has no checksum for the data file of {name!r}")
    for tensor, spec in entry["tensors"].items():
        try:
            check_tensor(spec)
        except ValueError as error:
            raise ValueError(f"tensor {tensor!r} of {name!r} can't be used: {error}") from None
