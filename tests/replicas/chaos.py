"""`make chaos`: replicas under everything that can happen to their workers, at random, for as long as it is told.

Workers are killed, frozen (some for a while, some for ever) and made to fault, while they are busy, idle, starting
or closing; rows raise, run out of memory and take their process down; what is sent finds no memory. Every row that
was accepted has its right answer or an error of its own, once; nothing hangs; and nothing is left behind.
"""

import argparse
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.helpers import threads
from tests.replicas.models import Chaotic

import modelfleet as mf
from modelfleet.workers import NoRoomError
from modelfleet.workers.process import ProcessWorker, dismiss, hired_pids

HANGS = 180  # seconds after which something that has not ended hangs
CODES = [0.0] * 800 + [Chaotic.RAISES] * 16 + [Chaotic.GREEDY] * 8 + [Chaotic.KILLED, Chaotic.FAULT]


class Chaos:
    """Rounds of replicas and of whatever happens to them; `counts` says how often what has happened."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.model = Chaotic().eval()
        self.seen: set[int] = set()
        self._most: int | None = None  # rows that can be sent at once, for now
        self._mark = 0

    def run(self, seconds: float) -> None:
        """Round after round, until the time is over."""
        end = time.monotonic() + seconds
        send = ProcessWorker.answer
        ProcessWorker.answer = self._sending(send)  # type: ignore[method-assign]
        faulthandler.dump_traceback_later(seconds + 2 * HANGS, exit=True)
        try:
            while time.monotonic() < end:
                self._round(end)
        finally:
            ProcessWorker.answer = send  # type: ignore[method-assign]
            faulthandler.cancel_dump_traceback_later()
        dismiss()

    def _sending(self, send: Any) -> Any:
        def answer(worker: Any, value: Any = None) -> None:
            most = self._most
            if most is not None and isinstance(value, np.ndarray) and len(value) > most:
                self.counts["unsent"] += 1
                raise NoRoomError(f"there is no memory for {len(value)} rows")
            send(worker, value)

        return answer

    def _round(self, end: float) -> None:
        draw = self.random
        isolation: Any = draw.choice(["rows", "rows", "batch", "device"])
        self.isolation: Any = isolation
        self.batch_size = draw.choice([1, 4, 16])
        replicas = mf.Replicas(
            self.model,
            devices="cpu:0,cpu:1",
            batch_size=self.batch_size,
            max_queue=None,
            balance=draw.choice(["least-busy", "sticky"]),
            isolation=isolation,
            timeout=4.0,
            start_timeout=10.0,
            batch_wait=draw.choice([0.0, 0.01]),
        )
        over = threading.Event()
        killer = threading.Thread(target=self._kill, args=(over, draw.randrange(2**32)))
        killer.start()
        asked: list[tuple[np.ndarray, Any]] = []
        try:
            until = min(end, time.monotonic() + draw.uniform(0.5, 8))
            while time.monotonic() < until and replicas.failure is None:
                for _ in range(draw.randrange(12)):
                    x = self._rows(draw.randrange(1, 40))
                    try:
                        asked.append(
                            (x, replicas.submit(f"user {draw.randrange(6)}", x, priority=draw.randrange(2)))
                        )
                    except mf.ClosedError:  # of a user whose replica is gone
                        self.counts["refused"] += 1
                time.sleep(draw.choice([0.0, 0.05, 0.5, 1.5]))
            wait = draw.random() < 0.7
            self._ends(lambda: replicas.close(wait=wait))
        finally:
            over.set()
            killer.join()
        self.counts["rounds"] += 1
        for x, future in asked:
            self._check(x, future, replicas, wait)
        stats = replicas.stats()
        assert (stats.submitted, stats.running_rows, stats.waiting_rows) == (len(asked), 0, 0), stats
        assert stats.submitted == stats.answered + stats.failed + stats.cancelled, stats
        self.counts["restarts"] += sum(replica.restarts for replica in stats.replicas.values())
        self.counts["given up"] += sum(replica.broken is not None for replica in stats.replicas.values())

    def _ends(self, action: Any) -> None:
        thread = threading.Thread(target=action, daemon=True)
        thread.start()
        thread.join(HANGS)
        if thread.is_alive():
            faulthandler.dump_traceback()
            raise AssertionError("closing hangs")

    def _rows(self, count: int) -> np.ndarray:
        self._mark += 1
        made = np.random.default_rng(self._mark).normal(size=(count, 5)).astype(np.float32)
        made[:, 0] = self._mark
        made[:, 1] = [self.random.choice(CODES) for _ in range(count)]
        return made

    def _kill(self, over: threading.Event, seed: int) -> None:
        """Do something to a worker from time to time."""
        draw = random.Random(seed)
        resumed: list[tuple[float, int]] = []
        while not over.wait(draw.uniform(0.05, 0.8)):
            self._most = draw.choice([None, None, None, 3])
            for at, process in [*resumed]:
                if at <= time.monotonic():
                    resumed.remove((at, process))
                    self._signal(process, signal.SIGCONT)
            workers = hired_pids()
            self.seen.update(workers)
            if workers:
                victim = draw.choice(workers)
                sent = draw.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
                self._signal(victim, sent)
                if sent == signal.SIGSTOP and draw.random() < 0.6:
                    resumed.append((time.monotonic() + draw.uniform(0.1, 2), victim))
        self._most = None

    def _signal(self, process: int, sent: signal.Signals) -> None:
        try:
            os.kill(process, sent)
        except ProcessLookupError:
            return
        self.counts[sent.name] += 1

    def _check(self, x: np.ndarray, future: Any, replicas: mf.Replicas, waited: bool) -> None:
        """Every row has its right answer, or an error that is its own."""
        assert future.done(), "a request was lost"
        self.counts["requests"] += 1
        try:
            answer, kept, errors = future.result(), range(len(x)), {}
        except CancelledError:
            assert not waited
            self.counts["cancelled"] += 1
            return
        except mf.RowsError as error:
            answer, kept, errors = error.answers, error.kept, error.rows
        except mf.FleetError as error:
            if "is given up" not in str(error):
                raise
            self.counts["without a replica"] += 1
            return
        assert sorted([*kept, *errors]) == list(range(len(x)))
        if len(kept):
            with torch.no_grad():
                expected = torch.cat([torch.from_numpy(x[:, :1]), self.model.head(torch.from_numpy(x[:, 1:]))], 1)
            np.testing.assert_allclose(answer, expected.numpy()[list(kept)], rtol=1e-4, atol=1e-5)
        self.counts["rows answered"] += len(kept)
        for row, error in errors.items():
            self._check_error(x, row, error)

    def _check_error(self, x: np.ndarray, row: int, error: Exception) -> None:
        whole = self.isolation != "rows"
        start = row - row % self.batch_size if whole else row
        codes = set(x[start : start + (self.batch_size if whole else 1), 1].tolist())
        if isinstance(error, ValueError):
            assert Chaotic.RAISES in codes, (codes, error)
            self.counts["rows that raised"] += 1
        elif isinstance(error, torch.OutOfMemoryError):
            assert whole, error
            assert Chaotic.GREEDY in codes
            self.counts["rows without memory"] += 1
        elif "can't be sent in parts" in str(error):
            assert whole, error
            self.counts["rows unsent"] += 1
        else:
            assert "died repeatedly" in str(error), error
            deadly = bool(codes & {Chaotic.KILLED, Chaotic.FAULT})
            self.counts["rows that took replicas down" if deadly else "rows killed three times by chance"] += 1


def gone(process: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def held() -> dict[str, int]:
    """What this process holds: descriptors, children, memory that has a name in the system, and megabytes."""
    gc.collect()
    children = 0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children += int(fields[1]) == os.getpid()
    named = [name for name in os.listdir("/dev/shm") if name.startswith("mf-")]
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": children,
        "shared memory": len(named),
        "threads": threads(),
        "MB": pages * os.sysconf("SC_PAGE_SIZE") // 10**6,
    }


def main() -> int:
    """Run it, and tell what has happened."""
    parser = argparse.ArgumentParser(prog="python -m tests.replicas.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="the same choices again, as far as time allows")
    chosen = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if chosen.seed is None else chosen.seed
    torch.set_num_threads(1)
    print(f"chaos for {chosen.minutes:g} minutes, seed {seed}", flush=True)
    chaos = Chaos(seed)
    chaos.run(5)  # whatever is loaded and kept once
    first = held()
    for part in range(10):
        chaos.run(6 * chosen.minutes)
        print(f"{10 * part + 10} %: {held()}", flush=True)
    last = held()
    print("counts:", dict(chaos.counts))
    print("first:", first)
    print("last: ", last)
    left = [process for process in chaos.seen if not gone(process)]
    same = all(last[what] <= first[what] for what in ("descriptors", "children", "shared memory", "threads"))
    print("left over:", left or "nothing", "" if same else "(something has grown)")
    return int(bool(left) or not same)


if __name__ == "__main__":
    sys.exit(main())
