"""Settings in a few letters: the same in every process for the same setting, and others for another one.

A checkpoint keeps them, so that a run goes on only with what it was begun with. What a function does is told by
its code: one that was edited is another one. Comments and formatting don't count.
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

DEEPEST = 6  # levels of objects in objects

_FIXED = (bool, int, float, str, types.NoneType, types.FunctionType, functools.partial)
_DIGEST = re.compile(r"(\d+\.\d+):[0-9a-f]{12}")


def fingerprint(value: object) -> str:
    """A setting in a few letters that can be read, with a digest where they do not tell all."""
    if value is None or isinstance(value, bool | int | float | str):
        return str(value)
    digest = hashlib.sha256(" ".join(_words(value, DEEPEST)).encode()).hexdigest()[:12]
    return f"{_name(value)} {sys.version_info.major}.{sys.version_info.minor}:{digest}"


def alike(one: str, other: str) -> bool:
    """Whether two texts with fingerprints in them say the same, as far as that can be told.

    The same code is not the same in another version of Python: across versions only names are compared.
    """
    if one == other:
        return True
    versions = [_DIGEST.findall(text) for text in (one, other)]
    return versions[0] != versions[1] and _DIGEST.sub("", one) == _DIGEST.sub("", other)


def _name(value: Any) -> str:
    if isinstance(value, functools.partial):
        return _name(value.func)
    return str(getattr(value, "__qualname__", type(value).__qualname__)).replace(" ", "")


def _words(value: Any, depth: int) -> Iterable[str]:
    """What makes a setting, as text. Of what can't be told by its value, the class."""
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
        # What a closure holds may change as the run goes on, except for numbers, words and functions.
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


def _all(values: Iterable[Any], depth: int) -> Iterable[str]:
    for value in values:
        yield from _words(value, depth - 1)


def _ours(value: Any) -> bool:
    """Whether it is this library's: its code may change from version to version, and mean the same."""
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
    except ValueError:  # a name that nothing was given to yet
        return False


def _array(value: Any) -> Iterable[str]:
    yield f"{tuple(value.shape)} {value.dtype}"
    try:
        host = value.detach().cpu() if hasattr(value, "detach") else value
        yield hashlib.sha256(np.ascontiguousarray(host).tobytes()).hexdigest()
    except (TypeError, ValueError, RuntimeError):  # not on the host, or of a dtype that NumPy has not
        return
