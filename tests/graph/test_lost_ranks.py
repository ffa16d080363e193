"""Ranks that die, stop, hang or raise: the error says who and where, nothing is left, and a checkpoint goes on."""

import os
import random
import re
import secrets
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.graph.comparing import THREE, TWO, assert_same_weights, chain_of, fit, rows, stages, weights
from tests.helpers import threads
from torch import nn

import modelfleet as mf
from modelfleet.errors import InputError, RankLostError
from modelfleet.graph.running import BLAME_SECONDS, Ranks

LONG = os.environ.get("MODELFLEET_TEST_LONG")  # fifty random moments instead of three; `make killing`
LIMIT = 60.0  # seconds that something which has to happen may take
RELEASED = threading.Event()  # for what hangs in a thread, which nothing else can end
COUNTS: Counter[str] = Counter()  # calls in a worker
RUN: dict[str, Any] = {"epochs": 3, "validation": rows(12, seed=1)}


class Trap(nn.Module):
    """Does something to its own process, at a call in a worker or in a thread."""

    def __init__(self, at: int, what: Any, *, backward: bool = False) -> None:
        super().__init__()
        self.calls, self.at, self.what, self.backward_too = 0, at, what, backward
        self.owner, self.token = os.getpid(), secrets.token_hex(8)

    def count(self) -> int:
        """The number of this call. A worker keeps it outside of the model, whose Python must not change there."""
        if os.getpid() == self.owner:
            self.calls += 1
            return self.calls
        COUNTS[self.token] += 1
        return COUNTS[self.token]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.count() == self.at:
            if self.backward_too and x.requires_grad:
                x.register_hook(lambda gradient: self.spring())
            else:
                self.spring()
        return x

    def spring(self) -> None:
        if isinstance(self.what, int):
            assert os.getpid() != self.owner
            os.kill(os.getpid(), self.what)
        else:
            self.what()


def raise_own() -> None:
    raise ZeroDivisionError("the user's own")


def wait_until_released() -> None:
    RELEASED.wait()


def trapped(trap: nn.Module, index: int = 1) -> list[nn.Module]:
    """Three stages, one of which has a trap at its end."""
    ends = [trap if number == index else nn.Identity() for number in range(3)]
    return [nn.Sequential(stage, end) for stage, end in zip(stages(dropout=0.3), ends, strict=True)]


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """All processes that were started within are gone at the end."""
    before = {child.pid for child in _workers()}
    yield
    _, alive = psutil.wait_procs([child for child in _workers() if child.pid not in before], timeout=LIMIT)
    assert alive == []


def _workers() -> list[psutil.Process]:
    """The workers of this process: its children, without the one that they are forked from, which stays."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.ppid() != os.getpid() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def unbroken() -> mf.Chain:
    chain = chain_of(trapped(nn.Identity()), THREE, metrics=["accuracy"])
    fit(chain, rows(), **RUN)
    return chain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "at", "backward"),
    [(signal.SIGKILL, 9, False), (signal.SIGKILL, 30, True), (signal.SIGSTOP, 45, False)],
    ids=["killed in forward", "killed in backward", "stopped"],
)
def test_a_rank_that_is_lost_is_named_and_a_checkpoint_goes_on(
    tmp_path: Path, what: int, at: int, backward: bool
) -> None:
    chain = chain_of(trapped(Trap(at, int(what), backward=backward)), TWO, metrics=["accuracy"])
    folder = tmp_path / "run"
    with leaving_nothing(), pytest.raises(RankLostError) as caught:
        fit(chain, rows(), strategy="processes", callbacks=[mf.Checkpoint(folder, every_steps=1)], **RUN)
    message = str(caught.value)
    where = next(name for name in TWO if f"on {name} was lost" in message)
    assert "'1'" in message.partition(f"on {where} was lost")[0], message
    kind = "backward 1[" if backward else "forward 1["
    assert f"which was at {kind}" in message, message
    assert ("SIGSTOP" if what == signal.SIGSTOP else "SIGKILL") in message, message
    assert "Meanwhile" in message
    assert "mf.Checkpoint" in message
    again = chain_of(trapped(nn.Identity()), THREE, metrics=["accuracy"])
    fit(again, rows(), callbacks=[mf.Checkpoint(folder, every_steps=1)], **RUN)
    assert_same_weights(weights(again), weights(unbroken()))


@contextmanager
def signal_at(moment: int) -> Iterator[None]:
    """Send a signal to a random worker at a random moment, from the start of the first worker's process on."""
    drawn, over = random.Random(moment), threading.Event()

    def send() -> None:
        while not _workers() and not over.is_set():
            over.wait(0.01)
        if not over.wait(drawn.uniform(0, 3)) and (workers := _workers()):
            os.kill(drawn.choice(workers).pid, drawn.choice([signal.SIGKILL, signal.SIGSTOP]))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="make killing")
