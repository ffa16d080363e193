"""Feeding: from a job's data to a checked feed for every lane."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from modelfleet.each import Each
from modelfleet.errors import InputError
from modelfleet.feeds import (
    ArrayOperations,
    Batch,
    Feed,
    LoaderFeed,
    SharedLoader,
    StoredArrays,
    is_loader,
    make_feed,
)
from modelfleet.feeds.checking import RowSpec, as_arrays, describe_difference, row_spec
from modelfleet.feeds.loader_state import ContinuedLoader
from modelfleet.frameworks.adapter_protocol import Adapter
from modelfleet.frameworks.batch_parts import has_target
from modelfleet.lanes import Groups, Lane, LaneSpec
from modelfleet.members import Member
from modelfleet.runs.job import Job
from modelfleet.trees import map_tree
from modelfleet.types import Data, NativeDevice

ENDLESS = -1  # tf.data.INFINITE_CARDINALITY

Field = Literal["data", "validation"]
"""Fields of a job that feeds are made from."""

Transform = Callable[[Data, int | None], Data]
"""Function of data and the steps of their epochs."""


@dataclass(frozen=True)
class _Made:
    """A feed, for the members at these positions."""

    positions: dict[str, int]
    device: NativeDevice
    feed: Feed


class Feeding:
    """Makes the feeds of one job.

    Data are checked once, and uploaded once to each device: if another lane's feed already has a lane's members,
    the lane gets a part of that feed, and feeds of other members share what is stored. A single loader for all
    members is read once, whatever lanes, frameworks and devices there are.

    Args:
        job: The arguments of the verb.
        groups: The members of the fleet.
        stored: What another `Feeding` of the verb has stored already.
    """

    def __init__(self, job: Job, groups: Groups, stored: StoredArrays | None = None) -> None:
        self.job = job
        self.stored = stored or StoredArrays()
        self._groups = groups
        self._made: dict[Field, list[_Made]] = {"data": [], "validation": []}
        self._from_loader: dict[tuple[Field, int], tuple[Feed, dict[str, int]]] = {}
        self._shared_loaders: dict[Field, SharedLoader | None] = {}
        self._transforms: dict[tuple[Field, int], Transform] = {}
        self._checked: set[tuple[int, tuple[int, ...] | None, int]] = set()

    # --- what the data are ---------------------------------------------------------------------------------------

    def _arrays(self, name: str) -> ArrayOperations:
        return self._groups.tasks[name].member.framework.arrays

    def uses_loaders(self, *fields: Field) -> bool:
        """Return True if any member's data come from a loader."""
        return has_loaders(self.job, {name: task.member for name, task in self._groups.tasks.items()}, *fields)

    @property
    def one_loader(self) -> bool:
        """Return True if all members read one loader. Their lanes must then be fed in step."""
        return any(self._is_one_loader(field) for field in ("data", "validation"))

    def _is_one_loader(self, field: Field) -> bool:
        data = getattr(self.job, field)
        if data is None or isinstance(data, Each):
            return False
        return is_loader(data, self._arrays(self.job.names[0]), field)

    def split_by_form(self, specs: Sequence[LaneSpec]) -> list[LaneSpec]:
        """Return the specs, split where the rows of the members' own arrays have different forms."""
        forms: dict[str, list[RowSpec]] = {name: [] for name in self.job.names}
        for field in ("data", "validation"):
            if not isinstance(getattr(self.job, field), Each):
                continue
            known: dict[tuple[int, int], RowSpec] = {}
            for name, value in self.job.by_name(field).items():
                arrays = self._arrays(name)
                key = id(value), id(arrays)
                if key not in known:
                    known[key] = _form(value, arrays, f"{field} of member {name!r}")
                forms[name].append(known[key])
        return [piece for spec in specs for piece in _split(spec, forms)]

    # --- feeds ---------------------------------------------------------------------------------------------------

    def feed(self, lane: Lane, field: Field = "data") -> Feed:
        """Return the feed of a lane for the job's data or validation data, not checked yet."""
        one = self._shared_loader(field)
        if one is not None:
            feed, positions = self._whole_feed(one, field, lane)
            own = feed.select([positions[name] for name in lane.names])
            if isinstance(own, LoaderFeed):
                own.device = lane.engine.device  # one reading for all, and batches on each lane's own device
            return own
        known = self.part(lane.names, lane.engine.device, field)
        if known is not None:
            return known
        feed = self._make(lane.names, lane.engine.device, field, getattr(self.job, field))
        positions = {name: position for position, name in enumerate(lane.names)}
        self._made[field].append(_Made(positions, lane.engine.device, feed))
        return feed

    def part(self, names: Sequence[str], device: NativeDevice, field: Field = "data") -> Feed | None:
        """Return a part of a feed that was made already. None if no feed has all of these members."""
        for made in self._made[field]:
            if made.device == device and all(name in made.positions for name in names):
                return made.feed.select([made.positions[name] for name in names])
        return None

    def _shared_loader(self, field: Field) -> SharedLoader | None:
        if field not in self._shared_loaders:
            one = None
            if self._is_one_loader(field):
                frameworks = [task.member.framework for task in self._groups.tasks.values()]
                # A framework that knows loaders of its own, such as tf.data, says what its epochs are.
                owner = next((f for f in frameworks if hasattr(f, "as_loader")), frameworks[0])
                limits = self.job.step_limits(self.job.names)  # members with shorter epochs skip the rest
                longest = None if limits is None else int(limits.max())
                one = SharedLoader(self._transform(owner, field)(getattr(self.job, field), longest), field)
            self._shared_loaders[field] = one
        return self._shared_loaders[field]

    def _whole_feed(self, loader: SharedLoader, field: Field, lane: Lane) -> tuple[Feed, dict[str, int]]:
        """Return one feed for all members whose framework has the same arrays, and their positions in it."""
        arrays = self._arrays(lane.names[0])
        key = field, id(arrays)
        if key not in self._from_loader:
            names = [name for name in self.job.names if self._arrays(name) is arrays]
            feed = self._make(names, lane.engine.device, field, loader)
            self._from_loader[key] = feed, {name: position for position, name in enumerate(names)}
        return self._from_loader[key]

    def _make(self, names: Sequence[str], device: NativeDevice, field: Field, data: Data) -> Feed:
        job = self.job
        members = [self._groups.tasks[name].member for name in names]
        framework = members[0].framework
        transform = self._transform(framework, field)
        batch_size = job.batch_size
        if isinstance(batch_size, Each):
            sizes = job.by_name("batch_size")
            batch_size = Each([sizes[name] for name in names])
        one, own_limits = data, job.step_limits(names)
        limits = [None] * len(names) if own_limits is None else own_limits.tolist()
        if isinstance(data, Each):
            values = job.by_name(field)
            one = values[names[0]]
            data = Each([transform(values[name], limit) for name, limit in zip(names, limits, strict=True)])
        else:
            data = transform(data, limits[0])
        if field == "validation" and is_loader(one, framework.arrays, field):
            batch_size = None  # a loader has batches of its own size, whatever the size of the training batches
        continues = field == "data" and getattr(framework, "GOES_ON", False)
        return make_feed(
            data,
            names=names,
            seeds=[member.seed for member in members],
            batch_size=batch_size,
            shuffle=job.shuffle and field == "data",
            device=device,
            arrays=framework.arrays,
            epochs_done=np.array([self._groups.epochs.get(name, 0) for name in names], dtype=np.int64),
            what=field,
            steps_per_epoch=own_limits if continues else None,
            stored=self.stored,
        )

    def _transform(self, framework: Adapter, field: Field) -> Transform:
        """Return a function that applies class weights and the length of an epoch to a data set."""
        key = field, id(framework)
        if key not in self._transforms:
            self._transforms[key] = _transform(framework, self.job, field)
        return self._transforms[key]

    # --- checks --------------------------------------------------------------------------------------------------

    def check(self, lane: Lane, feed: Feed, field: Field = "data") -> None:
        """Check the data before the first step, and make room for the metrics.

        Raises:
            InputError: The model, its loss or its metrics can't take the data.
        """
        first = feed.first()
        positions = lane.positions
        pairs = {
            id(value): (name, value)
            for name, value in self.job.by_name(field).items()
            if name in positions and has_target(value)
        }
        engine = lane.engine
        if engine.checks_targets and (pairs or isinstance(feed, LoaderFeed)):
            shape = engine.output_shape(_without_weights(first), lane.names[0])
            check_batch = engine.label_check(shape)
            own = isinstance(getattr(self.job, field), Each)
            for key, (name, value) in pairs.items():
                done = key, shape, id(engine.task)
                if done not in self._checked:
                    engine.check_targets(shape, value[1], name if own else None)
                    if check_batch is not None and len(value) == 3:
                        with _naming(name if own else None):
                            check_batch(value)
                    self._checked.add(done)
            if isinstance(feed, LoaderFeed) and check_batch is not None:
                feed.check_batches((shape, id(engine.task)), check_batch)
                first = feed.first()  # again, now that it is checked
        engine.check(first, lane.names[0])


