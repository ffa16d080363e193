"""Forms that values from a file must have: checked in one place before anything is made of them.

A form is a type (`float` takes whole numbers, `int` no booleans, `object` anything), None, a tuple of forms of
which one must fit (at most one that is a list or a mapping), `[form]` for a list of any length, `{str: form}` for
a mapping, or `{"key": form, "key?": form}` for a mapping with these keys, which may have others.
"""

from typing import Any

_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "a mapping"}
_MOST = 60


def check(value: Any, form: Any, path: str) -> None:
    """Raise ValueError if a value has not the form; it says which part of it, by its path."""
    if isinstance(form, tuple):
        plain = [one for one in form if isinstance(one, type) or one is None]
        if any(_is(value, one) for one in plain):
            return
        nested = [one for one in form if one not in plain]
        if not nested or not isinstance(value, type(nested[0])):
            raise _unfit(value, form, path)
        check(value, nested[0], path)
    elif isinstance(form, list):
        if not isinstance(value, list):
            raise _unfit(value, form, path)
        for index, item in enumerate(value):
            check(item, form[0], f"{path}[{index}]")
    elif isinstance(form, dict):
        if not isinstance(value, dict):
            raise _unfit(value, form, path)
        _check_keys(value, form, path)
    elif not _is(value, form):
        raise _unfit(value, form, path)


def _check_keys(value: dict[str, Any], form: dict[Any, Any], path: str) -> None:
    for key, own in form.items():
        if key is str:
            for name, item in value.items():
                check(item, own, f"{path}[{name!r}]")
        elif key.removesuffix("?") in value:
            check(value[key.removesuffix("?")], own, f"{path}[{key.removesuffix('?')!r}]")
        elif not key.endswith("?"):
            raise ValueError(f"{path} has no {key!r}")


def _is(value: Any, form: Any) -> bool:
    if form is None:
        return value is None
    if form is int:
        return type(value) is int
    if form is float:
        return type(value) in (int, float)
    return isinstance(value, form)


def _unfit(value: Any, form: Any, path: str) -> ValueError:
    text = repr(value)
    shown = text if len(text) <= _MOST else text[: _MOST - 1] + "…"
    return ValueError(f"{path} is {shown}, expected {_told(form)}")


def _told(form: Any) -> str:
    if isinstance(form, tuple):
        return " or ".join(_told(one) for one in form)
    if isinstance(form, list):
        return "a list"
    if isinstance(form, dict):
        return "a mapping"
    return "null" if form is None else _WORDS.get(form, getattr(form, "__name__", str(form)))
