"""Each schedule of a chain of equal stages on two CPU devices: what a step measured, or what theory says.

With p devices, m micro-batches and a stage for each device, gpipe and 1f1b are idle for (p - 1) / (m + p - 1) of
the time. With v stages for each device in turn, "interleaved" is idle for (p - 1) / (v m + p - 1). That of 1f1b is
shown for "zero-bubble", which must not exceed it. In seconds and bytes, theory is the schedule played with what
the stages took and kept in a trial.
"""

from collections.abc import Callable
from typing import Any

import torch

import modelfleet as mf
from benchmarks.contests import THEORY
from benchmarks.peers import Round, compete_in_cases
from benchmarks.pipelines import BATCH, MICRO_BATCHES, RATE, dataset, stages

DEVICES, STAGES = 2, 4


def chain_of(pipeline: str, quick: bool) -> mf.Chain:
    """A stage for each device, or two for the schedule that needs several."""
    first, second = stages(quick)
    if pipeline == "interleaved":
        halves = [half for stage in (first, second) for half in _halves(stage)]
        models = dict(zip(map(str, range(STAGES)), halves, strict=True))
    else:
        models = {"0": first, "1": second}
    chain = mf.Chain(models, devices="cpu:0,cpu:1")
    chain.compile("adam", "cross_entropy", lr=RATE)
    return chain


def _halves(stage: torch.nn.Module) -> list[torch.nn.Module]:
    layers = list(stage.children())
    return [torch.nn.Sequential(*layers[: len(layers) // 2]), torch.nn.Sequential(*layers[len(layers) // 2 :])]


def idle_by_theory(pipeline: str) -> float:
    """The idle part of a step with equal stages."""
    turns = STAGES // DEVICES if pipeline == "interleaved" else 1
    return (DEVICES - 1) / (turns * MICRO_BATCHES + DEVICES - 1)


def prepare(who: str, quick: bool) -> Callable[[str], Round]:
    torch.set_num_threads(1)
    x, y = dataset(quick)
    chains = {}

    def measure(pipeline: str) -> Round:
        chain = chains.setdefault(pipeline, chain_of(pipeline, quick))
        options: dict[str, Any] = {"batch_size": BATCH, "micro_batches": MICRO_BATCHES, "pipeline": pipeline}
        if who == THEORY:
            plan = chain.plan((x, y), **options)
            notes = {"idle part": idle_by_theory(pipeline)} | _megabytes(plan.peak_bytes)
            return Round(1, 0.0, plan.timeline.seconds, notes)
        history = chain.fit((x, y), shuffle=False, progress=False, **options)
        assert chain.last_plan is not None
        measured = chain.last_plan.measured
        assert measured is not None
        assert measured.peak_bytes is not None
        notes = {"idle part": measured.bubble} | _megabytes(measured.peak_bytes)
        return Round(1, history["chain"]["loss"][-1], measured.seconds, notes)

    return measure


def _megabytes(peaks: tuple[int, ...]) -> dict[str, float]:
    return {f"MB of activations on cpu:{rank}": peak / 1e6 for rank, peak in enumerate(peaks)}


if __name__ == "__main__":
    compete_in_cases(prepare)
