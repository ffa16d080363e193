"""Schemas for values from a file, which are checked before anything is made of them.

A schema is one of these:

- a type: `float` accepts whole numbers, `int` no booleans, `object` anything;
- None;
- a range, for the whole numbers in it;
- a tuple of schemas, of which one must match (at most one of them a list, and one a mapping);
- `[schema]` for a list of any length;
- `{str: schema}` for a mapping;
- `{"key": schema, "key?": schema}` for a mapping with these keys, of which some are optional, and maybe others.
"""

from typing import Any, TypeAlias

from modelfleet.types import Json

Schema: TypeAlias = Any

_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "a mapping"}
_LONGEST_VALUE = 60  # characters shown of a wrong value


def check(value: Json, schema: Schema, path: str) -> None:
    """Raise ValueError if a value does not match the schema. The message names the part by its path."""
    if not fits(value, schema):  # nearly every value does, and needs no path
        _find_mismatch(value, schema, path)


def fits(value: Json, schema: Schema) -> bool:
    """Return True if a value matches the schema."""
    if isinstance(schema, tuple):
        return any(fits(value, one) for one in schema)
    if isinstance(schema, list):
        own = schema[0]
        return isinstance(value, list) and all(fits(item, own) for item in value)
    if isinstance(schema, dict):
        return isinstance(value, dict) and all(_fits_key(value, key, own) for key, own in schema.items())
    return _matches(value, schema)


def _fits_key(value: dict[str, Json], key: Any, schema: Schema) -> bool:
    if key is str:
        return all(fits(item, schema) for item in value.values())
    name = key.removesuffix("?")
    return fits(value[name], schema) if name in value else name != key


def _find_mismatch(value: Json, schema: Schema, path: str) -> None:
    """Raise ValueError for the first part of a value that does not match the schema."""
    if isinstance(schema, tuple):
        plain = [one for one in schema if isinstance(one, type | range) or one is None]
        if any(_matches(value, one) for one in plain):
            return
        nested = [one for one in schema if one not in plain and isinstance(value, type(one))]
        if not nested:
            raise _mismatch(value, schema, path)
        _find_mismatch(value, nested[0], path)
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise _mismatch(value, schema, path)
        for index, item in enumerate(value):
            _find_mismatch(item, schema[0], f"{path}[{index}]")
    elif isinstance(schema, dict):
        if not isinstance(value, dict):
            raise _mismatch(value, schema, path)
        _check_keys(value, schema, path)
    elif not _matches(value, schema):
        raise _mismatch(value, schema, path)


def _check_keys(value: dict[str, Json], schema: dict[Any, Schema], path: str) -> None:
    for key, own in schema.items():
        if key is str:
            for name, item in value.items():
                _find_mismatch(item, own, f"{path}[{name!r}]")
        elif key.removesuffix("?") in value:
            _find_mismatch(value[key.removesuffix("?")], own, f"{path}[{key.removesuffix('?')!r}]")
        elif not key.endswith("?"):
            raise ValueError(f"{path} has no {key!r}")


def _matches(value: Json, schema: type | range | None) -> bool:
    if schema is None:
        return value is None
    if isinstance(schema, range):
        return type(value) is int and value in schema
    if schema is int:
        return type(value) is int
    if schema is float:
        return type(value) in (int, float)
    return isinstance(value, schema)


def _mismatch(value: Json, schema: Schema, path: str) -> ValueError:
    text = repr(value)
    shown = text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
    return ValueError(f"{path} is {shown}, expected {_describe(schema)}")


def _describe(schema: Schema) -> str:
    if isinstance(schema, tuple):
        return " or ".join(_describe(one) for one in schema)
    if isinstance(schema, range):
        return f"a whole number from {schema[0]} to {schema[-1]}"
    if isinstance(schema, list):
        return "a list"
    if isinstance(schema, dict):
        return "a mapping"
    return "null" if schema is None else _WORDS.get(schema, getattr(schema, "__name__", str(schema)))