def _without_weights(batch: Batch) -> Batch:
    """Return the (x, y) of a batch (x, y, sample_weight), and any other batch as it is."""
    return replace(batch, data=batch.data[:2]) if has_target(batch.data) else batch


@contextmanager
def _naming(member: str | None) -> Iterator[None]:
    """Add the name of a member to an InputError."""
    try:
        yield
    except InputError as error:
        raise error if member is None else InputError(f"member {member!r}: {error}") from None


def has_loaders(job: Job, members: Mapping[str, Member], *fields: Field) -> bool:
    """Return True if any member's data come from a loader."""
    known: dict[int, bool] = {}
    for field in fields:
        for name, value in job.by_name(field).items():
            if value is not None and id(value) not in known:
                known[id(value)] = is_loader(value, members[name].framework.arrays, field)
    return any(known.values())


def _form(data: Data, arrays: ArrayOperations, where: str) -> RowSpec:
    """Return the form of the rows of arrays. A loader's batches may have any, so it has none."""
    if data is None or is_loader(data, arrays, where):
        return ()
    tree, _ = as_arrays(data, arrays, where)
    return row_spec(map_tree(lambda leaf: arrays.place(leaf[:0], None), tree))


def _split(lane: LaneSpec, forms: dict[str, list[RowSpec]]) -> list[LaneSpec]:
    by_form: dict[tuple[RowSpec, ...], list[str]] = {}
    for name in lane.members:
        by_form.setdefault(tuple(forms[name]), []).append(name)
    if len(by_form) == 1:
        return [lane]
    (first, (like, *_)), *_ = by_form.items()
    pieces = []
    for own, names in by_form.items():
        reason = lane.apart_because
        if own != first:
            what = next(describe_difference(a, b) for a, b in zip(own, first, strict=True) if a != b)
            reason = f"its rows differ from those of {like!r}: {what}"
        pieces.append(replace(lane, members=tuple(names), apart_because=reason, split=None))
    return pieces


