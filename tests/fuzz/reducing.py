"""Make a program that fails smaller, as long as it fails in the same way."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

from tests.fuzz.programs import Program

Fails = Callable[[Program], str]


def kind(message: str) -> str:
    """What a failure is, without the numbers and the words of one program."""
    first = message.partition("\n\n")[0]
    said = first.rpartition("): ")[2] if "): " in first else first
    said = re.sub(r"0x[0-9a-f]+|'[^']*'|\[[^\]]*\]|\([^)]*\)", "…", said)
    verb = re.search(r"verb \d+, (\w+)", first)
    return f"{verb[1] if verb else ''}: {re.sub(r'[-+]?[0-9]+[0-9.e+-]*', '#', said)}"[:160]


def features(program: Program) -> frozenset[str]:
    """What a program has that others need not have: verbs, parts of models, and all that is not plain."""
    found = {type(verb).__name__ for verb in program.verbs}
    for value in (*program.verbs, *program.nets):
        found |= set(_features(value))
    if len(program.nets) > 1:
        found.add("several members")
    return frozenset(found)


def _features(value: Any) -> Iterator[str]:
    for field in fields(value):
        own = getattr(value, field.name)
        if field.name == "parts":
            yield from own
        elif hasattr(own, "__dataclass_fields__"):
            yield from _features(own)
        elif field.name == "during":
            for _, verb in own:
                yield f"{type(verb).__name__} in a callback"
        elif field.name == "hyper":
            yield from (name for name, _ in own if name not in ("lr", "eps"))
        elif field.name in ("own", "batch", "epochs", "clip", "shared", "frozen", "evaluated", "uneven", "broken"):
            if own != field.default and (own or field.name == "clip"):
                yield field.name
        elif isinstance(own, str) and own != field.default:
            yield f"{field.name} {own}"


def reduced(program: Program, fails: Fails, seconds: float) -> Program:
    """A small program with the failure of `program`. `fails` gives a failure's message, or an empty text."""
    until, wanted = time.monotonic() + seconds, kind(fails(program))
    again = True
    while again:
        again = False
        for smaller in _smaller(program):
            if time.monotonic() > until:
                return program
            if kind(fails(smaller)) == wanted:
                program, again = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for number in reversed(range(len(program.verbs))):
        if len(program.verbs) > 1:
            yield replace(program, verbs=_without(program.verbs, number))
    for number in reversed(range(len(program.nets))):
        if len(program.nets) > 1:
            yield replace(program, nets=_without(program.nets, number))
    for name, plain in (("devices", "cpu"), ("build", False)):
        if getattr(program, name) != plain:
            change: dict[str, Any] = {name: plain}
            yield replace(program, **change)
    parts = {part for net in program.nets for part in getattr(net, "parts", ())}
    for part in sorted(parts):
        yield replace(program, nets=tuple(_without_part(net, part) for net in program.nets))
    for place in ("verbs", "nets"):
        values = getattr(program, place)
        for number, value in enumerate(values):
            for simpler in _simpler(value):
                smaller: dict[str, Any] = {place: (*values[:number], simpler, *values[number + 1 :])}
                yield replace(program, **smaller)


def _without_part(net: Any, part: str) -> Any:
    places = {field.name: () for field in fields(net) if field.name in ("frozen", "evaluated")}
    return replace(net, parts=tuple(one for one in net.parts if one != part), **places)


def _without(values: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    return values[:number] + values[number + 1 :]


def _simpler(value: Any) -> Iterator[Any]:
    """The value with one of its fields at the default, or simpler."""
    for field in fields(value):
        own = getattr(value, field.name)
        if field.name in ("look", "kind", "seed", "net"):
            continue
        if field.default is not MISSING and own != field.default and field.name not in ("parts", "recipe", "data"):
            yield replace(value, **{field.name: field.default})
        if isinstance(own, tuple) and field.name == "during":
            for number in range(len(own)):
                yield replace(value, during=_without(own, number))
        if hasattr(own, "__dataclass_fields__"):
            for inner in _simpler(own):
                yield replace(value, **{field.name: inner})
