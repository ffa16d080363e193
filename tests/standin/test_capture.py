"""Captured steps: the weights are those of steps that are not captured, bit for bit, and a step is one launch."""

import gc
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import toy
from tests.standin.device import Told, limited, listening
from tests.standin.models import DATA, X, Y, differing, dropping, fleet_on, wide
from tests.standin.races import watching
from torch import nn

import modelfleet as mf
from modelfleet.frameworks.torch.fused import capture, engine, packing
from modelfleet.frameworks.torch.fused.engine import FusedEngine
from modelfleet.lanes.lane import Lane


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(capture, "STEPS_LEFT", 0)
    monkeypatch.setenv("MODELFLEET_CACHE", str(tmp_path))


def engines_of(fleet: mf.Fleet) -> Iterator[FusedEngine]:
    yield from (lane.engine for lane in fleet._lanes if isinstance(lane.engine, FusedEngine))


def graphs_of(fleet: mf.Fleet) -> int:
    """How many graphs the lanes of a fleet have captured."""
    return sum(own.stepper.capture.graphs for own in engines_of(fleet) if own.stepper.capture is not None)


def both(
    build: Callable[..., nn.Module] = dropping, data: Any = (X, Y), members: int = 3, **options: Any
) -> tuple[mf.Fleet, mf.Fleet, list[mf.History]]:
    """Two fleets after the same fit: one whose steps were captured, and one whose steps were not."""
    callback = options.pop("callback", None)
    names = ("optimizer", "rate", "clip_norm", "schedule")
    recipe = {name: options.pop(name) for name in names if name in options}
    whole: dict[str, Any] = {"epochs": 4, "batch_size": 8, "strategy": "fused", "progress": False, **options}
    fleets, histories = [], []
    for captured in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not captured:
                patch.setattr(engine, "capture_on", lambda device: None)
            fleet = fleet_on("standin:0", build, members, metrics=["accuracy"], **recipe)
            callbacks = [] if callback is None else [callback()]
            histories.append(fleet.fit(data, callbacks=callbacks, **whole))
        assert (graphs_of(fleet) > 0) == captured
        fleets.append(fleet)
    return fleets[0], fleets[1], histories


