"""What a fit asks of a GPU: no waits in steady steps, narrower lanes if memory is short, compiling meanwhile."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from tests.gpu.device import GPU, KIND
from tests.gpu.models import CASES
from tests.helpers import toy
from tests.standin import device as standin
from tests.standin.models import X, Y, close, dropping, fitted, fleet_on, wide
from torch import Tensor, nn

import modelfleet as mf
from modelfleet.frameworks.torch.compiling import compile_queue, decision
from modelfleet.lanes.lane import Lane

pytestmark = GPU


# --- steady steps

FIRST, LAST = 5, 18  # steps of an epoch: after what is set up, and before its end


@contextmanager
def refusing_waits() -> Iterator[None]:
    """Raise if the host waits for the device within this context."""
    if KIND == "cuda":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it does not detect all waits
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    waits: list[standin.Told] = []
    with standin.listening(lambda told: waits.append(told) if told.waits else None):
        yield
    assert not waits


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_for_nothing_in_steady_steps(case: str, one: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, x, y = CASES[case]
    data = tuple(torch.cat([torch.from_numpy(part)] * 2)[:40] for part in (x, y))
    train, steps = Lane.train, 0

    def watched(self: Lane, *args: Any) -> None:
        nonlocal steps
        steps += 1
        with refusing_waits() if FIRST <= steps < LAST else nullcontext():
            train(self, *args)

    fleet = fleet_on(one, build, metrics=["accuracy"], clip_norm=1.0)
    monkeypatch.setattr(Lane, "train", watched)
    history = fleet.fit(data, batch_size=2, progress=False, strategy="fused")
    assert not history.failed
    assert steps >= LAST


# --- memory

# A member's hidden layer on a batch has 64 kB on the stand-in, and 128 MB on a GPU, whose memory comes in blocks.
SIZES = {"standin": (256, 64), "cuda": (4096, 8192)}


@pytest.fixture
def roomy() -> Iterator[ExitStack]:
    """Ends the limits on memory that a test has set."""
    with ExitStack() as stack:
        yield stack


@contextmanager
def little_memory(device: torch.device, room: int) -> Iterator[None]:
    """Leave so many bytes of a device for what is allocated within this context."""
    torch.accelerator.empty_cache()
    used = torch.accelerator.memory_allocated(device)
    if KIND == "standin":
        with standin.limited(device.index, total=used + room):
            yield
        return
    reserved = torch.accelerator.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction((reserved + room) / torch.cuda.mem_get_info(device)[1], device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_a_lane_that_runs_out_of_memory_is_halved(one: str, roomy: ExitStack) -> None:
    rows, width = SIZES[KIND]
    data, hidden = toy(rows), 4 * rows * width
    options: dict[str, Any] = {"strategy": "fused", "batch_size": rows, "epochs": 3}
    recipe: dict[str, Any] = {"build": wide, "members": 8, "width": width}
    ample = fitted(one, data, options, **recipe)
    roomy.enter_context(
        little_memory(torch.device(one), 12 * hidden)
    )  # eight members have at least 16 such layers
    there = fitted(one, data, options, **recipe)
    assert max(len(lane.members) for lane in there.plan(data, batch_size=rows).lanes) < 8
    close(there, ample)


# --- compiling


class Shifted(nn.Module):
    """Has a constant that is made on the device as a step is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.tensor([1.0, 2.0, 3.0], device=x.device)


class UntilCompiled(mf.Callback):
    """Ends the fit some steps after its program has been compiled."""

    def __init__(self) -> None:
        self.limit = time.monotonic() + 600

    def on_epoch_end(self, run: Any) -> None:
        engine = run.runs[0].lane.engine
        if engine.program == "compiled" or engine.uncompiled or time.monotonic() > self.limit:
            for name in run.active:
                run.stop(name)


@pytest.mark.parametrize("build", [Shifted, dropping])
def test_steps_are_compiled_beside_the_training(
    build: Callable[[], nn.Module],
    cuda: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MODELFLEET_COMPILE", "auto")
    for constant in ("SECONDS_PER_NODE", "SECONDS_AT_LEAST", "SECONDS_TO_LOAD"):
        monkeypatch.setattr(decision, constant, 0.0)
    monkeypatch.setattr(decision, "SAVED_FRACTION", 1e9)
    monkeypatch.setattr(compile_queue, "SETTLING_SECONDS", 0.0)
    fleet = fleet_on(cuda, build)
    options: dict[str, Any] = {"batch_size": 8, "strategy": "fused", "progress": False}
    history = fleet.fit((X, Y), epochs=10**6, callbacks=[UntilCompiled()], **options)
    lane = fleet.plan((X, Y), strategy="fused").lanes[0]
    assert lane.program == "compiled", lane.reason
    monkeypatch.setenv("MODELFLEET_COMPILE", "never")
    other = fleet_on(cuda, build)
    other.fit((X, Y), epochs=len(history["0"]["loss"]), **options)
    for name in fleet.names:
        torch.testing.assert_close(
            dict(fleet[name].named_parameters()), dict(other[name].named_parameters()), rtol=1e-3, atol=1e-4
        )
