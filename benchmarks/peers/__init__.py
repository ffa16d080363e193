"""The peers: each trains a row its own way, in a process of its own, one round at a time.

A peer is run as `python -m benchmarks.peers.<name> <row>`. It warms up, says so, and then trains one round
for every line it reads, which names the case: so the rounds of the peers can take turns, and a slow minute of the
machine falls on all of them. Every answer is one line of JSON.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.rows import ROWS, Row, growth


@dataclass(frozen=True)
class Round:
    """What a round did: how many steps of one member (or rows), and the mean loss of its last epoch.

    `seconds` is what counts where it is not the clock's, and `notes` what else is worth telling.
    """

    member_steps: int
    loss: float
    seconds: float | None = None
    notes: Mapping[str, float] = field(default_factory=dict)


def serve(prepare: Callable[[Row], Callable[[], Round]]) -> None:
    """Run a peer: `prepare` builds and warms everything, and returns what trains one round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("row", choices=[*ROWS, "growth"])
    parser.add_argument("--members", type=int, default=16, help="the size of the fleet, for growth")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    row = growth(arguments.members) if arguments.row == "growth" else ROWS[arguments.row]
    if arguments.quick:
        row = row.quick()
    _answer_rounds(lambda: _any_case(prepare(row)))


def compete(prepare: Callable[..., Callable[[], Round]]) -> None:
    """Run a peer of a contest: `prepare` gets the words of its command line, and whether it is a smoke test."""
    compete_in_cases(lambda *words: _any_case(prepare(*words)))


def compete_in_cases(prepare: Callable[..., Callable[[str], Round]]) -> None:
    """Run a peer of a contest with cases: what `prepare` returns gets the name of the case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    _answer_rounds(lambda: prepare(*arguments.words, arguments.quick))


def _any_case(train_round: Callable[[], Round]) -> Callable[[str], Round]:
    return lambda case: train_round()


def _answer_rounds(prepare: Callable[[], Callable[[str], Round]]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not break the protocol

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    before, start = peak_memory(), time.perf_counter()
    train_round = prepare()
    answer(warm_up=time.perf_counter() - start)
    for line in sys.stdin:
        start = time.perf_counter()
        done = train_round(line.strip())
        seconds = time.perf_counter() - start if done.seconds is None else done.seconds
        memory = peak_memory() - before
        answer(
            seconds=seconds,
            member_steps=done.member_steps,
            loss=done.loss,
            memory=memory,
            notes=dict(done.notes),
        )


def peak_memory() -> int:
    """The most bytes that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
