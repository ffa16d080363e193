"""Workers on a Ray cluster: one actor for each of its devices.

Ray decides on which node an actor runs. At first each actor goes to the node of its device. When a node is lost,
new actors are requested, and start as soon as the cluster has room for them, on a new node or on an old one.
"""

import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from modelfleet.devices import Device
from modelfleet.errors import InputError, MissingExtraError
from modelfleet.frameworks.conversions import pickle_reduction
from modelfleet.workers.pickling import pickle_value, sendable_error
from modelfleet.workers.protocol import Task, WorkerDiedError, set_interrupt_check
from modelfleet.workers.task_runner import END, ERROR, ITEM

try:
    import ray
    from ray import cloudpickle
    from ray.exceptions import RayActorError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as error:
    raise MissingExtraError("ray", "ray", "running on a cluster") from error

RayParcel = tuple[bytes, list[np.ndarray]]
"""Pickle, and the bytes of the arrays beside it."""
Message = tuple[str, RayParcel]
"""Kind of a message, and its contents."""


@dataclass
class Cluster:
    """Holds a connection to a Ray cluster, as `mf.connect` returns it. A context manager that closes it.

    with mf.connect("ray://head:10001") as cluster:
        print(cluster.devices)
    """

    address: str | None
    owned: bool
    """True if `connect` opened the connection, so that `close` has to shut it down."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def devices(self) -> list[str]:
        """Names of the cluster's devices, such as "ray:0"."""
        return [place.name for place in places(None)]

    def close(self) -> None:
        """Leave the cluster. From then on `devices="auto"` means this machine again."""
        global _cluster
        if _cluster is self:
            _cluster = None
            if self.owned:
                ray.shutdown()


_cluster: Cluster | None = None


