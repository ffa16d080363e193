"""The command line: what its commands print, and how they refuse."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from tests import manifests
from torch import nn

import modelfleet as mf
from modelfleet import cli, demo, doctor, inspection, nvidia
from modelfleet.devices import Device, Memory


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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.startswith("False")
    done = subprocess.run(
        [sys.executable, "-m", "modelfleet", "inspect", "nowhere"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
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


def test_inspect_shows_the_recipe_and_the_optimizer_state(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = run(capsys, "inspect", str(saved))
    assert "no optimizer state" in out
    assert "compiled" not in out
    fleet = mf.Fleet.build(make_net, 2, width=1)
    fleet.compile("adam", lambda output, target: (output - target).square().mean(), lr=mf.each([0.1, 0.2]))
    x = np.random.default_rng(0).standard_normal((40, 3))
    fleet.fit((x, x[:, :1]), epochs=2, batch_size=20, progress=False)
    fleet.add("late", make_net(1))
    fleet.save(tmp_path / "trained")
    code, out, _ = run(capsys, "inspect", str(tmp_path / "trained"))
    assert code == 0
    assert "2 epochs, 4 steps" in out
    told = "compiled with optimizer='adam', loss=<a lambda of tests.test_cli, not saved>, precision='float32', "
    assert f"{told}lr=each(…): 0, 1, late" in " ".join(out.split())
    assert "optimizer state of 2 members, " in out
    assert "optimizer-0" not in out


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
    assert "manifest.json can't be used: it is damaged or was edited" in err
    manifests.edit(saved, lambda manifest: None)  # the same, with a checksum that fits
    code, _, err = run(capsys, "inspect", str(saved))
    assert code == 1
    assert "a manifest that is not a fleet's: the manifest has no 'members'" in err


def test_a_long_fleet_is_cut_short(tmp_path: Path) -> None:
    mf.Fleet.build(make_net, 30, width=1).save(tmp_path / "many")
    console = Console(width=120, record=True, file=StringIO())
    console.print(inspection.describe(tmp_path / "many"))
    assert "… and 20 more" in console.export_text()


def lines_of(out: str) -> dict[str, str]:
    """The rows of the doctor's table, by their first cell."""
    return {line.strip("│ ").split("│")[0].strip(): line for line in out.splitlines() if "│" in line}


