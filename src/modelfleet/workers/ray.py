"""Workers on a Ray cluster: an actor for every device of it.

Ray decides on which node an actor runs: at first each goes to the node of its device. When a node is lost, its
actors are asked for again, and begin as soon as the cluster has room for them, on a new node or on an old one.
"""

import os
import pickle
import traceback
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from modelfleet import frameworks
from modelfleet.devices import Device
from modelfleet.errors import InputError, MissingExtraError
from modelfleet.workers._base import Task, WorkerDiedError, listen
from modelfleet.workers.host import END, ERROR, ITEM
from modelfleet.workers.shared import pickled, portable

try:
    import ray
    from ray import cloudpickle
    from ray.exceptions import RayActorError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as error:
    raise MissingExtraError("ray", "ray", "running on a cluster") from error


@dataclass
class Cluster:
    """A connection to a Ray cluster: `with mf.connect("ray://head:10001"): …`."""

    address: str | None
    ours: bool
    """Whether it is ours to end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def devices(self) -> list[str]:
        """The names of the cluster's devices."""
        return [place.name for place in places(None)]

    def close(self) -> None:
        """Leave the cluster; `devices="auto"` means this machine again."""
        global _cluster
        if _cluster is self:
            _cluster = None
            if self.ours:
                ray.shutdown()


_cluster: Cluster | None = None


def connect(address: str | None = None) -> Cluster:
    """Join a Ray cluster: from now on `devices="auto"` means all of its devices.

    address: "ray://host:10001" for a cluster elsewhere, "auto" for the one that this machine is part of; None for
        the one that Ray finds (`RAY_ADDRESS`, or one that runs here), or a new one on this machine.
    """
    global _cluster
    ours = not ray.is_initialized()
    if ours:
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
        _cluster = Cluster(address, ours)
    return _cluster


def connected() -> bool:
    """Whether `connect` was called, and its connection is open."""
    return _cluster is not None


def places(wanted: Sequence[Device] | None) -> list["RayPlace"]:
    """The devices of the cluster: every GPU, and every node that has none. None: all of them."""
    if not ray.is_initialized():
        connect()
    found: list[RayPlace] = []
    for node in sorted(_nodes(), key=lambda node: str(node["NodeID"])):
        resources = node["Resources"]
        cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        where = node["NodeID"], node["NodeManagerAddress"]
        for _ in range(gpus):
            found.append(RayPlace(f"ray:{len(found)}", "cuda:0", *where, gpus=1, cpus=0))
        if not gpus and cpus:
            env = {"OMP_NUM_THREADS": str(cpus)}
            found.append(RayPlace(f"ray:{len(found)}", "cpu", *where, gpus=0, cpus=1, env=env))
    if not found:
        raise InputError("the Ray cluster has no devices: none of its nodes has a CPU or a GPU to give.")
    if wanted is None or wanted == (Device("ray"),):
        return found
    here = {place.name: place for place in found}
    for device in wanted:
        if str(device) not in here:
            raise InputError(
                f"device '{device}' is not here: the cluster has {', '.join(here)}. Name these, or say 'ray'."
            )
    return [here[str(device)] for device in wanted]


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


@dataclass(frozen=True)
class RayPlace:
    """A device of a cluster."""

    name: str
    device: str
    node: str
    host: str
    """The address of its node."""
    gpus: int
    cpus: int
    env: Mapping[str, str] = field(default_factory=dict)

    def hire(self, last: object = None) -> "RayWorker":
        """A new actor, on the device's node if that is there."""
        affinity = NodeAffinitySchedulingStrategy(self.node, soft=True)
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_restarts": 0}
        if any(node["NodeID"] == self.node for node in _nodes()):
            options["scheduling_strategy"] = affinity
        env = {**self.env, "MODELFLEET_DEVICE": self.name}
        backend = os.environ.get("KERAS_BACKEND")
        if backend:
            env["KERAS_BACKEND"] = backend
        actor: Any = _Host  # as decorated
        return RayWorker(actor.options(**options).remote(env))

    def release(self, worker: "RayWorker") -> None:
        """End it: the cluster's devices are others', too."""
        worker.close()

    def share(self, value: Any, what: str) -> "InStore":
        """The value in the object store, from where every node fetches it once."""
        return InStore(ray.put(_packed(value, what)))


@dataclass(frozen=True)
class InStore:
    """A value in Ray's object store."""

    ref: Any

    def get(self) -> Any:
        """The value, its arrays as views of the node's store."""
        return _unpacked(ray.get(self.ref))

    def close(self) -> None:
        """Nothing: the store lets go of it when nobody refers to it."""