def connect(address: str | None = None) -> Cluster:
    """Join a Ray cluster: from now on `devices="auto"` means all of its devices.

    Args:
        address: "ray://host:10001" for a remote cluster, or "auto" for the cluster that this machine is part of.
            None uses the cluster that Ray finds (`RAY_ADDRESS`, or one that runs here), or starts a new one on
            this machine.

    Returns:
        The connection. It is a context manager, and has `devices` and `close()`.

    Raises:
        InputError: If no cluster can be reached, or this process is connected to another one.
        MissingExtraError: If Ray is not installed.

    Example:
        with mf.connect("ray://head:10001"):
            history = fleet.fit((x, y), epochs=10)
    """
    global _cluster
    owned = not ray.is_initialized()
    if owned:
        try:
            ray.init(address, log_to_driver=False, include_dashboard=None if address else False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(
                f"no Ray cluster can be reached at {address!r}: {_first_line(error)} Start one with "
                f'`ray start --head`, and give its address as in "ray://host:10001", or "auto" on a machine that '
                f"is part of it."
            ) from error
    elif _cluster is not None and address not in (None, "auto", _cluster.address):
        raise InputError(
            f"this process is connected to {_cluster.address or 'a Ray cluster'} already, and can't be to "
            f"{address} as well. Close that connection first."
        )
    if _cluster is None:
        _cluster = Cluster(address, owned)
    return _cluster


def connected() -> bool:
    """Return True if `connect` was called and its connection is open."""
    return _cluster is not None


def places(wanted: Sequence[Device] | None) -> list["RayPlace"]:
    """Return the places of the wanted devices; None: all, which are every GPU and every node without one."""
    if not ray.is_initialized():
        connect()
    found: list[RayPlace] = []
    for node in sorted(_nodes(), key=lambda node: str(node["NodeID"])):
        resources = node["Resources"]
        cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        location = node["NodeID"], node["NodeManagerAddress"]
        for _ in range(gpus):
            found.append(RayPlace(f"ray:{len(found)}", "cuda:0", *location, gpus=1, cpus=0))
        if not gpus and cpus:
            env = {"OMP_NUM_THREADS": str(cpus)}
            found.append(RayPlace(f"ray:{len(found)}", "cpu", *location, gpus=0, cpus=1, env=env))
    if not found:
        raise InputError("the Ray cluster has no devices: none of its nodes offers a CPU or a GPU.")
    if wanted is None or wanted == (Device("ray"),):
        return found
    by_name = {place.name: place for place in found}
    for device in wanted:
        if str(device) not in by_name:
            raise InputError(
                f"device '{device}' does not exist: the cluster has {', '.join(by_name)}. Name some of these, "
                f"or 'ray' for all."
            )
    return [by_name[str(device)] for device in wanted]


def _nodes() -> list[dict[str, Any]]:  # as Ray describes them
    return [node for node in ray.nodes() if node["Alive"]]


@dataclass(frozen=True)
class RayPlace:
    """Starts workers for a device of a Ray cluster."""

    name: str
    device: str
    node: str
    host: str
    """Address of the node."""
    gpus: int
    cpus: int
    env: Mapping[str, str] = field(default_factory=dict)
    on_cluster = True

    def hire(self, last_job: object = None) -> "RayWorker":
        """Return a new actor, on the device's node if that is alive."""
        affinity = NodeAffinitySchedulingStrategy(self.node, soft=True)
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_restarts": 0}
        if any(node["NodeID"] == self.node for node in _nodes()):
            options["scheduling_strategy"] = affinity
        env = {**self.env, "MODELFLEET_DEVICE": self.name}
        backend = os.environ.get("KERAS_BACKEND")
        if backend:
            env["KERAS_BACKEND"] = backend
        actor: Any = _Actor  # as decorated
        return RayWorker(actor.options(**options).remote(env))

    def release(self, worker: "RayWorker") -> None:
        """End a worker: other programs may need the device."""
        worker.close()

    def publish(self, value: object, description: str) -> "ObjectStoreValue":
        """Put a value into the object store, from which every node fetches it once."""
        return ObjectStoreValue(ray.put(_pack(value, description)))


@dataclass(frozen=True)
class ObjectStoreValue:
    """Refers to a value in Ray's object store."""

    ref: Any

    def get(self) -> Any:
        """Return the value, its arrays as views of the node's store."""
        return _unpack(ray.get(self.ref))

    def close(self) -> None:
        """Do nothing: the store drops the value with the last reference to it."""


class RayWorker:
    """One actor."""

    max_ahead = 1
    silent_seconds, frozen = 0.0, False  # Ray itself watches its nodes and actors

    def __init__(self, actor: Any) -> None:
        self.last_job: object = None
        self.busy = self.starting = False
        self.alive = True
        self._actor = actor
        self._pending: deque[Any] = deque()  # references of the next messages
        self._answered = self._received = 0

    @property
    def answers_begun(self) -> int:
        """Number of answers that the task may have started on: each as soon as the item before it was there."""
        if self._pending and self._received < self._answered and self.poll():
            return min(self._answered, self._received + 1)
        return min(self._answered, self._received)

    def start(self, task: Task, argument: object, description: str) -> None:
        """Begin a task; see `Worker.start`."""
        parcel = _pack((task, argument), description)
        self.busy = self.starting = True
        self._answered = self._received = 0
        self._pending.append(self._actor.start.remote(parcel))

    def answer(self, value: object = None) -> None:
        """Let the task continue after an item."""
        self._pending.append(self._actor.go.remote(_pack(value, "an answer")))
        self._answered += 1

    def interrupt(self) -> None:
        """Ask the task to stop soon."""
        self._actor.interrupt.remote()

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Return True if the worker has an item, or has died, within `seconds`."""
        return bool(self._pending and ray.wait([self._pending[0]], timeout=seconds, fetch_local=True)[0])

    def receive(self) -> tuple[bool, Any]:
        """Wait for the next item, and return it; see `Worker.receive`."""
        try:
            kind, parcel = ray.get(self._pending.popleft())
        except RayError as error:
            self.alive = False
            what = "its actor died" if isinstance(error, RayActorError) else "its answer was lost"
            raise WorkerDiedError(f"{what} on the Ray cluster: {_first_line(error)}") from error
        self.busy, self.starting = kind == ITEM, False
        self._received += 1
        value = _unpack(parcel)
        if kind == ERROR:
            error, trace = value
            error.add_note(f"In an actor of Ray:\n{trace}")
            raise error
        return kind == ITEM, value

    def close(self) -> None:
        """End the actor at once."""
        self.alive = False
        if ray.is_initialized():
            ray.kill(self._actor)

    @classmethod
    def wait(cls, workers: Sequence[Self], seconds: float) -> list[Self]:
        """Return the workers that have an item or have died; wait up to `seconds` for the first."""
        ready, _ = ray.wait([worker._pending[0] for worker in workers], num_returns=1, timeout=seconds)
        return [worker for worker in workers if worker._pending[0] in ready]


_remote: Any = ray.remote


@_remote(concurrency_groups={"control": 1})  # so that `interrupt` is called while a step runs
class _Actor:
    """Runs a task from one item to the next."""

    def __init__(self, env: Mapping[str, str]) -> None:
        os.environ.update(env)
        self._running: Generator[Any, Any, None] | None = None
        self._interrupted = False

    def start(self, parcel: RayParcel) -> Message:
        """Begin a task, and return its first message."""
        self._interrupted = False
        set_interrupt_check(lambda: self._interrupted)

        def begin() -> Any:
            task, argument = _unpack(parcel)
            self._running = task(argument)
            return next(self._running)

        return self._message(begin)

    def go(self, parcel: RayParcel) -> Message:
        """Go on with the task, and return its next message."""
        assert self._running is not None
        running = self._running
        return self._message(lambda: running.send(_unpack(parcel)))

    @ray.method(concurrency_group="control")
    def interrupt(self) -> None:
        """Note that the task has to stop soon."""
        self._interrupted = True

    def _message(self, step: Callable[[], Any]) -> Message:
        try:
            return ITEM, _pack(step(), "a result")
        except StopIteration:
            self._running = None
            return END, _pack(None, "")
        except Exception as error:
            self._running = None
            return ERROR, _pack((sendable_error(error), traceback.format_exc()), "an error")


class _Pickler(cloudpickle.CloudPickler):
    """Ray's own pickler, the only one that knows its references. Pickles code that others can't import."""

    def reducer_override(self, value: object) -> Any:
        reduced = pickle_reduction(value)
        return super().reducer_override(value) if reduced is NotImplemented else reduced


def _pack(value: object, description: str) -> RayParcel:
    stream, views = pickle_value(value, description, _Pickler)
    return stream, [np.frombuffer(view, dtype=np.uint8) for view in views]


def _unpack(parcel: RayParcel) -> Any:
    stream, buffers = parcel
    return pickle.loads(stream, buffers=buffers)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
