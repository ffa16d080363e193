"""Recipes as JSON: the arguments of `compile`, as far as they can be saved without pickle.

    {"optimizer": "adam", "loss": {"$import": "losses:focal"}, "lr": {"$each": [["a", 0.1], ["b", 0.2]]}}

Names and numbers are stored as they are, `each` by member, functions and classes by their import paths. Anything
else is left out (`{"$left out": "a lambda of train"}`), and is among the `missing` of the recipe that is read. A
name in a folder is imported only if that is allowed, or if it belongs to a framework: see `frameworks.TRUSTED`.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from modelfleet.each import Each
from modelfleet.errors import FleetError
from modelfleet.formatting import without_period
from modelfleet.frameworks import TRUSTED
from modelfleet.recipe import Missing, Recipe
from modelfleet.types import Json

_EACH, _TUPLE, _IMPORT, _PARTIAL, _MADE, _LEFT_OUT = "$each", "$tuple", "$import", "$partial", "$made", "$left out"
_WITH = "with"
_FIELDS = tuple(field.name for field in fields(Recipe) if field.name not in ("hyperparameters", "missing"))


class _CannotReadError(Exception):
    """Raised if a value of a recipe can't be read. The message continues a sentence that begins with its name."""


def import_path(value: Any) -> str | None:
    """Return `module:name` of a function or class that can be imported; None for lambdas and local functions."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "<")
    return None if module in (None, "__main__") or "<" in name else f"{module}:{name}"


def imported(path: str) -> Any:
    """Return what an import path leads to. Raise ImportError or AttributeError if it leads nowhere."""
    module, _, name = path.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def encode(recipe: Recipe) -> dict[str, Json]:
    """Return a recipe as JSON, by the arguments of `compile`."""
    given = {name: getattr(recipe, name) for name in _FIELDS} | dict(recipe.hyperparameters or {})
    found = {name: encode_value(value) for name, value in given.items()}
    return found | {name: missing.encoded for name, missing in recipe.missing.items()}


def decode(encoded: Mapping[str, Json], *, allow_import: bool) -> Recipe:
    """Return a recipe from its JSON. What can't be read is among its `missing`."""
    found: dict[str, Any] = {"optimizer": None}
    hyperparameters: dict[str, Any] = {}
    missing: dict[str, Missing] = {}
    for name, value in encoded.items():
        try:
            (found if name in _FIELDS else hyperparameters)[name] = _decoded(value, allow_import)
        except _CannotReadError as error:
            missing[name] = Missing(str(error), value)
        except (FleetError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            missing[name] = Missing(f"can't be read from the folder: {without_period(error)}", value)
    return Recipe(**found, hyperparameters=hyperparameters, missing=missing)


def completes(recipe: Recipe, saved: Recipe | None, name: str) -> bool:
    """Return True if a recipe completes a member's incomplete saved one, whose optimizer state is then kept.

    An optimizer that could not be saved counts as the same. The lane notices if its state does not fit.
    """
    if saved is None or not saved.missing:
        return False
    unknown = bool(saved.missing.keys() & {"optimizer", "compile"})
    return unknown or _kind(saved.optimizer_of(name)) == _kind(recipe.optimizer_of(name))


def _kind(optimizer: Any) -> object:
    """Return which optimizer it is. A framework's own is the same by its name, as a class, partial or object."""
    if isinstance(optimizer, functools.partial):
        return _kind(optimizer.func)
    if isinstance(optimizer, str):
        return optimizer.lower()
    path = import_path(optimizer) or import_path(type(optimizer)) or ""
    return path.rpartition(":")[2].lower() if _is_trusted(path) else encode_value(optimizer)


def left_out(value: object) -> dict[str, Json]:
    """Return the JSON for a value that can't be saved: words that say what it is. Words may be given, too."""
    return {_LEFT_OUT: value if isinstance(value, str) else _words(value)}


def _words(value: Any) -> str:
    """Describe a value that can't be saved, or the part of it that can't."""
    inner: Sequence[Any] = ()
    name, kind, module = getattr(value, "__qualname__", ""), type(value), getattr(value, "__module__", None)
    if isinstance(value, Each):
        kind, inner = Each, list(value.values.values()) if isinstance(value.values, dict) else value.values
    elif isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = value
    elif isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    lost = next((item for item in inner if item is not None and _encoded(item) is None), None)
    if lost is not None:
        return f"{'an each' if kind is Each else f'a {kind.__name__}'} with {_words(lost)}"
    if "<lambda>" in name:
        return f"a lambda of {module}"
    if name:
        return f"the {'class' if isinstance(value, type) else 'function'} {name!r} of {module}"
    return f"an object of {kind.__module__}.{kind.__qualname__}"


def describe(encoded: Mapping[str, Json]) -> str:
    """Return a recipe's JSON as the arguments of a call, without those that were not given."""
    return ", ".join(
        f"{name}={_shown(value)}" for name, value in encoded.items() if value not in (None, {_TUPLE: []})
    )


def _shown(value: Json) -> str:
    if not isinstance(value, dict):
        return repr(value)
    if _EACH in value:
        return "each(…)"
    if _TUPLE in value:
        return repr(tuple(value[_TUPLE]))
    for key in (_IMPORT, _PARTIAL, _MADE):
        if key in value:
            return str(value[key]).rpartition(":")[2]
    return f"<{value[_LEFT_OUT]}, not saved>" if _LEFT_OUT in value else "{…}"


def encode_value(value: Any) -> Json:
    """Return one value of a recipe as JSON."""
    found = _encoded(value)
    return left_out(value) if found is None and value is not None else found


def _encoded(value: Any) -> Json:
    """Return a value as JSON; None if something in it can't be saved."""
    if isinstance(value, Each):
        assert isinstance(value.values, dict), "compile gives each its members' names"
        # As pairs: a member may have any name, also one that means something in JSON's dicts.
        return _all(value.values, lambda own: {_EACH: [[name, item] for name, item in own.items()]})
    if isinstance(value, Mapping):
        plain = all(isinstance(name, str) and not name.startswith("$") for name in value)
        return _all(value, lambda own: own) if plain else None
    if isinstance(value, list | tuple):
        own = [_encoded(item) for item in value]
        if any(new is None and old is not None for new, old in zip(own, value, strict=True)):
            return None
        return own if isinstance(value, list) else {_TUPLE: own}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # one number of NumPy, torch or JAX
        return value.item()
    if isinstance(value, functools.partial):
        path = _own_path(value.func)
        return (
            None if path is None or value.args else _all(value.keywords, lambda own: {_PARTIAL: path, _WITH: own})
        )
    if hasattr(type(value), "arguments") and (path := _own_path(type(value))) is not None:
        return _all(value.arguments, lambda own: {_MADE: path, _WITH: own})
    path = _own_path(value)
    return None if path is None else {_IMPORT: path}


def _all(values: Mapping[Any, Any], make: Callable[[dict[str, Json]], Json]) -> Json:
    own = {name: _encoded(value) for name, value in values.items()}
    return None if any(new is None and values[name] is not None for name, new in own.items()) else make(own)


def _own_path(value: Any) -> str | None:
    """Return the import path of a function or class, if that leads to this very object."""
    path = import_path(value)
    if path is None:
        return None
    module, _, name = path.partition(":")
    try:
        return path if functools.reduce(getattr, name.split("."), sys.modules[module]) is value else None
    except (KeyError, AttributeError):
        return None


def _decoded(value: Json, allow_import: bool) -> Any:
    if isinstance(value, list):
        return [_decoded(item, allow_import) for item in value]
    if not isinstance(value, dict):
        return value
    if _LEFT_OUT in value:
        raise _CannotReadError(f"was {value[_LEFT_OUT]}, which can't be saved")
    if _EACH in value:
        return Each({name: _decoded(own, allow_import) for name, own in value[_EACH]})
    if _TUPLE in value:
        return tuple(_decoded(item, allow_import) for item in value[_TUPLE])
    if _IMPORT in value:
        return _trusted(value[_IMPORT], allow_import)
    own = {name: _decoded(item, allow_import) for name, item in value.get(_WITH, value).items()}
    if _PARTIAL in value:
        return functools.partial(_trusted(value[_PARTIAL], allow_import), **own)
    if _MADE in value:
        kind = _trusted(value[_MADE], allow_import)
        if not (isinstance(kind, type) and hasattr(kind, "arguments")):
            raise ValueError(f"{value[_MADE]!r} can't be made from a folder")
        return kind(**own)
    return own


def _is_trusted(path: str) -> bool:
    """Return True if an import path leads to a function or class of a framework."""
    module = path.partition(":")[0]
    return any(module == name or module.startswith(f"{name}.") for name in TRUSTED)


def _trusted(path: str, allow_import: bool) -> Any:
    """Import a function or class, if it is one of the frameworks' own, or if anything may be imported."""
    if not (allow_import or _is_trusted(path)):
        raise _CannotReadError(f"is {path!r}, which load imports only with allow_import=True")
    try:
        found = imported(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise _CannotReadError(f"is {path!r}, which can't be imported: {without_period(error)}") from error
    if not allow_import and import_path(found) != path:  # such as a module that a framework's module imports
        raise _CannotReadError(f"is {path!r}, which load imports only with allow_import=True")
    return found