class Adapter:
    """A framework that sees two GPUs, and tells the memory of one."""

    def __init__(self, known: dict[str, Memory]) -> None:
        self.known = known

    def accelerators(self) -> list[Device]:
        return [Device("cuda", 0), Device("cuda", 1)]

    def native(self, device: Device) -> str:
        return f"native {device}"

    def memory(self, device: str) -> Memory | None:
        return self.known.get(device)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with torch and TensorFlow, and with a JAX that is broken."""
    adapters = {
        "tensorflow": Adapter({}),
        "torch": Adapter({"native cuda:0": Memory(80 * 10**9, 60 * 10**9)}),
    }

    def version(package: str) -> str:
        if package in ("polars", "scikit-learn", "keras", "ray"):
            raise PackageNotFoundError(package)
        return "12.34"

    def adapter(name: str) -> Adapter:
        if name == "jax":
            raise RuntimeError("jaxlib is\nof another [version]")
        return adapters[name]

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor.frameworks, "adapter", adapter)
    monkeypatch.setattr(doctor, "host_memory", lambda: Memory(16 * 10**9, 4 * 10**9))
    monkeypatch.setattr(doctor, "cores", lambda: 6)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(nvidia, "_said", lambda command, *arguments, stdin="": None)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("machine")
def test_doctor_tells_what_is_here_and_how_to_get_what_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    lines = lines_of(out)
    assert "12.34" in lines["torch"]
    assert "pip install polars" in lines["polars"]
    assert "pip install 'modelfleet[demo]'" in lines["scikit-learn"]
    assert "pip install 'modelfleet[keras]'" in lines["keras"]
    assert "pip install 'modelfleet[ray]'" in lines["ray"]
    assert "Ray cluster" not in lines
    assert "install g++" in lines["C++ compiler"]


@pytest.mark.usefixtures("machine")
def test_doctor_tells_every_device_its_memory_and_who_sees_it(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "doctor")
    lines = lines_of(out)
    assert "4.0 GB free of 16.0 GB" in lines["cpu"]
    assert "seen by torch, tensorflow" in lines["cpu"]
    assert "60.0 GB free of 80.0 GB" in lines["cuda:0"]
    assert "memory not known" in lines["cuda:1"]
    assert "seen by torch, tensorflow" in lines["cuda:1"]
    assert "6 cores" in lines["cpu:0, cpu:1, …"]


@pytest.mark.usefixtures("machine")
def test_doctor_says_of_a_framework_that_does_not_import_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "does not import: RuntimeError: jaxlib is of another [version]" in lines_of(out)["jax"]


@pytest.mark.usefixtures("machine")
def test_doctor_tells_who_uses_the_memory_of_gpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = run(capsys, "doctor")
    assert "nvidia-cuda-mps-control -d; without it" in lines_of(out)["MPS daemon"]
    held = [
        nvidia.GpuProcess("GPU 0, A100", 12, "python", 5 * 10**9),
        nvidia.GpuProcess("GPU 1, A100", 7, "x", None),
    ]
    monkeypatch.setattr(nvidia, "processes", lambda: held)
    monkeypatch.setattr(nvidia, "multi_process_service", lambda: True)
    _, out, _ = run(capsys, "doctor")
    lines = lines_of(out)
    assert "runs" in lines["MPS daemon"]
    assert "without it" not in lines["MPS daemon"]
    assert "5.0 GB: python, process 12" in lines["GPU 0, A100"]
    assert "memory not known: x, process 7" in lines["GPU 1, A100"]


@pytest.mark.usefixtures("machine")
def test_doctor_tells_it_to_programs_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["modelfleet"] == mf.__version__
    assert told["devices"][1] == {
        "device": "cuda:0",
        "memory": {"total": 80 * 10**9, "free": 60 * 10**9},
        "frameworks": ["torch", "tensorflow"],
    }
    assert {row["what"]: row["here"] for row in told["packages"]}["polars"] is None


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("free", "warned"), [(64 * 10**6, True), (2 * 10**9, False)])
def test_doctor_warns_of_little_shared_memory(
    free: int, warned: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=3 * 10**9, free=free)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    _, out, _ = run(capsys, "doctor")
    row = lines_of(out)["shared memory, /dev/shm"]
    assert "pass batches through it" in row
    assert ("--shm-size" in row) == warned


@pytest.mark.parametrize(
    ("connected", "address", "expected"),
    [
        (True, None, "connected"),
        (False, "10.0.0.1:6379", "RAY_ADDRESS=10.0.0.1:6379"),
        (False, None, "mf.connect"),
    ],
)
def test_doctor_tells_whether_there_is_a_cluster(
    connected: bool,
    address: str | None,
    expected: str,
    machine: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "version", lambda package: "1")
    monkeypatch.setattr(doctor, "load_adapters", lambda: ({}, {}))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: connected))
    _, out, _ = run(capsys, "doctor")
    assert expected in lines_of(out)["Ray cluster"]


def test_doctor_sees_the_frameworks_of_this_machine() -> None:
    # In a process of its own: Keras's backend is fixed for a process.
    script = (
        "import json, sys; from modelfleet import doctor; told = doctor.examine().to_dict(); "
        "print(json.dumps([told, 'ray' in sys.modules]))"
    )
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600, env=environment
    )
    told, has_ray = json.loads(done.stdout.splitlines()[-1])
    assert told["devices"][0]["frameworks"] == ["torch", "jax", "tensorflow", "keras"]
    if len(told["devices"]) == 1:
        assert [row["what"] for row in told["accelerators"]] == ["accelerators"]
    assert told["devices"][0]["memory"]["total"] >= told["devices"][0]["memory"]["free"] > 0
    keras = next(row for row in told["packages"] if row["what"] == "keras")
    assert keras["here"].endswith("backend torch")
    assert not has_ray


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
