"""Launches of one train step: as many as the table in docs/accelerators.md says."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.nets import make_net
from benchmarks.rows import ROWS, Row, datasets
from tests.standin.device import Told, listening

import modelfleet as mf
from modelfleet.frameworks.torch.compiling.graph_source import ONE_WIDTH, GraphSource
from modelfleet.frameworks.torch.fused import capture
from modelfleet.frameworks.torch.fused.engine import FusedEngine
from modelfleet.lanes.lane import Lane

TRITON = Path(sys.prefix) / "triton"  # apart from the other packages, as the Makefile says
DOCS = Path(__file__).parents[2] / "docs/accelerators.md"
COLUMNS = ("network", "uncompiled", "compiled", "captured")
HEADER = f"| {' | '.join(COLUMNS)} |"
NETS = {"MLP": "mlp-64", "CNN": "cnn", "transformer": "transformer", "LSTM": "lstm"}
MEMBERS, STEPS = 8, 12


def row_of(name: str) -> Row:
    row = ROWS[NETS[name]]
    return replace(row, members=MEMBERS, examples=STEPS * row.batch)


def fleet_of(name: str) -> mf.Fleet:
    fleet = mf.Fleet.build(make_net, MEMBERS, row=row_of(name), seed=0, devices="standin:0")
    fleet.compile("adamw", "cross_entropy", lr=1e-3)
    return fleet


def fit(fleet: mf.Fleet, name: str) -> list[Counter[str]]:
    """Train one epoch, and return the launches of each step by operation. Those that gather rows come before."""
    steps: list[Counter[str]] = []
    train = Lane.train
    within = False

    def counted(self: Lane, *args: Any) -> None:
        nonlocal within
        steps.append(Counter())
        within = True
        train(self, *args)
        within = False

    def tell(told: Told) -> None:
        if within and told.kind == "op":
            steps[-1][told.text] += 1

    row = row_of(name)
    with pytest.MonkeyPatch.context() as patch, listening(tell):
        patch.setattr(Lane, "train", counted)
        fleet.fit(datasets(row)[0], batch_size=row.batch, progress=False, strategy="fused")
    assert len(steps) == STEPS
    return steps


def steady(steps: list[Counter[str]]) -> int:
    """The launches of a step after the first ones."""
    (only,) = {step.total() for step in steps[6:]}
    return only


def table() -> dict[str, list[int]]:
    """The table of the docs: by network, the launches in each column."""
    _, _, rest = DOCS.read_text(encoding="utf-8").partition(HEADER + "\n")
    rows = rest.partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: [int(number) for number in numbers] for name, *numbers in cells}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("column", ["uncompiled", "captured"])
def test_a_step_has_the_launches_of_the_table(name: str, column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "STEPS_LEFT", 0 if column == "captured" else STEPS + 1)
    found = fit(fleet_of(name), name)
    expected = table()[name][COLUMNS.index(column) - 1]
    assert steady(found) == expected, f"{name}, {column}: {found[-1]}"


@pytest.mark.slow
@pytest.mark.skipif(not TRITON.exists(), reason="inductor's CUDA code needs triton, which make setup installs")
def test_a_compiled_step_has_the_launches_of_the_table(tmp_path: Path) -> None:
    for name in NETS:
        fleet = fleet_of(name)
        fit(fleet, name)
        (lane,) = fleet._lanes
        assert isinstance(lane.engine, FusedEngine)
        (runner,) = lane.engine.programs._all("train")
        assert runner.program.graph is not None
        GraphSource.of(runner.program.graph, runner.program.inputs, ONE_WIDTH).write(tmp_path / name)
    command = [sys.executable, "-m", "tests.standin.cuda_code", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TRITON), *sys.path))}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads((tmp_path / "launches.json").read_text())
    assert found == {name: numbers[1] for name, numbers in table().items()}