class Reseed(mf.Callback):
    """Gives other seeds to the members in the middle of an epoch, as a checkpoint does that is loaded."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, run: Any) -> None:
        self.steps += 1
        if self.steps == 8:
            for own in engines_of(run.fleet):
                own.write(range(3), {"member": {"seed": np.array([7, 8, 9])}})


class Replace(mf.Callback):
    """Has the state lie elsewhere in memory in the middle of an epoch."""

    def __init__(self) -> None:
        self.left = 8

    def on_step_end(self, run: Any) -> None:
        self.left -= 1
        for own in engines_of(run.fleet) if not self.left else ():
            own.state = packing.pack(own.state)


CASES: dict[str, dict[str, Any]] = {
    "own data": {"data": mf.each({str(number): (X + number, Y) for number in range(3)})},
    "own rates of dropout": {"rate": mf.each([0.1, 0.2, 0.3])},
    "a schedule and clipping": {"optimizer": "adamw", "schedule": "cosine", "clip_norm": 1.0},
    "the last batch is smaller": {"batch_size": 12, "epochs": 8},
    "recorded steps": {"record_steps": True},
    "a state elsewhere": {"callback": Replace},
    "other seeds": {"rate": mf.each([0.1, 0.2, 0.3]), "callback": Reseed},
}


@pytest.mark.parametrize("build", DATA, ids=lambda build: build.__name__)
def test_weights_are_those_of_steps_that_are_not_captured(build: Callable[..., nn.Module]) -> None:
    captured, plain, histories = both(build, DATA[build])
    assert differing(captured, plain) == []
    assert histories[0].to_dict() == histories[1].to_dict()


@pytest.mark.parametrize("case", CASES)
def test_whatever_is_new_at_a_step_reaches_the_graph(case: str) -> None:
    captured, plain, histories = both(**CASES[case])
    assert differing(captured, plain) == []
    assert histories[0].to_dict() == histories[1].to_dict()


def test_a_member_that_fails_midway_leaves_the_others_as_they_are() -> None:
    poisoned = X.copy()
    poisoned[33] = np.nan  # the rows come in their order: the fifth step of each epoch has it
    own = mf.each({"0": (X, Y), "1": (poisoned, Y), "2": (X + 1, Y)})
    captured, plain, histories = both(data=own, shuffle=False)
    assert differing(captured, plain) == []
    assert [list(history.failed) for history in histories] == [["1"], ["1"]]


def test_a_lane_is_captured_again_when_it_gets_narrower() -> None:
    captured, plain, _ = both(members=8, epochs=mf.each([2, 2, 2, 2, 2, 4, 4, 6]))
    assert differing(captured, plain) == []
    assert graphs_of(captured) == 3, "one for each width: 8, 3 and 1"


def test_batches_of_many_sizes_are_captured_a_few_times() -> None:
    batches = [(X[:rows], Y[:rows]) for rows in range(3, 9)]
    captured, plain, _ = both(data=batches, batch_size=None, epochs=6)
    assert differing(captured, plain) == []
    assert graphs_of(captured) == capture.MAX_GRAPHS


def test_another_fit_is_captured_again() -> None:
    fleets = both()[:2]
    for fleet in fleets:
        fleet.fit((X, Y), epochs=3, batch_size=8, progress=False, strategy="fused")
    assert differing(*fleets) == []


def test_a_short_fit_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "STEPS_LEFT", 50)
    fleet = fleet_on("standin:0")
    fleet.fit((X, Y), epochs=5, batch_size=8, progress=False, strategy="fused")
    assert graphs_of(fleet) == 0


def test_a_steady_step_is_one_launch_and_what_brings_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[list[str]] = []
    train = Lane.train

    def counted(self: Lane, *args: Any) -> None:
        steps.append([])
        with listening(tell):
            train(self, *args)

    def tell(told: Told) -> None:
        if told.kind == "op":
            steps[-1].append(told.text)

    monkeypatch.setattr(Lane, "train", counted)
    both(epochs=3)
    captured = steps[: len(steps) // 2]
    assert captured[5:] == [["aten::_foreach_copy_", "aten::_foreach_copy_", "graph"]] * 10  # numbers, and labels
    assert all(len(step) > 20 for step in captured[:3])


def test_lanes_in_threads_do_not_race() -> None:
    with watching() as races:
        widths = mf.each([4, 4, 6, 6, 8, 8, 10, 10])
        fleet = fleet_on("standin:0,standin:1", members=8, width=widths)
        fleet.fit((X, Y), epochs=4, batch_size=8, progress=False, strategy="threads")
    assert sorted({str(race) for race in races.found}) == []
    assert graphs_of(fleet) >= 2
    on_cpu = fleet_on("cpu", members=8, width=widths)
    on_cpu.fit((X, Y), epochs=4, batch_size=8, progress=False)
    assert differing(fleet, on_cpu) == []


class Shrink(mf.Callback):
    """Lets the device have no large tensors after two steps."""

    def __init__(self, limit: Any) -> None:
        self.limit, self.left = limit, 2

    def on_step_end(self, run: Any) -> None:
        self.left -= 1
        if not self.left:
            self.limit.__enter__()


def test_a_lane_that_is_halved_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[object] = []
    record = capture._record
    monkeypatch.setattr(capture, "_record", lambda *args: (recorded.append(args), record(*args))[1])
    limit = limited(0, largest=20_000)  # as in test_memory.py: enough for 4 members
    options: dict[str, Any] = {"epochs": 3, "batch_size": 16, "strategy": "fused", "progress": False}
    expected, fleet = fleet_on("standin:1", wide, 8), fleet_on("standin:0", wide, 8)
    expected.fit(toy(64), **options)
    assert len(recorded) == 1
    try:
        fleet.fit(toy(64), callbacks=[Shrink(limit)], **options)
    finally:
        limit.__exit__(None, None, None)
    assert differing(fleet, expected) == []
    assert len(recorded) == 1 + 2, "one for each half"


def refuse() -> None:
    raise RuntimeError("cudaErrorStreamCaptureUnsupported: operation not permitted\nMore about it.")


def test_what_can_not_be_captured_runs_as_it_is_and_the_plan_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = both()[1]
    monkeypatch.setattr(capture, "_new_graph", lambda device: (None, refuse))
    fleet = fleet_on("standin:0", dropping, 3, metrics=["accuracy"])
    fleet.fit((X, Y), epochs=4, batch_size=8, progress=False, strategy="fused")
    assert differing(fleet, plain) == []
    (lane,) = fleet.plan((X, Y), batch_size=8).lanes
    said = "not captured: RuntimeError: cudaErrorStreamCaptureUnsupported: operation not permitted"
    assert lane.reason is not None
    assert lane.reason.endswith(said)


def test_a_step_that_waits_for_the_device_is_not_captured() -> None:
    one = torch.ones(3, device="standin:0")
    graph, stream = torch.accelerator.Graph(capture_error_mode="thread_local"), torch.Stream("standin:0")
    with stream, pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        capture._record(graph, graph.capture_begin, lambda: [one.add_(1), torch.tensor(float(one.sum()))])
    assert one.tolist() == [1, 1, 1], "nothing is done while a step is captured"
    assert (one + 1).tolist() == [2, 2, 2], "the capture has ended"


def test_a_replay_reads_and_writes_the_memory_of_the_capture() -> None:
    one = torch.ones(3, device="standin:0")
    graph, stream = torch.accelerator.Graph(capture_error_mode="thread_local"), torch.Stream("standin:0")
    with stream:
        (doubled,) = capture._record(graph, graph.capture_begin, lambda: [one.add_(1) * 2])
    for expected in (4, 6):
        graph.replay()
        assert doubled.tolist() == [expected] * 3
    one.fill_(10)
    graph.replay()
    assert doubled.tolist() == [22] * 3


class CudaGraph(torch.accelerator.Graph):
    """`torch.cuda.CUDAGraph` as the stand-in can do it: how it is begun differs from other graphs."""

    calls: list[str]

    def __init__(self) -> None:
        super().__init__(capture_error_mode="thread_local")  # the stand-in knows no other

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self.calls = [f"begin {capture_error_mode}"]
        super().capture_begin()

    def capture_end(self) -> None:
        self.calls.append("end")
        super().capture_end()

    def replay(self) -> None:
        self.calls.append("replay")
        super().replay()


def test_cuda_is_called_as_torch_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "capture_error_mode" in inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CudaGraph)
    new_graph, made = capture._new_graph, []

    def new(device: torch.device) -> Any:
        made.append(new_graph(torch.device("cuda", 0)))
        return made[-1]

    monkeypatch.setattr(capture, "_new_graph", new)
    captured, plain, _ = both(epochs=2)
    assert differing(captured, plain) == []
    assert [graph.calls for graph, _ in made if hasattr(graph, "calls")] == [
        ["begin thread_local", "end", *["replay"] * 7]
    ]


class Stamps(mf.Callback):
    """Notes what tells whether the state has changed, after every step."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_step_end(self, run: Any) -> None:
        self.seen += [own.stamp() for own in engines_of(run.fleet)]


