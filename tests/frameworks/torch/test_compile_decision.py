"""When a step is compiled: only if the rest of the run wins back what compiling costs, as measured here."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from modelfleet.frameworks.torch.compiling import compiler, decision, experience, vectors
from modelfleet.frameworks.torch.compiling.compiler import Compiler
from modelfleet.frameworks.torch.tracing.trace import trace


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MODELFLEET_CACHE", str(tmp_path))
    monkeypatch.setenv("MODELFLEET_COMPILE", "auto")
    experience._known.cache_clear()
    vectors.knows_vectors.cache_clear()
    yield tmp_path
    experience._known.cache_clear()
    vectors.knows_vectors.cache_clear()


def won(seconds: float) -> float:
    """Seconds won in a run that has so many left."""
    return decision.seconds_won(10, 1000, seconds / 1000)


def test_a_run_that_ends_before_the_compiler_wins_nothing() -> None:
    assert won(decision.seconds_to_compile(10)) == 0


def test_a_run_must_win_back_what_it_loses_meanwhile() -> None:
    compiling = decision.seconds_to_compile(10)
    lost = compiling * decision.SLOWED_FRACTION + decision.SECONDS_TO_LOAD
    enough = compiling + lost / decision.saved_fraction()
    assert won(enough * 0.99) == 0
    assert 0 < won(enough * 1.01) < won(enough * 2)


def test_compiling_takes_longer_where_the_training_leaves_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision, "cores", lambda: 2)
    crowded = decision.seconds_to_compile(10)
    monkeypatch.setattr(decision, "cores", lambda: 16)
    assert decision.seconds_to_compile(10) < crowded


def test_only_what_a_compiler_can_merge_is_saved() -> None:
    mostly_products, mostly_small = (decision.seconds_won(10, 1000, 0.2, compilable=part) for part in (0.2, 0.8))
    assert mostly_products < mostly_small
    assert decision.seconds_won(10, 1_000_000, 0.2, compilable=0.0) == 0


@pytest.mark.parametrize("found", [{"seconds_per_node": 1e3}, {"saved": 0.0}, {"slowed": 0.9}])
def test_what_was_measured_here_counts(found: dict[str, float]) -> None:
    before = won(200)
    experience.learn(None, **found)
    assert won(200) < before


def test_what_was_measured_on_one_model_of_device_does_not_count_on_another() -> None:
    def on(hardware: str | None) -> tuple[float, ...]:
        found = decision.saved_fraction(hardware), decision.time_ratio(10, hardware)
        return *found, decision.seconds_saved(100, 0.1, hardware), decision.seconds_won(10, 1000, 0.2, hardware)

    usual = on(None)
    experience.learn("A100", saved=0.8, slowed=0.0, seconds_per_node=1.0)
    assert on(None) == on("H100") == usual
    assert all(mine != other for mine, other in zip(on("A100"), usual, strict=True))
    assert decision.may_pay(10, 0.45, "A100")  # 2.2 of 4.5 seconds are saved there, and 1.9 elsewhere
    assert not decision.may_pay(10, 0.45)


def test_a_compiler_learns_for_the_device_of_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "hardware", lambda device: f"model of {device}")
    monkeypatch.setattr(Compiler, "_load", lambda self, forms: None)
    one = Compiler(trace(lambda x: [x + 1], (torch.zeros(3),), [False]))
    one._begun = 0.0, 2.0
    one._learn_cost(4.0)
    assert experience.measured(experience.SLOWED, 7.0, "model of cpu") == 0.5
    assert experience.measured(experience.SLOWED, 7.0) == 7.0


def test_what_was_learnt_is_known_to_the_next_process(folder: Path) -> None:
    experience.learn(saved=0.6)
    experience.learn(saved=0.2)
    experience._known.cache_clear()
    assert decision.saved_fraction(compilable=0.5) == pytest.approx(0.2)
    (folder / "compiling.json").write_text("[not numbers")
    experience._known.cache_clear()
    assert decision.saved_fraction(compilable=1.0) == decision.SAVED_OF_COMPILABLE


def test_a_bad_measurement_does_not_end_compiling_for_ever() -> None:
    experience.learn(saved=-5.0)
    assert decision.saved_fraction(compilable=1.0) == experience.LEAST_SAVED
    assert won(10_000) > 0


def test_nothing_is_kept_if_the_user_wants_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELFLEET_CACHE", "")
    experience.learn(saved=0.9)
    assert decision.saved_fraction(compilable=1.0) == decision.SAVED_OF_COMPILABLE


def test_the_compiler_leaves_the_cores_to_others() -> None:
    code = """
import os
from modelfleet.frameworks.torch.compiling.worker import lower_priority
lower_priority()
print(os.nice(0), open("/proc/self/autogroup").read() if os.path.exists("/proc/self/autogroup") else "nice 19")
"""
    # A session of its own, as the compile process has.
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, start_new_session=True
    )
    nice, _, group = done.stdout.strip().partition(" ")
    assert nice == "19"
    assert group.endswith("nice 19")


def test_torch_tries_vectors_that_it_does_not_use_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert vectors.knows_vectors() is None


def test_torch_tries_vectors_that_the_compiler_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise subprocess.CalledProcessError(1, "g++")

    monkeypatch.setattr(vectors.subprocess, "run", refuse)
    assert vectors.knows_vectors() is None
