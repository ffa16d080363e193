"""What a worker process does: it runs one task after the other, item by item, as its owner tells it."""

import ctypes
import os
import pickle
import select
import sys
import threading
import traceback
from collections import deque
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from modelfleet.devices import cores
from modelfleet.workers import pieces, shared
from modelfleet.workers._base import listen
from modelfleet.workers.channel import Channel
from modelfleet.workers.code import Loaded
from modelfleet.workers.entry import take_over
from modelfleet.workers.signs import BEAT, Signs

SETUP, PING, START, ITEM, END, ERROR = "setup", "ping", "start", "item", "end", "error"

_GONE = getattr(select, "POLLRDHUP", 0)  # elsewhere the end alone is told, without being asked for
_BLAS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


class Host:
    """Runs the tasks of a worker."""

    def __init__(self, channel: Channel, signs: int) -> None:
        self._channel = channel
        self._process = os.getpid()
        self._signs = Signs(signs)
        os.close(signs)
        self._inbox, self._outbox = shared.Inbox(), shared.Outbox()
        self._told_to_stop = False
        self._early: deque[tuple[str, Any, list[int]]] = deque()  # what came before it was waited for
        self._code = Loaded()

    def run(self) -> NoReturn:
        """One task after the other."""
        threading.Thread(target=self._watch, name="modelfleet-watch", daemon=True).start()
        listen(self.interrupted)
        use_threads_asked_for()
        np.random.seed()  # a forked process begins with the numbers of all others
        while True:
            parcel, descriptors = self._awaited(START)
            self._told_to_stop = False
            self._code.begin()
            try:
                self._task(parcel, descriptors)
            except Exception as error:
                self._end_if_forked()
                self._tell(ERROR, (shared.portable(error), traceback.format_exc(), self._code.look()))
            else:
                self._tell(END, self._code.look())

    def _task(self, parcel: shared.Parcel, descriptors: list[int]) -> None:
        task, order = shared.unpack(parcel, descriptors)
        running = task(order)
        del order
        try:
            item = next(running)
            while True:
                self._end_if_forked()
                result, beside = self._outbox.pack(item, "a result")
                self._tell(ITEM, tuple(result), beside)
                del item
                answer = self._inbox.unpack(*self._awaited(ITEM))
                item = running.send(answer)
                del answer
        except StopIteration:
            pass
        finally:
            running.close()
            self._inbox.close()
            self._outbox.close()

    def _end_if_forked(self) -> None:
        """End a process that the task has forked and that came back from it: the memory is the worker's."""
        if os.getpid() != self._process:
            os._exit(0)

    def interrupted(self) -> bool:
        """Whether the task is to stop soon."""
        while not self._told_to_stop and (message := self._next(wait=False)) is not None:
            if message[0] == END:
                self._told_to_stop = True
            else:
                self._early.append(message)
        return self._told_to_stop

    def _awaited(self, kind: str) -> tuple[Any, list[int]]:
        """The next message of a kind; being told to stop is noted, whenever it comes."""
        while True:
            found, value, descriptors = self._early.popleft() if self._early else self._next() or ("", None, [])
            if found == kind:
                if found == ITEM:
                    self._signs.taken += 1
                return value, descriptors
            self._told_to_stop = True

    def _next(self, *, wait: bool = True) -> tuple[str, Any, list[int]] | None:
        while True:
            got = self._channel.next()
            if got is None:
                if self._channel.ended:
                    os._exit(0)
                if not wait:
                    return None
                self._signs.busy = 0
                self._channel.wait(None)
                self._signs.busy = 1
                continue
            kind, value = pickle.loads(got[0])
            if kind in (START, ITEM):
                value = shared.Parcel(*value)
            if kind == PING:
                self._signs.pong = value
            elif kind == SETUP:
                take_over(value)
            else:
                return kind, value, got[1]

    def _tell(self, kind: str, value: Any, descriptors: list[int] | None = None) -> None:
        with suppress(Exception):  # what was printed is to be seen, even if this process is ended at once
            sys.stdout.flush()
        try:
            self._channel.send(pickle.dumps((kind, value)), descriptors or ())
        except OSError:
            os._exit(0)
        finally:
            pieces.close(descriptors or [])

    def _watch(self) -> NoReturn:
        """Show that this process is there; end it when its owner is gone, whatever the task is at."""
        poll = select.poll()
        poll.register(self._channel.fileno(), _GONE)
        while True:
            self._signs.beats += 1
            if poll.poll(BEAT * 1000):
                os._exit(0)


def use_threads_asked_for() -> None:
    """Have libraries that were loaded before the environment was this one use the threads that it asks for."""
    asked = next((os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ), "")
    count = int(asked) if asked.isdigit() and int(asked) else None
    torch = sys.modules.get("torch")
    if torch is not None and count is not None:
        torch.set_num_threads(count)
    blas = os.environ.get("OPENBLAS_NUM_THREADS", "")
    _set_blas_threads(int(blas) if blas.isdigit() and int(blas) else count or cores())


def _set_blas_threads(count: int) -> None:
    """Set the threads of NumPy's OpenBLAS, which the nursery has loaded with one: threads can't be forked."""
    if sys.platform != "linux":
        return
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file if "openblas" in line}
    for path in paths:
        with suppress(OSError):
            library = ctypes.CDLL(path)
            for name in _BLAS:
                if hasattr(library, name):
                    getattr(library, name)(count)