class RayWorker:
    """One actor."""

    ahead = 1
    silent, frozen = 0.0, False  # Ray itself looks whether its nodes and actors are there

    def __init__(self, actor: Any) -> None:
        self.last: object = None
        self.busy = self.starting = False
        self.alive = True
        self._actor = actor
        self._coming: deque[Any] = deque()  # what will be its next messages
        self._answered = self._received = 0

    @property
    def taken(self) -> int:
        """How many answers it may have begun with: each as soon as the item before it was there."""
        if self._coming and self._received < self._answered and self.poll():
            return min(self._answered, self._received + 1)
        return min(self._answered, self._received)

    def start(self, task: Task, order: Any, what: str) -> None:
        """Have it begin a task."""
        parcel = _packed((task, order), what)
        self.busy = self.starting = True
        self._answered = self._received = 0
        self._coming.append(self._actor.start.remote(parcel))

    def answer(self, value: Any = None) -> None:
        """Let it go on after an item."""
        self._coming.append(self._actor.go.remote(_packed(value, "an answer")))
        self._answered += 1

    def interrupt(self) -> None:
        """Tell it that it is to stop soon."""
        self._actor.interrupt.remote()

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Whether it has something to say, or has died."""
        return bool(self._coming and ray.wait([self._coming[0]], timeout=seconds, fetch_local=True)[0])

    def receive(self) -> tuple[bool, Any]:
        """The next item, and whether there is one; blocks until then."""
        try:
            kind, parcel = ray.get(self._coming.popleft())
        except RayError as error:
            self.alive = False
            what = "its actor died" if isinstance(error, RayActorError) else "its answer was lost"
            raise WorkerDiedError(f"{what} on the Ray cluster: {_first_line(error)}") from error
        self.busy, self.starting = kind == ITEM, False
        self._received += 1
        value = _unpacked(parcel)
        if kind == ERROR:
            error, trace = value
            error.add_note(f"In an actor of Ray:\n{trace}")
            raise error
        return kind == ITEM, value

    def close(self) -> None:
        """End it."""
        self.alive = False
        if ray.is_initialized():
            ray.kill(self._actor)

    @classmethod
    def wait(cls, workers: Sequence[Self], seconds: float) -> list[Self]:
        """Those that have something to say, or have died; waits at most so long until there is one."""
        ready, _ = ray.wait([worker._coming[0] for worker in workers], num_returns=1, timeout=seconds)
        return [worker for worker in workers if worker._coming[0] in ready]


_remote: Any = ray.remote


@_remote(concurrency_groups={"control": 1})  # so that an interruption is heard while a step runs
class _Host:
    """What an actor is: it runs a task from one item to the next."""

    def __init__(self, env: Mapping[str, str]) -> None:
        os.environ.update(env)
        self._running: Generator[Any, Any, None] | None = None
        self._told_to_stop = False

    def start(self, parcel: Any) -> Any:
        """Begin a task; gives its first message."""
        self._told_to_stop = False
        listen(lambda: self._told_to_stop)

        def begin() -> Any:
            task, order = _unpacked(parcel)
            self._running = task(order)
            return next(self._running)

        return self._message(begin)

    def go(self, parcel: Any) -> Any:
        """Go on with the task; gives its next message."""
        assert self._running is not None
        running = self._running
        return self._message(lambda: running.send(_unpacked(parcel)))

    @ray.method(concurrency_group="control")
    def interrupt(self) -> None:
        """Note that the task is to stop soon."""
        self._told_to_stop = True

    def _message(self, step: Any) -> Any:
        try:
            return ITEM, _packed(step(), "a result")
        except StopIteration:
            self._running = None
            return END, _packed(None, "")
        except Exception as error:
            self._running = None
            return ERROR, _packed((portable(error), traceback.format_exc()), "an error")


class _Pickler(cloudpickle.CloudPickler):
    """Pickles with its code what others can't import; Ray's own, as no other knows what its references are."""

    def reducer_override(self, value: Any) -> Any:
        reduced = frameworks.reduced(value)
        return super().reducer_override(value) if reduced is NotImplemented else reduced


def _packed(value: Any, what: str) -> tuple[bytes, list[Any]]:
    pickle_, views = pickled(value, what, _Pickler)
    return pickle_, [np.frombuffer(view, dtype=np.uint8) for view in views]


def _unpacked(parcel: tuple[bytes, list[Any]]) -> Any:
    pickle_, buffers = parcel
    return pickle.loads(pickle_, buffers=buffers)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
