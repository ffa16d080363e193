"""Run the peers, each in a process of its own, and let their rounds take turns."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.entrants import FLEET, ROUNDS, Contest, Entrant
from benchmarks.rows import GROWTH_SIZES, JAX, TORCH, Row, growth

PEERS = {
    FLEET: "fleet",
    TORCH: "torch_loop",
    "torch compiled": "torch_compiled",
    "torch, 2 processes": "torch_pool",
    JAX: "jax_vmap",
}
WARM_UP_LIMIT = 120.0  # seconds; a peer that needs longer is left out, and the report says so
ANSWER_LIMIT = 600.0  # seconds; after that something hangs

Say = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """What a peer did on a row, or in one case of a contest; `problem` says why there is nothing."""

    peer: str
    warm_up: float = 0.0
    seconds: tuple[float, ...] = ()
    member_steps: int = 0
    loss: float = 0.0
    memory: float = 0.0
    problem: str | None = None
    notes: Mapping[str, float] = field(default_factory=dict)
    case: str = ""

    @property
    def best(self) -> float:
        """The seconds of the quickest round: noise only ever adds."""
        return min(self.seconds)

    @property
    def rate(self) -> float:
        """Members × steps per second, in the quickest round."""
        return self.member_steps / self.best

    @property
    def spread(self) -> float:
        """How much longer the slowest round took than the quickest."""
        return max(self.seconds) / self.best - 1


class PeerError(Exception):
    """A peer ended, or took too long, before it answered."""


class Peer:
    """A running peer: `ask` for a round, close when done."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != "MODELFLEET_COMPILE"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.peers.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=Path(__file__).parent.parent,
            env=inherited | dict(environment or {}),
            text=True,
            start_new_session=True,  # so that `close` reaches what the peer has started, too
        )

    def ask(self, limit: float, case: str = "") -> dict[str, Any]:
        """One round of a case, as the peer reports it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{case}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(self._last_words()) from None
        return self.answer(limit)

    def answer(self, limit: float) -> dict[str, Any]:
        """The peer's next line, within `limit` seconds."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit)[0]:
            raise PeerError(f"took more than {limit:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._last_words())
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the peer and everything it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._errors.close()

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return f"failed: {lines[-1]}" if lines else f"ended with status {self._process.returncode}"


def measure(
    name: str,
    peers: Mapping[str, Entrant],
    *,
    rounds: int,
    quick: bool,
    say: Say,
    cases: tuple[str, ...] = ("",),
) -> list[Result]:
    """Warm up every peer, then let them take turns, `rounds` times; those that go apart follow, one by one."""
    together = {label: entrant for label, entrant in peers.items() if not entrant.apart}
    turns = [together, *({label: entrant} for label, entrant in peers.items() if entrant.apart)]
    # Steady state is measured: modelfleet compiles before its first step, not while the rounds run. What it
    # measures for its plans is shared by the peers of a table, and forgotten after it.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        common = {"MODELFLEET_CACHE": cache} | ({} if quick else {"MODELFLEET_COMPILE": "now"})
        results = [_measure(name, some, common, cases, rounds=rounds, quick=quick, say=say) for some in turns]
    return [result for some in results for result in some]


def _measure(
    name: str,
    peers: Mapping[str, Entrant],
    common: Mapping[str, str],
    cases: tuple[str, ...],
    *,
    rounds: int,
    quick: bool,
    say: Say,
) -> list[Result]:
    running: dict[str, Peer] = {}
    problems: dict[str, str] = {}
    warm_ups: dict[str, float] = {}
    answers: dict[tuple[str, str], list[dict[str, Any]]] = {(peer, case): [] for case in cases for peer in peers}
    try:
        for label, entrant in peers.items():
            peer = _start(entrant, common, quick=quick)
            try:
                warm_ups[label] = peer.answer(ANSWER_LIMIT if label == FLEET else WARM_UP_LIMIT)["warm_up"]
            except PeerError as error:
                problems[label] = f"warm-up {error}"
                peer.close()
                say(f"{name}: {label}: warm-up {error}")
                continue
            running[label] = peer
            say(f"{name}: {label} is warm after {warm_ups[label]:.1f} s")
        for _ in range(rounds):
            for case in cases:
                for label, peer in list(running.items()):
                    try:
                        answers[label, case].append(peer.ask(ANSWER_LIMIT, case))
                    except PeerError as error:
                        problems[label] = f"{case} {error}".strip()
                        running.pop(label).close()
    finally:
        for peer in running.values():
            peer.close()
    return [
        Result(label, problem=problems[label], case=case)
        if label in problems
        else _result(label, case, warm_ups[label], given)
        for (label, case), given in answers.items()
    ]


def _start(entrant: Entrant, common: Mapping[str, str], *, quick: bool) -> Peer:
    arguments = [*entrant.arguments, *(["--quick"] if quick else [])]
    return Peer(entrant.module, *arguments, environment={**common, **entrant.environment})


def _result(peer: str, case: str, warm_up: float, answers: list[dict[str, Any]]) -> Result:
    return Result(
        peer,
        warm_up,
        tuple(answer["seconds"] for answer in answers),
        int(answers[0]["member_steps"]),
        answers[-1]["loss"],
        answers[-1]["memory"],
        notes=answers[-1].get("notes", {}),
        case=case,
    )


@contextmanager
def empty_caches() -> Iterator[Mapping[str, str]]:
    """The environment of a process that finds nothing cached: no compiled program, no measured time."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
        yield {
            "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor",
            "XDG_CACHE_HOME": empty,
            "MODELFLEET_CACHE": f"{empty}/modelfleet",
        }


def measure_fresh(contest: Contest, *, rounds: int, quick: bool, say: Say) -> list[Result]:
    """Ask every peer for its only case, `rounds` times in turn, each time in a new process with empty caches."""
    answers: dict[str, list[dict[str, Any]]] = {label: [] for label in contest.entrants}
    problems: dict[str, str] = {}
    about = f"{contest.name} {contest.case}".strip()
    for _ in range(rounds):
        for label, entrant in contest.entrants.items():
            if label in problems:
                continue
            with empty_caches() as environment, _start(entrant, environment, quick=quick) as peer:
                try:
                    peer.answer(WARM_UP_LIMIT)
                    answers[label].append(peer.ask(ANSWER_LIMIT, contest.case))
                    say(f"{about}: {label}: {answers[label][-1]['seconds']:.2f} s")
                except PeerError as error:
                    problems[label] = str(error)
                    say(f"{about}: {label} {error}")
    return [
        Result(label, problem=problems[label], case=contest.case)
        if label in problems
        else _result(label, contest.case, 0.0, given)
        for label, given in answers.items()
    ]


def measure_row(row: Row, *, quick: bool, say: Say) -> list[Result]:
    """All peers on one row."""
    peers = {
        label: Entrant(module, (row.name,))
        for label, module in PEERS.items()
        if not (quick and module == "torch_compiled")
    }
    return measure(row.name, peers, rounds=2 if quick else ROUNDS, quick=quick, say=say)


def measure_contest(contest: Contest, *, quick: bool, say: Say) -> list[tuple[Contest, list[Result]]]:
    """All peers of a contest, case by case."""
    if contest.fresh:
        rounds = 1 if quick else contest.rounds
        return [(one, measure_fresh(one, rounds=rounds, quick=quick, say=say)) for one in contest.each_case()]
    rounds = min(2, contest.rounds) if quick else contest.rounds
    found = measure(contest.name, contest.entrants, rounds=rounds, quick=quick, say=say, cases=contest.cases)
    return [(one, [result for result in found if result.case == one.case]) for one in contest.each_case()]


def measure_growth(*, quick: bool, say: Say) -> dict[int, Result]:
    """modelfleet alone, from 16 to 10,000 members; each size in a fresh process, for a peak of its own."""
    found = {}
    for members in GROWTH_SIZES[:2] if quick else GROWTH_SIZES:
        peers = {FLEET: Entrant("fleet", ("growth", "--members", str(members)))}
        say(f"growth: {members:,} members")
        [found[members]] = measure(growth(members).name, peers, rounds=2 if quick else 3, quick=quick, say=say)
    return found


@dataclass(frozen=True)
class ColdResult:
    """Seconds of each fresh process, without and with the imports; `problem` says why there are none."""

    peer: str
    seconds: tuple[float, ...] = ()
    with_imports: tuple[float, ...] = ()
    problem: str | None = None


def measure_cold(*, quick: bool, say: Say) -> list[ColdResult]:
    """The first 20 steps in fresh processes with empty caches, the peers taking turns."""
    answers: dict[str, list[dict[str, Any]]] = {FLEET: [], TORCH: []}
    problems: dict[str, str] = {}
    for turn in range(1 if quick else 3):
        for label, kind in ((FLEET, "fleet"), (TORCH, "torch")):
            with empty_caches() as environment, _start(Entrant("cold", (kind,)), environment, quick=quick) as peer:
                try:
                    answers[label].append(peer.answer(ANSWER_LIMIT))
                    say(f"cold start {turn + 1}: {label}: {answers[label][-1]['seconds']:.2f} s")
                except PeerError as error:
                    problems[label] = str(error)
                    say(f"cold start {turn + 1}: {label} {error}")
    return [
        ColdResult(
            label,
            tuple(answer["seconds"] for answer in given),
            tuple(answer["with_imports"] for answer in given),
            problems.get(label),
        )
        for label, given in answers.items()
    ]
