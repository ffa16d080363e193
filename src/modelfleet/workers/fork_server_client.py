"""Program's side of its fork server, which starts the program's workers. It is started when first needed."""

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

from modelfleet.frameworks import ADAPTERS
from modelfleet.workers import fork_server
from modelfleet.workers.channel import Channel, above_standard
from modelfleet.workers.heartbeat import Heartbeat, SilenceTimer
from modelfleet.workers.protocol import WorkerDiedError
from modelfleet.workers.shared_memory import close_descriptors

EXIT_TIMEOUT = 1.0  # seconds that a fork server has to end
SILENCE_LIMIT = 10.0  # seconds without a heartbeat after which a fork server that does not read is given up
STATUS_TIMEOUT = 5.0  # seconds to wait for the fork server's report of how a worker ended
# Libraries read these variables as they load: a process that loaded them with other values can't be used.
READ_AT_IMPORT = (
    *("CUDA_", "HIP_", "ROCR_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH", "TF_", "XLA_"),
    *("JAX_", "KERAS_", "NCCL_", "LD_", "MALLOC_", "PYTHON"),
)
# Workers set these after loading.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_NOT_FOR_WORKERS = ("cli", "demo", "doctor", "serving", "testing", "search", "__main__", "workers.ray")

Spawned = tuple[Channel, "WorkerProcess", Heartbeat]


class WorkerProcess:
    """Lets the owner of a worker's process watch and end it."""

    def __init__(self, server: "ForkServer", status: Channel) -> None:
        self.server = server
        self.status = status
        """Socket on which the fork server reports how the process ended; readable when it has."""
        self.pid: int | None = None
        self.exit_code: int | None = None
        """Exit code of the process, or the negative number of a signal."""
        self.start_error: str | None = None
        self._pidfd: list[int] = []
        self._killed = False

    @property
    def alive(self) -> bool:
        """True while the process runs or is being started."""
        while not self._killed and (message := self.status.next()) is not None:
            kind, value = pickle.loads(message[0])
            if kind == "process":
                self.pid, self._pidfd = value, message[1]
            elif kind == "refused":
                self.start_error = value
            else:
                self.exit_code = value
        ended = self.status.ended or self.start_error is not None or self.exit_code is not None
        return not (self._killed or ended)

    def kill(self) -> None:
        """End the process at once. If it has not started yet, it never will."""
        if self.alive and self._pidfd:
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd[0], signal.SIGKILL)
        self._killed = True
        self.status.close()
        close_descriptors(self._pidfd)

    def abandon(self) -> None:
        """Leave the process to the parent, in a forked child."""
        self._killed = True
        self.status.abandon()
        close_descriptors(self._pidfd)

    def __del__(self) -> None:
        close_descriptors(self._pidfd)

    def death_reason(self) -> str:
        """Return a sentence that says how the process ended, as far as that is known."""
        end = time.monotonic() + STATUS_TIMEOUT
        while not self._killed and self.alive and time.monotonic() < end:
            self.status.wait(end - time.monotonic())
        if self.start_error is not None:
            return f"its worker process could not be started: {self.start_error}"
        if self.exit_code is not None:
            return f"its worker process {describe_exit(self.exit_code)}"
        if self._killed:
            return "its worker process has been closed"
        if self.status.ended:
            reason = self.server.exit_reason()
            return f"its worker process ended with the fork server, which starts workers and {reason}"
        return "its worker process closed its socket"