def _transform(framework: Adapter, job: Job, field: Field) -> Transform:
    weigh = None
    if job.class_weight is not None and field == "data":
        weigh = getattr(framework, "weighted", None)
        if weigh is None:
            raise InputError(
                f"class_weight is for Keras models, and some members are {framework.NAME} models. "
                f"Give these a loss that weighs the classes."
            )
    arrays = framework.arrays
    as_loader = getattr(framework, "as_loader", None)
    known: dict[tuple[int, int | None], Data] = {}  # the same object for the same data: arrays are stored once

    def transform(data: Data, steps: int | None) -> Data:
        if isinstance(data, SharedLoader):
            return data
        key = id(data), steps
        if key not in known:
            if field == "validation" or steps is None:
                _refuse_endless(data, field)
            changed = data if as_loader is None else as_loader(data, again=field == "validation")
            if weigh is not None:
                changed = weigh(changed, job.class_weight, is_loader(changed, arrays, field))
            if steps is not None and field == "data" and is_loader(changed, arrays, field):
                changed = ContinuedLoader(changed, steps)
            known[key] = changed
        return known[key]

    return transform


def _refuse_endless(data: Data, field: Field) -> None:
    """Raise InputError for a `tf.data.Dataset` that never ends, such as one that was repeated."""
    cardinality = getattr(data, "cardinality", None)
    if callable(cardinality) and int(cardinality()) == ENDLESS:
        instead = "Give steps_per_epoch" if field == "data" else "Use dataset.take(steps)"
        raise InputError(
            f"{field} is a data set that never ends, so no epoch would. {instead}, or leave out repeat()."
        )
