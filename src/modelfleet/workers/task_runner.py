"""Work of a worker process: one task after the other, item by item, as its owner asks."""

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
from modelfleet.workers.channel import Channel
from modelfleet.workers.heartbeat import BEAT_INTERVAL, Heartbeat
from modelfleet.workers.parcels import Inbox, Outbox, Parcel, unpack
from modelfleet.workers.pickling import sendable_error
from modelfleet.workers.protocol import set_interrupt_check
from modelfleet.workers.shared_memory import close_descriptors
from modelfleet.workers.source_files import LoadedFiles

SETUP, PING, START, ITEM, END, ERROR = "setup", "ping", "start", "item", "end", "error"  # kinds of messages

_HANGUP = getattr(select, "POLLRDHUP", 0)  # on other systems a hangup is always reported
_BLAS_SETTERS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


class TaskRunner:
    """Runs the tasks of a worker process."""

    def __init__(self, channel: Channel, heartbeat: int) -> None:
        self._channel = channel
        self._process = os.getpid()
        self._heartbeat = Heartbeat(heartbeat)
        os.close(heartbeat)
        self._inbox, self._outbox = Inbox(), Outbox()
        self._interrupted = False
        self._early: deque[tuple[str, Any, list[int]]] = deque()  # messages that came before they were waited for
        self._files = LoadedFiles()

    def run(self) -> NoReturn:
        """Run one task after the other."""
        threading.Thread(target=self._beat, name="modelfleet-heartbeat", daemon=True).start()
        set_interrupt_check(self._check_interrupted)
        apply_thread_settings()
        np.random.seed()  # a forked process would draw the same numbers as all others
        while True:
            parcel, descriptors = self._wait_for(START)
            self._interrupted = False
            self._files.mark_import_start()
            try:
                self._run_task(parcel, descriptors)
            except Exception as error:
                self._end_if_forked()
                self._send(ERROR, (sendable_error(error), traceback.format_exc(), self._files.update()))
            else:
                self._send(END, self._files.update())

    def _run_task(self, parcel: Parcel, descriptors: list[int]) -> None:
        task, argument = unpack(parcel, descriptors)
        running = task(argument)
        del argument
        try:
            item = next(running)
            while True:
                self._end_if_forked()
                packed, attached = self._outbox.pack(item, "a result")
                self._send(ITEM, tuple(packed), attached)
                del item
                answer = self._inbox.unpack(*self._wait_for(ITEM))
                item = running.send(answer)
                del answer
        except StopIteration:
            pass
        finally:
            running.close()
            self._inbox.close()
            self._outbox.close()

    def _end_if_forked(self) -> None:
        """End a process that the task forked and that returned from the task: the memory is the worker's."""
        if os.getpid() != self._process:
            os._exit(0)

    def _check_interrupted(self) -> bool:
        while not self._interrupted and (message := self._next(wait=False)) is not None:
            if message[0] == END:
                self._interrupted = True
            else:
                self._early.append(message)
        return self._interrupted

    def _wait_for(self, kind: str) -> tuple[Any, list[int]]:
        """Return the next message of a kind. A request to stop is noted whenever it comes."""
        while True:
            found, value, descriptors = self._early.popleft() if self._early else self._next() or ("", None, [])
            if found == kind:
                if found == ITEM:
                    self._heartbeat.answers_begun += 1
                return value, descriptors
            self._interrupted = True

    def _next(self, *, wait: bool = True) -> tuple[str, Any, list[int]] | None:
        while True:
            message = self._channel.next()
            if message is None:
                if self._channel.ended:
                    os._exit(0)
                if not wait:
                    return None
                self._heartbeat.busy = 0
                self._channel.wait(None)
                self._heartbeat.busy = 1
                continue
            kind, value = pickle.loads(message[0])
            if kind in (START, ITEM):
                value = Parcel(*value)
            if kind == PING:
                self._heartbeat.last_ping = value
            elif kind == SETUP:
                value.apply()
            else:
                return kind, value, message[1]

    def _send(self, kind: str, value: object, descriptors: list[int] | None = None) -> None:
        with suppress(Exception):  # printed text must be seen, even if this process is ended at once
            sys.stdout.flush()
        try:
            self._channel.send(pickle.dumps((kind, value)), descriptors or ())
        except OSError:
            os._exit(0)
        finally:
            close_descriptors(descriptors or [])

    def _beat(self) -> NoReturn:
        """Update the heartbeat, and end this process when its owner is gone, whatever the task is doing."""
        poll = select.poll()
        poll.register(self._channel.fileno(), _HANGUP)
        while True:
            self._heartbeat.beats += 1
            if poll.poll(BEAT_INTERVAL * 1000):
                os._exit(0)


def apply_thread_settings() -> None:
    """Make libraries that were loaded before the environment was set use the threads that it asks for."""
    asked = next((os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ), "")
    count = int(asked) if asked.isdigit() and int(asked) else None
    torch = sys.modules.get("torch")
    if torch is not None and count is not None:
        torch.set_num_threads(count)
    blas = os.environ.get("OPENBLAS_NUM_THREADS", "")
    _set_blas_threads(int(blas) if blas.isdigit() and int(blas) else count or cores())


def _set_blas_threads(count: int) -> None:
    """Set the threads of NumPy's OpenBLAS. The fork server loads it with one, as threads can't be forked."""
    if sys.platform != "linux":
        return
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file if "openblas" in line}
    for path in paths:
        with suppress(OSError):
            library = ctypes.CDLL(path)
            for name in _BLAS_SETTERS:
                if hasattr(library, name):
                    getattr(library, name)(count)
