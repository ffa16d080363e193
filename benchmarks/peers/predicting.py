"""`predict` and `evaluate` of many models: by a fleet, or by a loop over them, from the second call on."""

import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import modelfleet as mf
from benchmarks.entrants import FLEET
from benchmarks.nets import make_net
from benchmarks.peers import Round, compete_in_cases
from benchmarks.rows import MLP_64

LEAST_SECONDS, LEAST_CALLS = 0.3, 3  # how long a case is repeated; its quickest call counts
ROWS = 1024

Data = tuple[np.ndarray, np.ndarray]


def dataset(rows: int) -> Data:
    random = np.random.default_rng(0)
    x = random.standard_normal((ROWS, MLP_64.widths[0]), dtype=np.float32)
    return x[:rows], random.integers(0, MLP_64.classes, ROWS)[:rows]


@cache
def fleet_of(origin: str, models: int) -> mf.Fleet:
    """A fleet whose models nobody else holds, or one whose models the user has."""
    make = partial(make_net, MLP_64)
    fleet = mf.Fleet.build(make, models, seed=0) if origin == "built" else mf.Fleet(list(modules(models)))
    fleet.compile("adam", "cross_entropy", metrics=["accuracy"])
    return fleet


@cache
def modules(models: int) -> tuple[nn.Module, ...]:
    """The models that the user holds."""
    return tuple(make_net(MLP_64) for _ in range(models))


def loop_predict(models: tuple[nn.Module, ...], data: Data) -> dict[str, np.ndarray]:
    """What people write for `predict`."""
    x = torch.from_numpy(data[0])
    with torch.no_grad():
        return {str(number): model.eval()(x).numpy() for number, model in enumerate(models)}


def loop_evaluate(models: tuple[nn.Module, ...], data: Data) -> dict[str, dict[str, float]]:
    """What people write for `evaluate`."""
    x, y = map(torch.from_numpy, data)
    found = {}
    with torch.no_grad():
        for number, model in enumerate(models):
            output = model.eval()(x)
            accuracy = (output.argmax(1) == y).float().mean()
            found[str(number)] = {"loss": F.cross_entropy(output, y).item(), "accuracy": accuracy.item()}
    return found


LOOPS: Mapping[str, Callable[[tuple[nn.Module, ...], Data], Any]] = {
    "predict": loop_predict,
    "evaluate": loop_evaluate,
}


def call_of(who: str, verb: str, origin: str, models: int, data: Data) -> Callable[[], Any]:
    """What is called again and again; the fleet's answers are checked against the loop's first."""
    if who != FLEET:
        return partial(LOOPS[verb], modules(models), data)
    fleet = fleet_of(origin, models)
    call = partial(fleet.predict, data[0]) if verb == "predict" else partial(fleet.evaluate, data)
    # A built fleet's models stay its own: a saved copy is what the loop is run on.
    own = modules(models) if origin == "handed out" else copies(models)
    agree(call(), LOOPS[verb](own, data))
    return call


@cache
def copies(models: int) -> tuple[nn.Module, ...]:
    """The models of another fleet that was built in the same way, and so has the same weights."""
    twin = mf.Fleet.build(partial(make_net, MLP_64), models, seed=0)
    return tuple(twin[name] for name in twin)


def agree(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse answers that are not those of the models alone."""
    if list(found) != list(expected):
        raise ValueError(f"answers of {list(found)}; expected those of {list(expected)}")
    for name, own in expected.items():
        values = own if isinstance(own, dict) else {"output": own}
        given = found[name] if isinstance(own, dict) else {"output": found[name]}
        for what, value in values.items():
            np.testing.assert_allclose(np.asarray(given[what]), value, rtol=1e-4, atol=1e-5, err_msg=name)


def prepare(who: str, quick: bool) -> Callable[[str], Round]:
    def measure(case: str) -> Round:
        verb, origin, size = case.split(", ")
        models, rows = (int(number) for number in size.split(" × "))
        models = min(models, 10) if quick else models
        call = call_of(who, verb, origin, models, dataset(rows))
        call()
        taken: list[float] = []
        while len(taken) < LEAST_CALLS or (not quick and sum(taken) < LEAST_SECONDS):
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
        return Round(models, 0.0, min(taken))

    return measure


if __name__ == "__main__":
    compete_in_cases(prepare)
