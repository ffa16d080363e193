"""What a fleet of 20,000 members costs beside its steps: build, plan, load, and fit again after a drop."""

import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch._dynamo  # noqa: F401  (an import like the others: before the clock starts)
from torch import nn

import modelfleet as mf
from benchmarks.nets import make_net
from benchmarks.peers import Round, compete_in_cases
from benchmarks.rows import MLP_2000

MEMBERS = 20_000


def factory() -> nn.Module:
    """One member."""
    return make_net(MLP_2000)


def prepare(quick: bool) -> Callable[[str], Round]:
    members = 50 if quick else MEMBERS
    random = np.random.default_rng(0)
    x = random.standard_normal((2 * MLP_2000.batch, MLP_2000.widths[0]), dtype=np.float32)
    data = x, random.integers(0, MLP_2000.classes, len(x))

    @cache
    def the_fleet() -> mf.Fleet:
        fleet = mf.Fleet.build(factory, members, seed=0)
        fleet.compile("adam", "cross_entropy", lr=1e-3)
        return fleet

    def load() -> float:
        with tempfile.TemporaryDirectory() as folder:
            the_fleet().save(Path(folder) / "fleet")
            return seconds(lambda: mf.load(Path(folder) / "fleet", factory=factory))

    def drop() -> float:
        fleet = the_fleet()
        fit = partial(fleet.fit, data, batch_size=MLP_2000.batch, progress=False)
        fit()

        def drop_and_fit() -> None:
            fleet.drop(fleet.names[members // 2])
            fit()

        return seconds(drop_and_fit)

    cases: dict[str, Callable[[], float]] = {
        "build": lambda: seconds(the_fleet),
        "plan": lambda: seconds(lambda: the_fleet().plan(data, batch_size=MLP_2000.batch)),
        "load": load,
        "drop one and fit again": drop,
    }
    return lambda case: Round(members, 0.0, cases[case]())


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    compete_in_cases(prepare)