@pytest.mark.parametrize("moment", range(50))
def test_ranks_killed_at_random_moments(tmp_path: Path, moment: int) -> None:
    again = chain_of(trapped(nn.Identity()), TWO, metrics=["accuracy"])
    folder, told = tmp_path / "run", "'0' on cpu:0 was lost"  # or it was over before
    options: dict[str, Any] = {**RUN, "epochs": 40}
    with leaving_nothing():
        try:
            with signal_at(moment):
                fit(again, rows(), strategy="processes", callbacks=[mf.Checkpoint(folder)], **options)
        except RankLostError as error:
            told = str(error)
        assert re.match(r"'\d'(, '\d')* on cpu:\d was lost", told), told
    fit(again, rows(), callbacks=[mf.Checkpoint(folder)], **options)
    whole = chain_of(trapped(nn.Identity()), THREE, metrics=["accuracy"])
    fit(whole, rows(), **options)
    assert_same_weights(weights(again), weights(whole))


@pytest.mark.parametrize("strategy", ["threads", "processes"])
def test_what_a_stage_raises_arrives(strategy: str) -> None:
    before = threads()
    chain = chain_of(trapped(Trap(17, raise_own)), TWO)
    with leaving_nothing(), pytest.raises(InputError, match=r"'1'.*ZeroDivisionError: the user's own"):
        fit(chain, rows(), strategy=strategy)
    if strategy == "threads":
        assert threads() == before


def test_what_a_backward_pass_raises_arrives() -> None:
    before = threads()
    chain = chain_of(trapped(Trap(17, raise_own, backward=True)), TWO)
    with pytest.raises(InputError, match=r"'1'.*backward pass.*ZeroDivisionError: the user's own"):
        fit(chain, rows(), pipeline="gpipe")
    assert threads() == before
    assert all(parameter.grad is None for name in chain.names for parameter in chain[name].parameters())


def test_after_an_error_the_weights_are_those_of_the_last_whole_step() -> None:
    x, y = rows()
    chain = chain_of(trapped(Trap(4 * 3 + 2, raise_own), 2), THREE)
    with pytest.raises(InputError):
        fit(chain, (x, y), micro_batches=4, shuffle=False)
    good = chain_of(trapped(nn.Identity(), 2), THREE)
    fit(good, (x[:24], y[:24]), micro_batches=4, shuffle=False, epochs=1)
    assert_same_weights(weights(chain), weights(good))


def test_a_thread_that_hangs_is_named_with_who_waited_for_it() -> None:
    chain = chain_of(trapped(Trap(13, wait_until_released)), THREE)
    RELEASED.clear()
    with pytest.raises(RankLostError) as caught:
        fit(chain, rows(), timeout=0.5)
    RELEASED.set()
    message = str(caught.value)
    assert "'1' on cpu:1 was lost, which was at forward 1[" in message
    assert "in step" in message
    assert "waited 0.5 s for" in message
    assert "1→2" in message or "sum" in message or "0→1" in message
    chain = chain_of(None, THREE)
    fit(chain, rows())  # the process is as good as new


@pytest.mark.slow
def test_a_process_that_hangs_is_named() -> None:
    chain = chain_of(trapped(Trap(40, wait_until_released)), TWO)
    with leaving_nothing(), pytest.raises(RankLostError) as caught:
        fit(chain, rows(), strategy="processes", timeout=3.0)
    message = str(caught.value)
    assert "'1'" in message.partition("was lost")[0], message
    assert "which was at forward 1[" in message, message


def test_a_rank_lost_in_a_validation_is_at_an_operation_of_the_validation() -> None:
    chain = chain_of(trapped(EvaluationTrap()), THREE)
    RELEASED.clear()
    with pytest.raises(RankLostError) as caught:
        fit(chain, rows(), validation=rows(12, seed=1), timeout=0.5)
    RELEASED.set()
    assert "'1' on cpu:1 was lost, which was at forward 1[0] in batch 1 of evaluate" in str(caught.value)


def test_the_first_step_of_each_schedule_may_take_as_long_as_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may compile. What was asked of the ranks before it says nothing of how long a step takes."""
    found: dict[str, list[float]] = {}
    limit = Ranks._limit

    def noted(self: Ranks, schedule: str) -> float:
        found.setdefault(schedule, []).append(limit(self, schedule))
        return found[schedule][-1]

    class Read(mf.Callback):
        wants_steps = True

        def on_fit_start(self, run: Any) -> None:
            run.snapshot("chain")

    monkeypatch.setattr(Ranks, "_limit", noted)
    chain = chain_of(None, TWO)
    fit(chain, rows(), validation=rows(12, seed=1), epochs=2, callbacks=[Read()], timeout=200.0)
    for schedule in ("train", "evaluate"):
        assert found[schedule][0] == 200.0 + BLAME_SECONDS
        assert found[schedule][-1] < 200.0


class EvaluationTrap(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            RELEASED.wait()
        return x


def test_verbs_that_only_read_name_a_stage_that_raises() -> None:
    chain = chain_of(trapped(Trap(3, raise_own)), THREE)
    with pytest.raises(InputError, match=r"'1'.*ZeroDivisionError"):
        chain.predict(rows()[0], batch_size=8)
    with pytest.raises(InputError, match=r"'0'.*\(\d, 3\)"):
        chain.evaluate((torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)))
