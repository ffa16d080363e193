"""`make fuzz`: random programs for as long as it is told, on each target in a process of its own.

A failure does not end it: each distinct one is made small and shown as a script when it is found.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

TARGETS = ("torch", "jax", "keras-tensorflow", "keras-jax")
ROUND = 25  # examples that one seed gives
LONGEST = 300  # seconds that an example may take
# References run operation by operation, and XLA compiles each for every shape: nearly all the time goes there.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
COMPILED = {
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parents[2] / ".fuzz"),  # for later runs, and worker processes
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def main() -> int:
    """Run the targets one after the other, each for its share of the time."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--target", default="all", choices=[*TARGETS, "all"])
    parser.add_argument("--seed", type=int, help="repeat a run, which says its seed")
    parser.add_argument("--examples", type=int, help="so many, always the same, instead of any for some minutes")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        return work(chosen.target, time.monotonic() + 60 * chosen.minutes, chosen.seed, chosen.examples)
    targets = TARGETS if chosen.target == "all" else (chosen.target,)
    seed = random.SystemRandom().randrange(2**32) if chosen.seed is None else chosen.seed
    if chosen.examples is None:
        print(f"fuzzing {', '.join(targets)} for {chosen.minutes:g} minutes, seed {seed}", flush=True)
        results = [supervise(target, 60 * chosen.minutes / len(targets), seed) for target in targets]
    else:
        results = [supervise(target, 7200, 0, chosen.examples) for target in targets]
    for target, (ends, failures) in zip(targets, results, strict=True):
        told = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
        print(f"{target}: {sum(ends.values())} examples ({told}), {len(failures)} distinct failures")
    total, failed = sum(sum(ends.values()) for ends, _ in results), sum(len(found) for _, found in results)
    print(f"{total} examples, {failed} distinct failures")
    return 1 if failed else 0


def supervise(
    target: str, seconds: float, seed: int, examples: int | None = None
) -> tuple[dict[str, int], dict[str, str]]:
    """Run one target in a process, and another if it dies; gives how examples ended, and the failures."""
    until = time.monotonic() + seconds
    ends: dict[str, int] = {}
    failures: dict[str, str] = {}
    environment = os.environ | {
        "KERAS_BACKEND": target.partition("-")[2] or "jax",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "MODELFLEET_COMPILE": "never",
        "MODELFLEET_CACHE": "",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {QUICK}".strip(),
    }
    environment |= COMPILED if target.endswith("jax") and examples is None else {}
    while (left := until - time.monotonic()) > 1:
        command = [sys.executable, "-m", "tests.fuzz", "--worker", "--target", target, "--seed", str(seed)]
        command += ["--minutes", str(left / 60)] + (["--examples", str(examples)] if examples else [])
        current = ""
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith("{"):
                    continue
                told = json.loads(line)
                current = told.get("script", current)
                if "end" in told:
                    ends[told["end"]] = ends.get(told["end"], 0) + 1
                    if sum(ends.values()) % 50 == 0:
                        print(f"{target}: {sum(ends.values())} examples", flush=True)
                if "failure" in told and told["failure"] not in failures:
                    failures[told["failure"]] = told["message"]
                    print(f"\n=== {target}: {told['message']}\n", flush=True)
        if process.returncode:
            reason = f"the process ended with {process.returncode}"
            ends["died"] = ends.get("died", 0) + 1
            if reason not in failures:
                failures[reason] = current
                print(f"\n=== {target}: {reason}\n\n{current}\n", flush=True)
        if examples is not None:
            break
        seed += 1_000_003
    return ends, failures


def work(target: str, until: float, seed: int, examples: int | None = None) -> int:
    """Run examples in this process, and tell of them line by line."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from tests.fuzz.drawing import programs
    from tests.fuzz.programs import Program, script
    from tests.fuzz.reducing import features, kind, reduced
    from tests.fuzz.running import DifferenceError, check

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what frameworks print is not for the supervisor
    known: set[tuple[str, frozenset[str]]] = set()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _too_long)

    def tell(**what: Any) -> None:
        print(json.dumps(what), file=out, flush=True)

    def fails(program: Program) -> str:
        signal.alarm(LONGEST)
        try:
            check(program)
        except DifferenceError as difference:
            return str(difference)
        except Exception as error:  # a mistake of these tests, or of the library: both are to be seen
            return f"{type(error).__name__}: {error}\n\n{script(program)}"
        finally:
            signal.alarm(0)
        return ""

    def example(program: Program) -> None:
        nonlocal done
        if time.monotonic() > until or done == examples:
            return
        done += 1
        tell(script=script(program))
        signal.alarm(LONGEST)
        try:
            end, message = check(program), ""
        except Exception as error:  # see above
            end, message = "failed", str(error) if isinstance(error, DifferenceError) else ""
            message = message or f"{type(error).__name__}: {error}\n\n{script(program)}"
        finally:
            signal.alarm(0)
        tell(end=end)
        # A failure is known if one of its kind was made small, and this program has all that was left of that.
        if message and not any(kind(message) == one and own <= features(program) for one, own in known):
            small = program if examples is not None else reduced(program, fails, 60)
            known.add((kind(message), features(small)))
            told = (small is not program and fails(small)) or message
            tell(failure=f"{kind(message)} {sorted(features(small))}", message=told)

    done = 0
    while time.monotonic() < until and done != examples:
        seed += 1
        rounds = settings(
            max_examples=ROUND,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        seeded(seed)(rounds(given(programs(target, heavy=examples is None))(example)))()
    return 0


def _too_long(*_: object) -> None:
    raise TimeoutError(f"an example took more than {LONGEST} s")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.exit(main())