class ForkServer:
    """Starts a fork server, and asks it for workers."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        """Variables that it was started with, of those that libraries read as they load."""
        self.abandoned = False
        """True once it has failed to start a worker."""
        heartbeat = Heartbeat.create()
        self.heartbeat = Heartbeat(heartbeat)
        self._channel, theirs = Channel.pair()
        env = {name: value for name, value in os.environ.items() if name not in _THREAD_VARIABLES}
        with theirs:
            self._process = subprocess.Popen(
                fork_server.command("modelfleet.workers.fork_server", theirs.fileno(), heartbeat),
                executable=os.fsdecode(multiprocessing.spawn.get_executable()),
                stdin=subprocess.DEVNULL,
                # What is closed here must not be closed there: the next file to be opened would get its number.
                stdout=None if _is_open(1) else subprocess.DEVNULL,
                stderr=None if _is_open(2) else subprocess.DEVNULL,
                cwd=_existing_directory(),
                pass_fds=(theirs.fileno(), heartbeat),
                env={**env, "OPENBLAS_NUM_THREADS": "1"},  # threads can't be forked
                process_group=0,  # Ctrl-C is for the owner
            )
        os.close(heartbeat)
        self._finalizer = weakref.finalize(self, _end, self._channel, self._process)
        _servers.add(self)

    def is_usable(self, environment: dict[str, str]) -> bool:
        """Return True if it can start workers for a program with these variables."""
        running = self._process.poll() is None and not self._channel.ended
        return self.environment == environment and not self.abandoned and running

    def spawn(self) -> Spawned:
        """Ask for a worker. Does not wait until it is up."""
        try:
            channel, theirs = Channel.pair()
            status, their_status = Channel.pair()
            heartbeat = Heartbeat.create()
            outputs = [_copy_of_output(1), _copy_of_output(2)]
        except OSError as error:  # no more files
            raise WorkerDiedError(f"a worker process can't be started: {error}") from error
        with theirs, their_status:
            try:
                request = _modules_for_workers(), os.environ.get("MODELFLEET_FORK", "auto") != "never"
                silence = SilenceTimer()
                self._channel.send(
                    pickle.dumps(request),
                    [theirs.fileno(), their_status.fileno(), heartbeat, *outputs],
                    keep_waiting=lambda: (
                        bool(self.heartbeat.busy) or silence.read(self.heartbeat.beats) < SILENCE_LIMIT
                    ),
                )
                return channel, WorkerProcess(self, status), Heartbeat(heartbeat)
            except OSError as error:
                channel.close()
                status.close()
                raise WorkerDiedError(f"the fork server, which starts workers, {self.exit_reason()}") from error
            finally:
                close_descriptors([heartbeat, *outputs])

    def exit_reason(self) -> str:
        """Return how it ended, or that it does not answer."""
        try:
            return describe_exit(self._process.wait(EXIT_TIMEOUT))
        except subprocess.TimeoutExpired:
            return "does not answer"

    def kill(self) -> None:
        """End it and all of its workers, whatever it is doing."""
        self.abandoned = True
        self._process.kill()

    def abandon(self) -> None:
        """Leave it to the parent, in a forked child."""
        self.abandoned = True
        self._finalizer.detach()
        self._channel.abandon()
        self._process.returncode = 0  # it is not this process's child


def _end(channel: Channel, process: subprocess.Popen[bytes]) -> None:
    channel.close()
    try:
        process.wait(EXIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_servers: "weakref.WeakSet[ForkServer]" = weakref.WeakSet()
_current: ForkServer | None = None
_lock = threading.Lock()


def spawn() -> Spawned:
    """Start a new worker. Does not wait until it is up.

    Raises:
        WorkerDiedError: If it can't be started.
    """
    global _current
    environment = {
        name: value
        for name, value in os.environ.items()
        if _is_read_at_import(name) and name not in _THREAD_VARIABLES
    }
    for attempt in (1, 2):
        try:
            with _lock:
                if _current is None or not _current.is_usable(environment):
                    _current = ForkServer(environment)
                server = _current
        except OSError as error:  # no more processes, or no more files
            raise WorkerDiedError(f"the fork server, which starts workers, can't be started: {error}") from error
        try:
            return server.spawn()
        except WorkerDiedError:
            server.abandoned = True
            if attempt == 2:
                raise
    raise AssertionError("the second attempt returns or raises")


def differ_at_import(before: dict[str, str], after: dict[str, str]) -> bool:
    """Return True if two environments differ in a variable that libraries read as they load."""
    names = before.keys() | after.keys()
    return any(before.get(name) != after.get(name) for name in names if _is_read_at_import(name))


def dismiss() -> None:
    """Let the fork server end as soon as it has no workers."""
    global _current
    with _lock:
        _current = None


def describe_exit(code: int) -> str:
    """Return in words how a process ended."""
    if code < 0:
        hint = ", which the system does when memory runs out" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"
    return f"ended with code {code}"


def _is_read_at_import(name: str) -> bool:
    return name.startswith(READ_AT_IMPORT) and name != "PYTHONHASHSEED"


def _modules_for_workers() -> list[str]:
    """Return the modules of modelfleet and its frameworks that this program has imported and workers will need."""
    preloaded = [name for name, entry in ADAPTERS.items() if entry.forkable and name in sys.modules]
    skipped = [f"modelfleet.{name}." for name in _NOT_FOR_WORKERS]
    skipped += [f"modelfleet.frameworks.{name}." for name in ADAPTERS if name not in preloaded]
    imported = [name for name in sys.modules if name.startswith("modelfleet.")]
    return preloaded + [name for name in imported if not f"{name}.".startswith(tuple(skipped))]


def _copy_of_output(number: int) -> int:
    """Return a copy of this process's output or errors; of /dev/null if that is closed."""
    if _is_open(number):
        return above_standard(os.dup(number))
    return above_standard(os.open(os.devnull, os.O_WRONLY))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _existing_directory() -> str | None:
    """Return None for the working directory; the root if that has been removed."""
    try:
        os.getcwd()
    except OSError:
        return os.sep
    return None


def _abandon_after_fork() -> None:
    """Leave to the parent, in a forked child, what the parent has started."""
    global _current, _lock
    _lock, _current = threading.Lock(), None
    for server in list(_servers):
        server.abandon()
    _servers.clear()


os.register_at_fork(after_in_child=_abandon_after_fork)
