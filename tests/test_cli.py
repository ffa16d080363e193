"""The command line: what its commands print, and how they refuse."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from torch import nn

import modelfleet as mf
from modelfleet import cli, demo, doctor, inspection


def make_net(width: int) -> nn.Module:
    return nn.Linear(3, width)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a command."""
    try:
        cli.main(list(arguments))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    fleet = mf.Fleet.build(make_net, ["a", "b", "[red]c"], seed=7, width=mf.each([2, 2, 5]))
    fleet.save(tmp_path / "fleet")
    return tmp_path / "fleet"


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"{mf.__version__}\n", "")


def test_the_module_runs_as_a_command_without_importing_a_framework() -> None:
    script = "import sys, modelfleet.cli; print('torch' in sys.modules, 'rich.console' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("False")
    done = subprocess.run(
        [sys.executable, "-m", "modelfleet", "inspect", "nowhere"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "modelfleet: there is no folder nowhere. Check the path.\n"


def test_inspect_shows_the_members_and_groups_of_a_fleet(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = run(capsys, "inspect", str(saved))
    assert (code, err) == (0, "")
    assert "a fleet of 3 members (torch)" in out
    assert "seed 7" in out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if "│" in line]
    assert ["group-0", "2", "Linear", "8"] in [row[:4] for row in rows]
    assert ["group-1", "1", "Linear", "20"] in [row[:4] for row in rows]
    assert next(row for row in rows if row[0] == "[red]c")[1:3] == ["group-1", "0"]
    assert "width=5" in out
    assert "make_net" in out


def test_inspect_shows_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = mf.Fleet.build(make_net, 4, width=1)
    fleet.compile("sgd", "mse", lr=mf.each([0.1, 0.1, 0.1, 1e30]))
    x = np.random.default_rng(0).standard_normal((40, 3))
    checkpoint = mf.Checkpoint(tmp_path / "run")
    fleet.fit((x, x[:, :1]), epochs=2, batch_size=20, callbacks=[checkpoint], progress=False)
    code, out, _ = run(capsys, "inspect", str(tmp_path / "run"))
    assert code == 0
    assert "a checkpoint after epoch 2 of 2 (step 4)" in " ".join(out.split())
    assert "0 … 3 (4)" in out
    assert "1 failed" in " ".join(out.split())


def test_inspect_refuses_what_is_not_its_own_in_one_line(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    code, out, err = run(capsys, "inspect", str(tmp_path / "other"))
    assert (code, out) == (1, "")
    assert "was not saved by modelfleet" in err
    assert err.count("\n") == 1

    manifest = saved / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"members"', '"persons"'))
    code, _, err = run(capsys, "inspect", str(saved))
    assert code == 1
    assert "can't be understood" in err


def test_a_long_fleet_is_cut_short(tmp_path: Path) -> None:
    mf.Fleet.build(make_net, 30, width=1).save(tmp_path / "many")
    console = Console(width=120, record=True, file=StringIO())
    console.print(inspection.describe(tmp_path / "many"))
    assert "… and 20 more" in console.export_text()


def test_doctor_tells_what_is_here_and_how_to_get_what_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def version(package: str) -> str:
        if package in ("polars", "scikit-learn", "jax"):
            raise PackageNotFoundError(package)
        return torch.__version__

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    lines = {line.strip("│ ").split("│")[0].strip(): line for line in out.splitlines() if "│" in line}
    assert torch.__version__ in lines["torch"]
    assert "pip install polars" in lines["polars"]
    assert "pip install 'modelfleet[demo]'" in lines["scikit-learn"]
    assert "pip" not in lines["jax"]  # nothing uses it yet
    assert "install g++" in lines["C++ compiler"]
    assert "cpu" in lines["devices"]


def test_bench_outside_of_a_checkout_says_where_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "lib" / "modelfleet" / "cli.py"))
    code, _, err = run(capsys, "bench")
    assert code == 1
    assert "make bench" in err


def test_bench_runs_the_benchmarks_of_the_checkout_and_passes_on_their_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__main__.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(3)\n")
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capfd, "bench", "--", "mlp-64", "--quick")
    assert code == 3
    assert "['mlp-64', '--quick']" in out


def test_the_demo_compares_the_two_ways_and_draws_the_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "RATES", demo.RATES[::7])
    monkeypatch.setattr(demo, "DECAYS", (0.0, 0.1))
    outcome = demo.run(epochs=2, alone=2, picture=tmp_path / "curves.png")
    out = capsys.readouterr().out
    assert outcome.members == 8
    assert outcome.steps == 90
    assert outcome.difference < 1e-4
    assert outcome.speedup == pytest.approx(8 * outcome.alone_seconds / outcome.fleet_seconds)
    assert f"{outcome.speedup:.1f} × as fast" in out
    assert "extrapolated from 2" in out
    assert "The best 5 of 8" in out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_names_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    code, _, err = run(capsys, "demo")
    assert code == 1
    assert "scikit-learn" in err
    assert "pip install 'modelfleet[demo]'" in err


def test_the_demo_refuses_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "demo", "--epochs", "0")
    assert code == 1
    assert "1 epoch or more" in err
