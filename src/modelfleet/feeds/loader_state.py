"""Where a loader is: its own random generators, and its place in a pass that goes on over several epochs."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from modelfleet.frameworks import global_generators
from modelfleet.types import Data

LoaderState = dict[str, np.ndarray]

_PASS = "pass/"  # prefix of the generators' states at the start of a pass


class ContinuedLoader:
    """A loader in epochs of a fixed number of steps.

    Each epoch continues where the last one stopped. At its end the loader starts again.
    """

    def __init__(self, loader: Data, steps: int) -> None:
        self._loader = loader
        self._steps = steps
        self._batches: Iterator[object] | None = None
        self._taken = 0  # batches of this pass
        self._at_start: LoaderState = {}  # the generators when this pass began

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[object]:
        taken = 0
        while taken < self._steps:
            fresh = self._batches is None
            batch = self._next()
            if batch is None:
                self._batches = None
                if fresh:
                    return
                continue
            yield batch
            taken += 1

    def _next(self) -> object | None:
        if self._batches is None:
            self._taken = 0
            self._at_start = {**global_generators.state(), **_generator_states(self._loader)}
            called = callable(self._loader) and not hasattr(self._loader, "__iter__")
            self._batches = iter(self._loader() if called else self._loader)
        self._taken += 1
        return next(self._batches, None)

    def place(self) -> LoaderState:
        """Return how many batches of a pass were taken, and the generators that it began with."""
        if self._batches is None:
            return {}
        start = {f"{_PASS}{name}": state for name, state in self._at_start.items()}
        return {"taken": np.array([self._taken]), **start}

    def go_to(self, state: Mapping[str, np.ndarray]) -> None:
        """Begin a pass with the same generators as then, and leave out the batches that were taken."""
        self._batches = None
        if "taken" not in state:
            return
        start = with_prefix(state, _PASS)
        with global_generators.kept():
            global_generators.restore(start)
            _restore_generators(self._loader, start)
            for _ in range(int(state["taken"][0])):
                self._next()


def with_prefix(state: Mapping[str, np.ndarray], prefix: str) -> LoaderState:
    """Return the entries whose names have a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def loader_state(loader: Data) -> LoaderState:
    """Return the state of a loader that the global generators do not decide, as far as it can be known."""
    return {**_generator_states(loader), **(loader.place() if isinstance(loader, ContinuedLoader) else {})}


def restore_loader(loader: Data, state: Mapping[str, np.ndarray]) -> None:
    """Bring a loader to where it was when `loader_state` was called."""
    if isinstance(loader, ContinuedLoader):
        loader.go_to(state)
    _restore_generators(loader, state)


def has_state(loader: Data) -> bool:
    """Return True if a loader has state of its own, beside the global generators."""
    return isinstance(loader, ContinuedLoader) or bool(_generators(loader))


def _generator_states(loader: Data) -> LoaderState:
    return {f"generator-{n}": np.asarray(own.get_state()).copy() for n, own in enumerate(_generators(loader))}


def _restore_generators(loader: Data, state: Mapping[str, np.ndarray]) -> None:
    for number, generator in enumerate(_generators(loader)):
        stored = state.get(f"generator-{number}")
        if stored is not None:
            own = generator.get_state()  # in the framework's own type
            np.asarray(own)[:] = stored
            generator.set_state(own)


def _generators(loader: Data) -> list[Any]:
    """Return the generators that a DataLoader or its samplers were given."""
    while hasattr(loader, "_loader"):  # within another loader
        loader = loader._loader
    batches = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    known = {id(one): one for one in found if hasattr(one, "get_state") and hasattr(one, "set_state")}
    return list(known.values())
