"""Compiled programs: the same numbers, made once, and nothing left behind."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import helpers
from tests.helpers import all_weights, close, equal, fleet_of, toy, weights
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config

import modelfleet as mf
from modelfleet.frameworks.torch.compiling import compile_queue, compiler, decision
from modelfleet.frameworks.torch.compiling.compile_queue import CompileQueue, Outcome
from modelfleet.frameworks.torch.fused import programs as fused_programs
from modelfleet.frameworks.torch.fused.programs import Programs

X, Y = toy(20)
RECIPE: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests here: what one has compiled the next one finds."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # What the processor can do is not found out by compiling for it, which takes as long as a kernel does.
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    monkeypatch.delenv("MODELFLEET_COMPILE", raising=False)
    compile_queue.QUEUE.forget()
    with config.patch({"cpp.vec_isa_ok": True}):
        yield


def fit(fleet: mf.Fleet, data: Any, **options: Any) -> mf.History:
    """`fleet.fit` in silence, and always fused: what a busy machine measures must not matter here."""
    return helpers.fit(fleet, data, strategy="fused", **options)


def least(members: int) -> mf.Fleet:
    """A fleet of the least models there are: every kernel takes seconds to compile."""
    fleet = mf.Fleet.build(lambda: torch.nn.Linear(4, 3), members, seed=0)
    fleet.compile("sgd", "cross_entropy", **RECIPE)
    return fleet


def programs(fleet: mf.Fleet) -> Programs:
    assert fleet._lanes is not None
    return fleet._lanes[0].engine.programs


def compiled_so_far() -> int:
    """How many graphs torch's compiler has been asked for in this process, from its cache or not."""
    return sum(count for name, count in counters["inductor"].items() if name.startswith("fxgraph_cache_"))


def test_a_step_is_traced_once_for_each_form_of_batch() -> None:
    fleet = fleet_of(3, **RECIPE)
    fit(fleet, (X, Y), batch_size=8)
    traces = programs(fleet).traces
    fit(fleet, (X, Y), epochs=3, batch_size=8)
    fleet.compile("sgd", "cross_entropy", lr=mf.each([0.3, 0.2, 0.1]), momentum=0.8)
    fit(fleet, (X, Y), epochs=2, batch_size=8)
    fleet.compile("sgd", "cross_entropy", lr=0.01, momentum=0.8, schedule="cosine")
    fit(fleet, (X, Y), epochs=2, batch_size=8)
    assert programs(fleet).traces == traces
    fit(fleet, (X, Y), batch_size=5)
    assert programs(fleet).traces == traces + 1


def test_evaluate_and_predict_are_traced_once() -> None:
    fleet = fleet_of(2)
    fleet.evaluate((X, Y))
    fleet.predict(X)
    traces = programs(fleet).traces
    fit(fleet, (X, Y))
    after = programs(fleet).traces
    for _ in range(2):
        fleet.evaluate((X, Y))
        fleet.predict(X)
        fit(fleet, (X, Y))
    assert (traces, programs(fleet).traces) == (2, after)


def test_logical_devices_share_their_programs() -> None:
    fleet = mf.Fleet.build(lambda: torch.nn.Linear(4, 3), 4, seed=0, devices="cpu:0,cpu:1")
    fleet.compile("sgd", "cross_entropy", **RECIPE)
    helpers.fit(fleet, (X, Y), batch_size=10, strategy="threads")
    assert fleet._lanes is not None
    lanes = list(fleet._lanes)
    assert [lane.spec.device for lane in lanes] == ["cpu:0", "cpu:1"]
    assert lanes[0].engine.programs is lanes[1].engine.programs
    assert programs(fleet).traces == 2  # the gradients and the update of one lane


# --- beside the training


