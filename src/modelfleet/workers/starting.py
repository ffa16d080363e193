"""How a program has its workers started: by a nursery of its own, which it starts at the first need."""

import multiprocessing.spawn
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress

from modelfleet.workers import nursery, pieces
from modelfleet.workers._base import WorkerDiedError
from modelfleet.workers.channel import Channel, above_standard
from modelfleet.workers.signs import Signs, Silence

ENDING = 1.0  # seconds that a nursery has to end
# Libraries look at these variables as they are loaded: a process that has loaded them with others is of no use.
READ_ONCE = (
    *("CUDA_", "HIP_", "ROCR_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH", "TF_", "XLA_"),
    *("JAX_", "KERAS_", "NCCL_", "LD_", "MALLOC_", "PYTHON"),
)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # workers set these after loading
_NOT_OURS = ("cli", "demo", "doctor", "serving", "testing", "search", "__main__", "workers.ray")


class Process:
    """A worker's process, as its owner knows it."""

    def __init__(self, home: "Nursery", life: Channel) -> None:
        self.home = home
        self.life = life
        """What the nursery tells of it; readable when there is news."""
        self.pid: int | None = None
        self.code: int | None = None
        """How it ended: a code, or the negative number of a signal."""
        self.refused: str | None = None
        self._pidfd: list[int] = []
        self._killed = False

    @property
    def alive(self) -> bool:
        """Whether it is there, or will be."""
        while not self._killed and (message := self.life.next()) is not None:
            what, value = pickle.loads(message[0])
            if what == "process":
                self.pid, self._pidfd = value, message[1]
            elif what == "refused":
                self.refused = value
            else:
                self.code = value
        return not (self._killed or self.life.ended or self.refused is not None or self.code is not None)

    def kill(self) -> None:
        """End it at once; if it is not there yet, it will not be."""
        if self.alive and self._pidfd:
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd[0], signal.SIGKILL)
        self._killed = True
        self.life.close()
        pieces.close(self._pidfd)

    def forget(self) -> None:
        """In a forked child: leave it to the parent."""
        self._killed = True
        self.life.forget()
        pieces.close(self._pidfd)

    def __del__(self) -> None:
        pieces.close(self._pidfd)

    def obituary(self) -> str:
        """What is known of its death."""
        end = time.monotonic() + 5.0
        while not self._killed and self.alive and time.monotonic() < end:
            self.life.wait(end - time.monotonic())
        if self.refused is not None:
            return f"its worker process could not be started: {self.refused}"
        if self.code is None:
            if not self._killed and self.life.ended:
                return f"its worker process has ended with the nursery, which starts workers and {self.home.end()}"
            return "its worker process has been closed" if self._killed else "its worker process closed its socket"
        return f"its worker process {ended(self.code)}"


class Nursery:
    """The process that starts workers."""

    def __init__(self, kind: dict[str, str]) -> None:
        self.kind = kind
        """The variables that it was started with."""
        self.stuck = False
        """Whether it was asked for a worker in vain."""
        signs = Signs.new()
        self.signs = Signs(signs)
        self._channel, theirs = Channel.pair()
        env = {name: value for name, value in os.environ.items() if name not in _THREADS}
        with theirs:
            self._process = subprocess.Popen(
                nursery.command("modelfleet.workers.nursery", theirs.fileno(), signs),
                executable=os.fsdecode(multiprocessing.spawn.get_executable()),
                stdin=subprocess.DEVNULL,
                # What is closed here must not be closed there: the next file that is opened would take its place.
                stdout=None if _is_open(1) else subprocess.DEVNULL,
                stderr=None if _is_open(2) else subprocess.DEVNULL,
                cwd=_folder(),
                pass_fds=(theirs.fileno(), signs),
                env={**env, "OPENBLAS_NUM_THREADS": "1"},  # threads can't be forked
                process_group=0,  # Ctrl-C is for the owner
            )
        os.close(signs)
        self._end = weakref.finalize(self, _end, self._channel, self._process)
        _nurseries.add(self)

    def usable(self, kind: dict[str, str]) -> bool:
        """Whether workers can be had of it, for a program with these variables."""
        return self.kind == kind and not self.stuck and self._process.poll() is None and not self._channel.ended

    def hire(self) -> tuple[Channel, Process, Signs]:
        """Ask for a worker; does not wait until it is there."""
        try:
            channel, theirs = Channel.pair()
            life, told = Channel.pair()
            signs = Signs.new()
            sent = [_output(1), _output(2)]
        except OSError as error:  # no more files
            raise WorkerDiedError(f"a worker process can't be started: {error}") from error
        with theirs, told:
            try:
                request = _modules(), os.environ.get("MODELFLEET_FORK", "auto") != "never"
                self._channel.send(
                    pickle.dumps(request),
                    [theirs.fileno(), told.fileno(), signs, *sent],
                    patience=_Patience(self.signs),
                )
                return channel, Process(self, life), Signs(signs)
            except OSError as error:
                channel.close()
                life.close()
                raise WorkerDiedError(f"the nursery, which starts workers, {self.end()}") from error
            finally:
                pieces.close([signs, *sent])

    def end(self) -> str:
        """How it ended, for it has."""
        try:
            code = self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            return "does not answer"
        return ended(code)

    def kill(self) -> None:
        """End it, and all of its workers, whatever it is at."""
        self.stuck = True
        self._process.kill()

    def forget(self) -> None:
        """In a forked child: leave it to the parent."""
        self.stuck = True
        self._end.detach()
        self._channel.forget()
        self._process.returncode = 0  # it is not this process's child


