"""Fingerprints of settings: short texts that are equal in every process for equal settings.

A checkpoint stores them, so that a run continues only with the settings it began with. A function is compared by
its code: an edited function is a different setting. Comments and formatting don't count.
"""

import dataclasses
import functools
import hashlib
import re
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

MAX_DEPTH = 6  # levels of objects within objects

_FIXED = (bool, int, float, str, types.NoneType, types.FunctionType, functools.partial)
_DIGEST = re.compile(r"(\d+\.\d+):[0-9a-f]{12}")


def fingerprint(value: object) -> str:
    """Return a short readable text for a setting, with a digest if the text does not say everything."""
    if value is None or isinstance(value, bool | int | float | str):
        return str(value)
    digest = hashlib.sha256(" ".join(_words(value, MAX_DEPTH)).encode()).hexdigest()[:12]
    return f"{_name(value)} {sys.version_info.major}.{sys.version_info.minor}:{digest}"


def alike(one: str, other: str) -> bool:
    """Return True if two texts with fingerprints in them mean the same settings, as far as that is known.

    Equal code compiles differently in another version of Python. Across versions only names are compared.
    """
    if one == other:
        return True
    versions = [_DIGEST.findall(text) for text in (one, other)]
    return versions[0] != versions[1] and _DIGEST.sub("", one) == _DIGEST.sub("", other)


def _name(value: object) -> str:
    if isinstance(value, functools.partial):
        return _name(value.func)
    return str(getattr(value, "__qualname__", type(value).__qualname__)).replace(" ", "")


def _words(value: Any, depth: int) -> Iterable[str]:
    """Yield the parts of a setting as text. If a value has no known text, its class is used."""
    yield _name(value)
    if depth == 0 or _ours(value):
        return
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value)
    elif isinstance(value, functools.partial):
        yield from _all((value.func, value.args, value.keywords), depth)
    elif isinstance(value, types.MethodType):
        yield from _all((value.__func__, value.__self__), depth)
    elif isinstance(value, types.FunctionType):
        yield from _code(value.__code__)
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        # A closure's contents may change during the run, except for numbers, texts and functions.
        fixed = [cell for cell in cells if isinstance(cell, _FIXED)]
        yield from _all((value.__defaults__, value.__kwdefaults__, *fixed), depth)
    elif isinstance(value, Mapping):
        yield from _all([item for pair in value.items() for item in pair], depth)
    elif isinstance(value, list | tuple):
        yield from _all(value, depth)
    elif isinstance(value, set | frozenset):
        yield from sorted(" ".join(_words(item, depth - 1)) for item in value)
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        yield from _array(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _all([getattr(value, field.name) for field in dataclasses.fields(value)], depth)
    elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType):
        yield from _words(vars(value), depth - 1)


def _all(values: Iterable[object], depth: int) -> Iterable[str]:
    for value in values:
        yield from _words(value, depth - 1)


def _ours(value: object) -> bool:
    """Return True for a function of modelfleet, whose code may change between versions and mean the same."""
    return isinstance(value, types.FunctionType) and str(value.__module__).partition(".")[0] == "modelfleet"


def _code(code: types.CodeType) -> Iterable[str]:
    yield code.co_code.hex()
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant)
        else:
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # the variable has no value yet
        return False


def _array(value: Any) -> Iterable[str]:
    yield f"{tuple(value.shape)} {value.dtype}"
    try:
        host = value.detach().cpu() if hasattr(value, "detach") else value
        yield hashlib.sha256(np.ascontiguousarray(host).tobytes()).hexdigest()
    except (TypeError, ValueError, RuntimeError):  # not on the host, or of a dtype that NumPy lacks
        return
