"""What every reference has in common: whose data come when. Nothing here is of the library."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from tests.fuzz import data as given
from tests.fuzz.programs import Data, Program, Recipe, turns

LOW_PRECISION = 5e-2
"""How far numbers in bf16 may be apart, relative to the largest of an array, or to 1."""


class Knob:
    """Something outside of a model that an objective reads."""

    value = 1.0


class Reference:
    """Does to the members' models what a program says, by a framework's own means."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names: list[str] = []
        self.numbers: dict[str, int] = {}  # by which members find their own data
        self.kinds: dict[str, str] = {}
        self.knob: Any = Knob()

    def arrays(self, data: Data, member: int | None) -> given.Arrays:
        kind = next(iter(self.kinds.values()))
        return given.arrays(data, member, kind, self.program.task, self.program.dtype)

    def rows(self, data: Data, name: str) -> int:
        return data.rows if data.own is None else data.own[self.numbers[name] % len(data.own)]

    def cuts(self, data: Data, rows: int, batch: int) -> Any:
        return given.cuts(rows, batch, uneven=data.uneven and data.form in ("list", "function"))

    def loader(self, data: Data, batch: int, member: int | None) -> Any:
        """Batches that can be read again and again."""
        x, y = self.arrays(data, member)
        return [(np.array(x[cut]), np.array(y[cut])) for cut in self.cuts(data, len(x), batch)]

    def size(self, data: Data, batch: Any, name: str) -> int:
        """The rows of a batch for one member; of a loader that all read, those of the first."""
        return turns(batch, 0 if data.own is None and data.form != "arrays" else self.names.index(name))

    def batches(self, data: Data, batch: Any, name: str) -> Any:
        """Batches for one member, to be read once."""
        own = None if data.own is None else self.numbers[name]
        return iter(self.loader(data, self.size(data, batch, name), own))

    def sources(self, data: Data, batch: Any, names: list[str], steps: int | None) -> dict[str, Any]:
        """By name what a member reads; one for "" if all read the same."""
        if data.own is None and data.form != "arrays":
            return {"": _stretched(self.loader(data, turns(batch, 0), None), steps)}
        return {
            name: _stretched(
                self.loader(data, self.size(data, batch, name), None if data.own is None else self.numbers[name]),
                steps,
            )
            for name in names
        }


class Stretched:
    """A loader in epochs of so many steps, which go on where the last one stopped, and at its end begin anew."""

    def __init__(self, loader: Any, steps: int) -> None:
        self.loader, self.steps, self.rest = loader, steps, iter(())

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.steps):
            batch = next(self.rest, None)
            if batch is None:
                self.rest = iter(self.loader)
                batch = next(self.rest)
            yield batch


def _stretched(loader: Any, steps: int | None) -> Any:
    return loader if steps is None else Stretched(loader, steps)


class Unsure(float):
    """A number that rounding may have moved by up to `doubt`: an accuracy of outputs that are all but tied."""

    doubt: float = 0.0


class Totals:
    """Sums over an epoch."""

    def __init__(self) -> None:
        self.rows = 0
        self.sums: dict[str, float] = {}
        self.tied = 0  # rows whose class is decided by the rounding of low precision

    def add(self, result: tuple[Any, dict[str, Any]], batch: Any, recipe: Recipe) -> None:
        """Add a batch: its loss, and metrics of an objective or (as "") the outputs."""
        loss, extra = result
        rows = len(batch[0])
        self.rows += rows
        values = {key: _double(value).item() for key, value in {"loss": loss, **extra}.items() if key}
        for metric in recipe.metrics:
            values[metric] = float(_METRICS[metric](_double(extra[""]), np.asarray(batch[1])))
            if metric == "accuracy" and recipe.precision != "float32":
                self.tied += _tied(_double(extra[""]))
        for key, value in values.items():
            self.sums[key] = self.sums.get(key, 0.0) + rows * value

    def values(self) -> dict[str, float]:
        """The means over the rows."""
        found = {key: value / self.rows for key, value in self.sums.items()}
        if self.tied:
            found["accuracy"] = Unsure(found["accuracy"])
            found["accuracy"].doubt = self.tied / self.rows
        return found

    def note(self, history: dict[str, list[float]], prefix: str) -> None:
        """Add them to a history."""
        for key, value in self.values().items():
            history.setdefault(prefix + key, []).append(value)


_METRICS = {
    "mse": lambda o, t: ((o - t) ** 2).mean(),
    "mae": lambda o, t: np.abs(o - t).mean(),
    "accuracy": lambda o, t: (o.argmax(1) == t).mean(),
}


def _tied(outputs: np.ndarray) -> int:
    """How many rows have two classes that are closer to each other than low precision tells apart."""
    ordered = np.sort(outputs, axis=1)
    return int((ordered[:, -1] - ordered[:, -2] <= LOW_PRECISION * np.maximum(1.0, np.abs(ordered).max(1))).sum())


def _double(output: Any) -> np.ndarray:
    return np.asarray(output.detach().double() if hasattr(output, "detach") else output, np.float64)


def zipped(sources: dict[str, Any], active: list[str]) -> Iterator[dict[str, Any]]:
    """The next batch of every member, until all of them are at their end. One loader for all is read once."""
    shared = sources.get("")
    if shared is not None:
        for batch in shared:
            yield dict.fromkeys(active, batch)
        return
    readers = {name: iter(sources[name]) for name in active}
    while readers:
        found = {name: next(reader, None) for name, reader in readers.items()}
        readers = {name: reader for name, reader in readers.items() if found[name] is not None}
        if readers:
            yield {name: found[name] for name in readers}