class Processes:
    """The compilers that were started, and the folders they were given."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[Any]] = []
        start: Any = subprocess.Popen

        def watched(command: list[str], **options: Any) -> subprocess.Popen[Any]:
            process = start(command, **options)
            if any(str(part).endswith("compiling/worker.py") for part in command):
                self.started.append(process)
            return process

        monkeypatch.setattr(compile_queue.subprocess, "Popen", watched)

    def said(self) -> bool:
        """Whether the first one has said how it went, or has ended without a word."""
        folder = Path(str(self.started[0].args[-2]))  # pyrefly: ignore
        return any((folder / name).exists() for name in ("done", "failed")) or ended(self.started[0].pid)

    def none_left(self) -> bool:
        gone = all(ended(process.pid) for process in self.started)
        return gone and not list(self.folder.glob("modelfleet-compile-*"))


def ended(group: int) -> bool:
    """Whether no process of a group is left; one that is dead and not yet waited for has ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(of) == group and state not in "ZX":
            return False
    return True


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until something holds; the limit is for what never will."""
    limit = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < limit, f"waited in vain for {what}"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def no_failures_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two failures of one kind end compiling for the process."""
    monkeypatch.setattr(compiler, "_failures", [])


@pytest.fixture
def eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    """Compiling pays at once, whatever the work that is left."""
    for constant in ("SECONDS_PER_NODE", "SECONDS_AT_LEAST", "SECONDS_TO_LOAD"):
        monkeypatch.setattr(decision, constant, 0.0)
    monkeypatch.setattr(decision, "SAVED_OF_COMPILABLE", 1e9)
    monkeypatch.setattr(compile_queue, "SETTLING_SECONDS", 0.0)
    monkeypatch.setattr(fused_programs, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Processes(tmp_path, monkeypatch)


class Wait(mf.Callback):
    """Holds the training until its compiler has said how it went, and ends the fit some epochs later."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.waited_at: int | None = None

    def on_step_end(self, run: Any) -> None:
        if self.processes.started and self.waited_at is None:
            wait_for(self.processes.said, "a compiler")
            self.waited_at = run.epoch

    def on_epoch_end(self, run: Any) -> None:
        # How the compiler ended is looked up every tenth of a second, not at every step.
        if self.waited_at is not None and not run.runs[0].lane.engine.programs.compiling:
            for name in run.active:
                run.stop(name)


@pytest.mark.slow
def test_training_goes_on_while_a_second_process_compiles(
    cache: Path, eager: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(cache / "modelfleet", ignore_errors=True)  # as if nothing had been compiled here before
    fleet, wait = least(3), Wait(eager)
    history = fit(fleet, (X, Y), epochs=10**6, batch_size=10, callbacks=[wait])
    assert len(eager.started) == 1
    assert eager.none_left()
    assert fleet.plan().lanes[0].program == "compiled"
    epochs = len(history["0"]["loss"])
    assert wait.waited_at is not None
    assert epochs > wait.waited_at > 0  # there were steps before it was compiled, and steps after

    monkeypatch.setenv("MODELFLEET_COMPILE", "never")
    other = least(3)
    expected = fit(other, (X, Y), epochs=epochs, batch_size=10)
    assert history["2"]["loss"] == pytest.approx(expected["2"]["loss"], rel=1e-4)
    assert close(weights(fleet["2"]), weights(other["2"]), 1e-4)


@pytest.mark.slow
def test_compiled_steps_give_the_numbers_of_traced_ones_and_are_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MODELFLEET_COMPILE", "never")
    traced = least(3)
    expected = [fit(traced, (X, Y), epochs=2, batch_size=10) for _ in range(2)]
    assert not programs(traced).compiled

    monkeypatch.setenv("MODELFLEET_COMPILE", "now")
    before = compiled_so_far()
    fleet = least(3)
    history = fit(fleet, (X, Y), epochs=2, batch_size=10)
    assert fleet.plan().lanes[0].program == "compiled"
    assert history["1"]["loss"] == pytest.approx(expected[0]["1"]["loss"], rel=1e-5)
    made, traces = compiled_so_far(), programs(fleet).traces
    assert made > before

    # The second step and the second epoch came with the first: here are the second fit and another rate.
    again = fit(fleet, (X, Y), epochs=2, batch_size=10)
    assert again["1"]["loss"] == pytest.approx(expected[1]["1"]["loss"], rel=1e-5)
    assert close(weights(fleet["1"]), weights(traced["1"]))
    fleet.compile("sgd", "cross_entropy", lr=mf.each([0.3, 0.2, 0.1]), momentum=0.8)
    fit(fleet, (X, Y), epochs=3, batch_size=10)
    fleet.compile("sgd", "cross_entropy", lr=0.01, momentum=0.8, schedule="cosine")
    fit(fleet, (X, Y), epochs=3, batch_size=10)
    assert programs(fleet).compiled
    assert compiled_so_far() == made
    assert programs(fleet).traces == traces


@pytest.mark.slow
def test_compiled_predictions_are_those_of_traced_ones_for_any_number_of_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = least(4)
    fleet.predict(X)
    assert fleet._lanes is not None
    (lane,) = fleet._lanes
    some = [{name: X[:4] + float(name) for name in names} for names in ("0123", "13")]
    traced = [lane.predict_rows(rows) for rows in some]
    monkeypatch.setenv("MODELFLEET_COMPILE", "now")
    before = compiled_so_far()
    lane.predict_rows(some[0])
    made = compiled_so_far()
    assert made > before
    for rows, expected in zip(some, traced, strict=True):
        for name, outputs in lane.predict_rows(rows).items():
            np.testing.assert_allclose(outputs, expected[name], rtol=1e-5, atol=1e-6)
    assert compiled_so_far() == made  # the program of four members serves two
    assert programs(fleet).compiled
    assert programs(fleet).time_ratio < 1  # of train steps, which are not compiled by this


def test_a_fit_that_ends_first_takes_its_compiler_with_it(eager: Processes) -> None:
    fleet = fleet_of(2)
    fit(fleet, (X, Y), epochs=4, batch_size=8)
    assert eager.started
    assert eager.none_left()
    assert not programs(fleet).compiled
    before = len(eager.started)
    fit(fleet, (X, Y), epochs=4, batch_size=8)  # and the next fit may try again
    assert len(eager.started) > before
    assert eager.none_left()


def test_an_error_in_the_fit_takes_its_compiler_with_it(eager: Processes) -> None:
    class Faulty(mf.Callback):
        def on_step_end(self, run: Any) -> None:
            if run.runs[0].lane.engine.programs.compiling:
                raise RuntimeError("my own mistake")

    with pytest.raises(RuntimeError, match="my own mistake"):
        fit(fleet_of(2), (X, Y), epochs=100, batch_size=8, callbacks=[Faulty()])
    assert eager.started
    assert eager.none_left()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """What is logged, from the first time that compiling fails on."""
    level = compiler.logger.level
    compiler.logger.setLevel(logging.DEBUG)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    compiler.logger.addHandler(handler)
    yield records
    compiler.logger.removeHandler(handler)
    compiler.logger.setLevel(level)


def test_a_compiler_that_fails_leaves_the_training_as_it_is(
    eager: Processes, told: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, other = fleet_of(2, **RECIPE), fleet_of(2, **RECIPE)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")  # a compiler that ends with an error at once
        history = fit(fleet, (X, Y), epochs=10**6, batch_size=20, callbacks=[Wait(eager)])
        fit(fleet, (X, Y), epochs=8, batch_size=20)
    assert eager.none_left()
    assert len(eager.started) == 1  # it is not tried again and again
    assert not programs(fleet).compiled
    assert [record.levelno for record in told] == [logging.WARNING]
    assert "a step could not be compiled: the compile process ended by itself, with" in told[0].getMessage()
    assert "fused; not compiled: the compile process ended by itself, with" in fleet.plan().lanes[0].reason
    monkeypatch.setenv("MODELFLEET_COMPILE", "never")
    fit(other, (X, Y), epochs=len(history["0"]["loss"]) + 8, batch_size=20)
    assert equal(all_weights(fleet), all_weights(other))


def test_what_cannot_be_loaded_leaves_the_training_as_it_is(
    eager: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called: list[Any] = []

    def broken(forms: Any) -> Any:
        called.append(forms)
        raise RuntimeError("no C++ compiler here")

    monkeypatch.setattr(compiler, "compile_first", broken)
    marker = tmp_path / "marker"
    marker.write_text("")
    monkeypatch.setattr(compiler.Compiler, "_marker", marker)
    fleet, other = fleet_of(2), fleet_of(2)
    fit(fleet, (X, Y), epochs=8, batch_size=20)
    assert called
    assert not programs(fleet).compiled
    monkeypatch.setenv("MODELFLEET_COMPILE", "never")
    fit(other, (X, Y), epochs=8, batch_size=20)
    assert equal(all_weights(fleet), all_weights(other))


def test_a_compiler_that_is_killed_leaves_nothing_behind(eager: Processes, told: list[logging.LogRecord]) -> None:
    class Kill(Wait):
        def on_step_end(self, run: Any) -> None:
            if self.processes.started and self.waited_at is None:
                os.kill(self.processes.started[0].pid, signal.SIGKILL)
            super().on_step_end(run)

    fleet = fleet_of(2, **RECIPE)
    fit(fleet, (X, Y), epochs=10**6, batch_size=20, callbacks=[Kill(eager)])
    assert eager.none_left()
    assert not programs(fleet).compiled
    assert [record.levelno for record in told] == [logging.WARNING]
    assert "could not be compiled: the compile process ended by itself, with status 9" in told[0].getMessage()


def test_that_compiling_fails_is_told_aloud_once(told: list[logging.LogRecord]) -> None:
    for reason in ("no C++ compiler", "no C++ compiler", "out of memory"):
        compiler._report_failure(reason)
    assert [record.levelno for record in told] == [logging.WARNING, logging.DEBUG, logging.DEBUG]


# --- many lanes: a few compilers at a time, the most valuable first


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Fake:
    """A compile process that runs until it is told to end."""

    all: list["Fake"] = []  # noqa: RUF012

    def __init__(self, forms: Any) -> None:
        self.forms = forms
        self.outcome: Outcome | None = None
        Fake.all.append(self)

    def stop(self) -> None:
        self.outcome = self.outcome or Outcome(None, "it was stopped")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(compile_queue, "time", clock)
    monkeypatch.setattr(compile_queue, "CompileProcess", Fake)
    monkeypatch.setattr(Fake, "all", [])
    return clock


class Lane:
    """Somebody who asks."""

    def __init__(self, queue: CompileQueue, name: str) -> None:
        self.queue, self.name = queue, name

    def ask(self, value: float) -> Any:
        return self.queue.request(self, value, 0.01, lambda: self.name)  # pyrefly: ignore


def test_the_most_valuable_is_compiled_first_and_one_at_a_time(clock: Clock) -> None:
    queue = CompileQueue()
    queue.max_running = 1
    small, large, medium = (Lane(queue, name) for name in ("small", "large", "medium"))
    assert small.ask(10) is None  # it may be that others are about to ask
    assert large.ask(1000) is None
    assert medium.ask(100) is None
    clock.now += compile_queue.SETTLING_SECONDS
    assert small.ask(9) is None
    assert medium.ask(90) is None
    first = large.ask(900)
    assert first is not None
    assert first.forms == "large"
    for _ in range(3):
        clock.now += 1
        assert small.ask(8) is None
        assert medium.ask(80) is None
    first.outcome = Outcome("one-width")
    assert small.ask(7) is None  # the medium one is worth more
    second = medium.ask(70)
    assert second is not None
    second.stop()
    last = small.ask(6)
    assert last is not None
    assert [fake.forms for fake in Fake.all] == ["large", "medium", "small"]


def test_a_lane_that_has_ended_holds_up_nobody(clock: Clock) -> None:
    queue = CompileQueue()
    queue.max_running = 1
    small, silent, done = (Lane(queue, name) for name in ("small", "silent", "done"))
    for lane, value in ((small, 10), (silent, 1000), (done, 2000)):
        assert lane.ask(value) is None
    queue.withdraw(done)  # too few steps are left, or it was stopped
    clock.now += compile_queue.SETTLING_SECONDS
    assert small.ask(10) is None  # the silent one would be next
    clock.now += 60
    assert small.ask(9) is not None


def test_two_at_a_time_from_eight_cores_on(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 1), (2, 1), (7, 1), (8, 2), (96, 2)):
        monkeypatch.setattr(compile_queue, "cores", lambda cores=cores: cores)
        queue = CompileQueue()
        lanes = [Lane(queue, str(number)) for number in range(33)]
        for lane in lanes:
            lane.ask(1)
        clock.now += compile_queue.SETTLING_SECONDS
        assert sum(lane.ask(1) is not None for lane in lanes) == expected


def _deep(depth: int) -> nn.Module:
    return nn.Sequential(*helpers.mlp(), *(nn.Linear(3, 3) for _ in range(depth)))


def test_a_sweep_of_many_lanes_compiles_one_after_the_other(
    eager: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, order = 0, []

    class Counted(Fake):
        def __init__(self, forms: Any) -> None:
            super().__init__(forms)
            nonlocal most
            most = max(most, sum(fake.outcome is None for fake in Fake.all))
            order.append(self)

    class End(mf.Callback):
        def on_epoch_end(self, run: Any) -> None:
            for fake in Fake.all:  # what was begun in an epoch has failed at its end
                fake.stop()

    monkeypatch.setattr(Fake, "all", [])
    monkeypatch.setattr(compile_queue, "CompileProcess", Counted)
    monkeypatch.setattr(compile_queue.QUEUE, "max_running", 1)
    monkeypatch.setattr(compiler, "CHECK_SECONDS", 0.0)
    depths = np.repeat(np.arange(12), 2)
    fleet = mf.Fleet.build(_deep, len(depths), depth=mf.each(depths.tolist()))
    fleet.compile("sgd", "cross_entropy", lr=0.1)
    helpers.fit(fleet, (X, Y), epochs=30, batch_size=5, callbacks=[End()])
    assert len(fleet.plan().lanes) == 12
    assert most == 1
    assert len(order) == 12  # each had its turn, and none was tried twice


# --- the end of the program


# Beside other tests, a compile process of low priority would begin minutes later.
WORKER = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("worker", sys.argv[1])
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
worker.lower_priority = lambda: None
worker.main(Path(sys.argv[2]), int(sys.argv[3]))
"""

OWNER = """
import sys
import modelfleet as mf
from modelfleet.frameworks.torch.compiling import compile_queue, decision
from tests import helpers
decision.SECONDS_PER_NODE = decision.SECONDS_AT_LEAST = decision.SECONDS_TO_LOAD = 0.0
decision.SAVED_OF_COMPILABLE, compile_queue.SETTLING_SECONDS = 1e9, 0.0
start = compile_queue.subprocess.Popen
def told(command, **options):
    if "compiling/worker" not in str(command):
        return start(command, **options)
    process = start([*command[:-3], "-c", sys.argv[1], *command[-3:]], **options)
    print(process.pid, flush=True)
    return process
compile_queue.subprocess.Popen = told
fleet = helpers.fleet_of(3)
helpers.fit(fleet, helpers.toy(20), epochs=10**9, batch_size=10, strategy="fused")
print("ended", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed at once", "killed while g++ runs", "Ctrl-C"])
def test_nothing_is_left_of_a_program_that_ends_while_it_compiles(end: str, tmp_path: Path) -> None:
    temporary, cache = tmp_path / "tmp", tmp_path / "cache"
    temporary.mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", OWNER, WORKER]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert owner.stdout is not None
        group = int(owner.stdout.readline())
        assert len(list(temporary.glob("modelfleet-compile-*"))) == 1
        if end != "killed at once":
            wait_for(lambda: has_children(group) or ended(group), "a C++ compiler")
            assert not ended(group)
        owner.send_signal(signal.SIGINT if end == "Ctrl-C" else signal.SIGKILL)
        said = owner.communicate(timeout=600)[0]
    finally:
        owner.kill()
        owner.wait()
    assert said == ("ended\n" if end == "Ctrl-C" else "")
    wait_for(lambda: ended(group), "the end of the compile process")
    assert list(temporary.iterdir()) == []


def has_children(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text().strip())
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_compiler_that_cannot_be_started_leaves_the_training_as_it_is(
    eager: Processes, told: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **options: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    history = fit(fleet_of(2), (X, Y), epochs=4, batch_size=8)
    assert not history.failed
    assert [record.levelno for record in told].count(
        logging.WARNING
    ) == 1  # two programs: the last batch is shorter
    assert "could not be compiled: OSError: [Errno 28] No space left on device" in told[0].getMessage()


def test_compiling_at_once_that_fails_leaves_the_training_as_it_is(
    told: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELFLEET_COMPILE", "now")
    fleet, other = fleet_of(2, **RECIPE), fleet_of(2, **RECIPE)

    def fails(*args: Any) -> Any:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(compiler, "compile_first", fails)
    history = fit(fleet, (X, Y), epochs=3, batch_size=8)
    assert not history.failed
    assert not programs(fleet).compiled
    assert "could not be compiled: RuntimeError: No working C++ compiler found" in told[0].getMessage()
    monkeypatch.setenv("MODELFLEET_COMPILE", "never")
    assert fit(other, (X, Y), epochs=3, batch_size=8).to_dict() == history.to_dict()


def test_a_compiler_that_is_missing_is_tried_twice(
    told: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELFLEET_COMPILE", "now")
    tries = []

    def fails(*args: Any) -> Any:
        tries.append(args)
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(compiler, "compile_first", fails)
    fleet = fleet_of(2, **RECIPE)
    for size in (4, 8, 10, 20):  # a program each
        assert not fit(fleet, (X, Y), epochs=1, batch_size=size).failed
    assert len(tries) == 2


def test_a_compiled_step_whose_mark_cannot_be_written_is_used(
    told: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MODELFLEET_COMPILE", "now")
    (tmp_path / "modelfleet").write_text("a file where the folder of marks would be")
    monkeypatch.setattr(compiler, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compiler, "compile_first", lambda forms: (forms[-1].function(), forms[-1].form))
    fleet = fleet_of(2, **RECIPE)
    assert not fit(fleet, (X, Y), epochs=1, batch_size=8).failed
    assert programs(fleet).compiled
    assert not told


def test_never_is_never(eager: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELFLEET_COMPILE", "never")
    fit(fleet_of(2), (X, Y), epochs=4, batch_size=8)
    assert not eager.started


def test_a_misspelt_mode_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELFLEET_COMPILE", "nevr")
    fleet = fleet_of(2)
    before = all_weights(fleet)
    with pytest.raises(mf.InputError, match=r"MODELFLEET_COMPILE 'nevr'. Did you mean 'never'"):
        fit(fleet, (X, Y))
    assert equal(all_weights(fleet), before)
    assert torch.is_grad_enabled()


@pytest.mark.slow
def test_a_lane_that_shrinks_and_grows_goes_on_with_the_same_compiled_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    epochs = mf.each([1, 1, 1, 1, 3, 3])  # after the first epoch two of six are left
    results = {}
    for mode in ("never", "now"):
        monkeypatch.setenv("MODELFLEET_COMPILE", mode)
        fleet = least(6)
        fit(fleet, (X, Y), epochs=1, batch_size=10)
        made = compiled_so_far()
        traces = programs(fleet).traces
        fit(fleet, (X, Y), epochs=epochs, batch_size=10)
        fleet.clone("5", as_="new")
        fit(fleet, (X, Y), epochs=1, batch_size=10)
        if mode == "now":
            assert programs(fleet).traces == traces
            assert compiled_so_far() == made
        results[mode] = all_weights(fleet)
    for name, expected in results["never"].items():
        assert close(results["now"][name], expected), name


@pytest.mark.slow
def test_a_convolution_is_compiled_for_its_own_width_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def cnn() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Conv1d(1, 3, 4), torch.nn.Flatten())

    x = torch.from_numpy(X).unsqueeze(1)
    results = {}
    for mode in ("never", "now"):
        monkeypatch.setenv("MODELFLEET_COMPILE", mode)
        fleet = mf.Fleet.build(cnn, 4, seed=0)
        fleet.compile("sgd", "cross_entropy", **RECIPE)
        fit(fleet, (x, Y), epochs=mf.each([1, 1, 2, 2]), batch_size=10)
        results[mode] = all_weights(fleet)
    for name, expected in results["never"].items():
        assert close(results["now"][name], expected), name