class _Patience:
    """Whether a nursery that does not read shows signs of life."""

    def __init__(self, signs: Signs) -> None:
        self._signs = signs
        self._silence = Silence()

    def __call__(self) -> bool:
        return bool(self._signs.busy) or self._silence.look(self._signs.beats) < 10.0


def _end(channel: Channel, process: subprocess.Popen[bytes]) -> None:
    channel.close()
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_nurseries: "weakref.WeakSet[Nursery]" = weakref.WeakSet()
_current: Nursery | None = None
_lock = threading.Lock()


def hire() -> tuple[Channel, Process, Signs]:
    """A new worker; does not wait until it is up."""
    global _current
    kind = {name: value for name, value in os.environ.items() if _read_once(name) and name not in _THREADS}
    for attempt in (1, 2):
        try:
            with _lock:
                if _current is None or not _current.usable(kind):
                    _current = Nursery(kind)
                home = _current
        except OSError as error:  # no more processes, or no more files
            raise WorkerDiedError(f"the nursery, which starts workers, can't be started: {error}") from error
        try:
            return home.hire()
        except WorkerDiedError:
            home.stuck = True
            if attempt == 2:
                raise
    raise AssertionError("the second attempt has given or raised something")


def read_once(before: dict[str, str], after: dict[str, str]) -> bool:
    """Whether two environments differ in what libraries read only once."""
    return any(before.get(name) != after.get(name) for name in before.keys() | after.keys() if _read_once(name))


def dismiss() -> None:
    """Let the nursery end as soon as it has no workers."""
    global _current
    with _lock:
        _current = None


def ended(code: int) -> str:
    """How a process ended, in words."""
    if code < 0:
        hint = ", which the system does for want of memory" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"
    return f"ended with code {code}"


def _read_once(name: str) -> bool:
    return name.startswith(READ_ONCE) and name != "PYTHONHASHSEED"


def _modules() -> list[str]:
    """What workers of this program will need, of ours and of torch: what it has imported itself."""
    torch = "torch" in sys.modules
    skipped = [f"modelfleet.{name}" for name in _NOT_OURS]
    skipped += [f"modelfleet.frameworks.{name}" for name in nursery.UNSAFE]
    skipped += [] if torch else ["modelfleet.frameworks.torch"]
    ours = [name for name in sys.modules if name.startswith("modelfleet.")]
    return ["torch"] * torch + [name for name in ours if not _within(name, skipped)]


def _within(name: str, packages: list[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _output(number: int) -> int:
    """A copy of this process's output or errors; nowhere, if that is closed."""
    if _is_open(number):
        return above_standard(os.dup(number))
    return above_standard(os.open(os.devnull, os.O_WRONLY))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _folder() -> str | None:
    """Where to start a program: here (None), or, if this folder has been removed, where there is always one."""
    try:
        os.getcwd()
    except OSError:
        return os.sep
    return None


def _forget() -> None:
    """In a forked child: what its parent has started is its parent's."""
    global _current, _lock
    _lock, _current = threading.Lock(), None
    for one in list(_nurseries):
        one.forget()
    _nurseries.clear()


os.register_at_fork(after_in_child=_forget)
