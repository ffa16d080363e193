"""Messages between a fit and its workers.

The owner sends a `LaneOrder`. The worker answers with a `WorkerUpdate` at the end of every epoch, or after every
step if steps are watched, and waits for an `OwnerReply` before it continues.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from modelfleet.devices import Device, parse_devices
from modelfleet.each import Each
from modelfleet.frameworks.contexts import current_settings
from modelfleet.frameworks.global_generators import State as GeneratorState
from modelfleet.lanes import LaneSpec
from modelfleet.recipe import Recipe
from modelfleet.runs.job import Job
from modelfleet.runs.lane_run import EpochReport, LaneRun, Progress
from modelfleet.types import Data, Json, Model, State
from modelfleet.workers import SharedValue
from modelfleet.workers.rendezvous import Rendezvous


@dataclass(frozen=True)
class LaneOrder:
    """Everything that a worker needs to take the steps of some lanes."""

    fleet: str
    """Identifies the fleet. A worker keeps the programs of its last fleet."""
    members: list[tuple[str, Model, int, str]]
    """Name, model, seed and framework of each member."""
    recipes: dict[str, Recipe | None]
    devices: tuple[Device, ...] | None
    """Device of the worker. None if the worker chooses."""
    lanes: list[LaneSpec]
    job: Job
    states: list[State]
    """State of every lane, on the host."""
    progress: list[Progress]
    generators: GeneratorState
    """State of the random generators at the start of the current epoch."""
    data: SharedValue | None = None
    """Data and validation data of the job, if they are the same for all members."""
    together: bool = False
    watched: bool = False
    ranks: tuple[str | Rendezvous, int, int] | None = None
    """For members that train on several devices at once: where the ranks meet, this rank, and their number."""
    settings: Mapping[str, Json] = field(default_factory=dict)
    """Settings of the owner's frameworks that change the numbers, such as a default dtype."""

    def on(self, device: str) -> "LaneOrder":
        """Return the same order for a worker on a device."""
        return replace(self, devices=parse_devices(device))


@dataclass(frozen=True)
class LaneUpdate:
    """State and progress of one lane, by its number in the order, and the report of an epoch that has ended."""

    number: int
    state: State
    progress: Progress
    report: EpochReport | None
    losses: dict[str, list[float]]
    """Losses of single steps since the last update, by member, if they are recorded."""


@dataclass(frozen=True)
class WorkerUpdate:
    """Report of a worker: a turn, the end of an epoch, or that it has stopped.

    The first update of a worker is empty, and says that it has started. The second is empty too, and says that the
    worker is ready to take steps.
    """

    lanes: list[LaneUpdate] = field(default_factory=list)
    generators: GeneratorState = field(default_factory=dict)
    """State of the random generators."""


@dataclass(frozen=True)
class OwnerReply:
    """Reply to an update, by the number of a lane."""

    stopped: dict[int, list[str]] = field(default_factory=dict)
    """Members to stop."""
    changed: dict[int, State] = field(default_factory=dict)
    """State of lanes that the owner has changed."""
    factors: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """Factors of the hyperparameters of these lanes."""
    end: bool = False
    """True if the worker should give up its lanes, because another will continue them."""


@dataclass(frozen=True)
class OrderWriter:
    """Writes the orders of a fit."""

    fleet: str
    recipes: Mapping[str, Recipe | None]
    devices: tuple[Device, ...] | None
    job: Job
    generators: GeneratorState

    @property
    def data(self) -> tuple[Data, Data] | None:
        """Return the data and validation data if they are the same for all members."""
        data, validation = self.job.data, self.job.validation
        return None if isinstance(data, Each) or isinstance(validation, Each) else (data, validation)

    def order(
        self, runs: Sequence[LaneRun], device: str | None = None, data: SharedValue | None = None
    ) -> LaneOrder:
        """Return the order for some lanes in their current state. Without a device the worker chooses one."""
        members = [member for run in runs for member in run.lane.members]
        names = [member.name for member in members]
        job = self.job.only(names)
        return LaneOrder(
            fleet=self.fleet,
            members=[(m.name, m.model, m.seed, m.framework.NAME) for m in members],
            recipes={name: self.recipes[name] for name in names},
            devices=self.devices if device is None else parse_devices(device),
            lanes=[replace(run.lane.spec, fused=run.lane.engine.fused, device=None) for run in runs],
            job=job if data is None else replace(job, data=None, validation=None),
            states=[run.host_state() for run in runs],
            progress=[run.progress() for run in runs],
            generators=runs[0].generators or self.generators,
            data=data,
            settings=current_settings(None),
        )