def test_torch_is_told_what_a_replay_has_written() -> None:
    stamps = Stamps()
    both(callback=lambda: stamps)
    assert len(stamps.seen) == 2 * 20
    assert None not in stamps.seen
    assert all(before != after for before, after in zip(stamps.seen, stamps.seen[1:], strict=False))


def test_the_memory_of_graphs_is_given_up_when_a_fit_ends() -> None:
    def held(*, captured: bool) -> int:
        gc.collect()
        before = torch.accelerator.memory_allocated(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(capture, "STEPS_LEFT", 0 if captured else 1000)
            fleet = fleet_on("standin:0", dropping)
            fleet.fit((X, Y), epochs=2, batch_size=8, progress=False, strategy="fused")
        assert graphs_of(fleet) == captured
        return torch.accelerator.memory_allocated(0) - before

    assert held(captured=True) == held(captured=False)


class TakeOver(mf.Callback):
    """Has another form of the program take over after some steps, as one that was compiled does."""

    def __init__(self) -> None:
        self.left, self.runs = 8, 0

    def on_step_end(self, run: Any) -> None:
        self.left -= 1
        for own in engines_of(run.fleet) if not self.left else ():
            (runner,) = own.programs._all("train")
            runner.program.run = partial(self._run, runner.program.run)

    def _run(self, traced: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        self.runs += 1
        return traced(*inputs)


def test_a_program_that_takes_over_is_captured_again() -> None:
    taking: list[TakeOver] = []
    captured, plain, _ = both(callback=lambda: taking.append(TakeOver()) or taking[-1])
    assert differing(captured, plain) == []
    assert graphs_of(captured) == 2
    assert [own.runs for own in taking] == [capture.WARM_UP + 1, 20 - 8]
