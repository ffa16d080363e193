"""What lanes are fed with, and for how long: from a user's data to a shift for every lane."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from modelfleet.each import Each, per_member
from modelfleet.errors import InputError
from modelfleet.feeds import Feed, LoaderFeed, SharedLoader, is_loader, make_feed
from modelfleet.feeds.checking import as_arrays, describe_difference, row_spec
from modelfleet.lanes import Lane
from modelfleet.members import Member
from modelfleet.planning.assembly import Part, Studied
from modelfleet.sharing.shifts import Shift
from modelfleet.trees import map_tree


@dataclass(frozen=True)
class Job:
    """What a fleet is to do, as `fit` was told. Every value may be one for all members, or `each`."""

    names: tuple[str, ...]
    data: Any
    validation: Any = None
    epochs: Any = 1
    batch_size: Any = None
    shuffle: bool = True
    share: Any = None
    steps_per_epoch: int | None = None
    class_weight: Any = None

    def only(self, names: Sequence[str]) -> "Job":
        """The job of some of the members."""
        kept: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Each):
                own = dict(zip(self.names, per_member(value, self.names, field.name), strict=True))
                kept[field.name] = Each({name: own[name] for name in names})
        return replace(self, names=tuple(names), **kept)

    def check(self) -> None:
        """Raise `InputError` for numbers that can't be."""
        for name, value in zip(self.names, per_member(self.epochs, self.names, "epochs"), strict=True):
            if not _whole(value, 0):
                raise InputError(f"epochs of member {name!r} is {value!r}; expected a whole number, 0 or more.")
        for name, value in zip(self.names, per_member(self.share, self.names, "share"), strict=True):
            if value is not None and not _whole(value, 1):
                raise InputError(
                    f"share of member {name!r} is {value!r}; expected a whole number of turns, 1 or more."
                )
        if self.steps_per_epoch is not None and not _whole(self.steps_per_epoch, 1):
            raise InputError(f"steps_per_epoch is {self.steps_per_epoch!r}; expected a whole number, 1 or more.")


def feeds(lanes: Sequence[Lane], job: Job, *, what: str = "data") -> list[tuple[Lane, Feed]]:
    """Every lane with its feed, of the job's `data` or `validation`.

    One loader for all is read once, whatever lanes and frameworks there are.
    """
    data = getattr(job, what)
    values = dict(zip(job.names, per_member(data, job.names, what), strict=True))
    size, shuffle = job.batch_size, job.shuffle
    if what == "validation":
        shuffle = False
        # A loader has batches of its own size, whatever that of the training data is.
        if is_loader(next(iter(values.values())), _arrays(lanes[0]), what):
            size = None
    found: list[tuple[Lane, Feed]] = []
    whole: dict[int, tuple[Feed, Iterator[int]]] = {}
    one: SharedLoader | None = None
    if not isinstance(data, Each) and is_loader(data, _arrays(lanes[0]), what):
        frameworks = [lane.members[0].framework for lane in lanes]
        changed = [_changed(framework, job, what) for framework in frameworks]
        knowing = [hasattr(framework, "as_loader") for framework in frameworks]  # loaders of its own
        data = one = SharedLoader(changed[knowing.index(True) if any(knowing) else 0](data), what)
    for lane in lanes:
        arrays = _arrays(lane)
        if one is None:
            found.append((lane, _feed([lane], data, values, size, shuffle, what, job)))
            continue
        if id(arrays) not in whole:
            like = [other for other in lanes if _arrays(other) is arrays]
            whole[id(arrays)] = _feed(like, data, values, size, shuffle, what, job), iter(range(len(job.names)))
        feed, places = whole[id(arrays)]
        own = feed.select([next(places) for _ in lane.members])
        if isinstance(own, LoaderFeed):
            own.device = lane.engine.device  # one reading for all; each lane has its batches on its own device
        found.append((lane, own))
    return found


def alike(lanes: Sequence[Lane], job: Job) -> list[list[Part]]:
    """The parts of every lane whose members' own arrays have rows of one form: those can be fed together."""
    arrays = {name: _arrays(lane) for lane in lanes for name in lane.names}
    forms: dict[str, list[Any]] = {name: [] for name in arrays}
    for what in ("data", "validation"):
        data = getattr(job, what)
        if not isinstance(data, Each):
            continue
        known: dict[tuple[int, int], Any] = {}
        for name, value in zip(job.names, per_member(data, job.names, what), strict=True):
            key = id(value), id(arrays[name])
            if key not in known:
                known[key] = _form(value, arrays[name], f"{what} of member {name!r}")
            forms[name].append(known[key])
    return [_cut(lane, forms) for lane in lanes]


def _cut(lane: Lane, forms: Mapping[str, list[Any]]) -> list[Part]:
    """A lane in parts, by the forms of its members' rows."""
    found: dict[Any, list[str]] = {}
    for name in lane.names:
        found.setdefault(tuple(forms[name]), []).append(name)
    if len(found) == 1:
        return [lane.part]
    (first, (like, *_)), *_ = found.items()
    parts = []
    for own, names in found.items():
        reason = lane.part.reason
        if own != first:
            what = next(describe_difference(a, b) for a, b in zip(own, first, strict=True) if a != b)
            reason = f"its rows are unlike those of {like!r}: {what}"
        parts.append(replace(lane.part, names=tuple(names), reason=reason, split=None))
    return parts


def _form(data: Any, arrays: Any, where: str) -> tuple[Any, ...]:
    """The form of the rows of arrays, as they will be fed; nothing for a loader, whose batches may be of many."""
    if data is None or is_loader(data, arrays, where):
        return ()
    tree, _ = as_arrays(data, arrays, where)
    return row_spec(map_tree(lambda leaf: arrays.place(leaf[:0], None), tree))


def _feed(
    lanes: Sequence[Lane], data: Any, values: dict[str, Any], size: Any, shuffle: bool, what: str, job: Job
) -> Feed:
    """One feed for all members of some lanes, in their order."""
    members = [member for lane in lanes for member in lane.members]
    names = [member.name for member in members]
    change = _changed(members[0].framework, job, what)
    if isinstance(data, Each):
        own: Any = Each([change(values[name]) for name in names])
    else:
        own = change(data)
    if isinstance(size, Each):
        sizes = dict(zip(job.names, per_member(size, job.names, "batch_size"), strict=True))
        size = Each([sizes[name] for name in names])
    return make_feed(
        own,
        names=names,
        seeds=[member.seed for member in members],
        batch_size=size,
        shuffle=shuffle,
        device=lanes[0].engine.device,
        arrays=_arrays(lanes[0]),
        epochs_done=np.concatenate([lane.epochs for lane in lanes]),
        what=what,
        steps_per_epoch=job.steps_per_epoch
        if what == "data" and getattr(members[0].framework, "GOES_ON", False)
        else None,
    )


def _changed(framework: Any, job: Job, what: str) -> Callable[[Any], Any]:
    """What is done to a data set before it is fed: class weights, and epochs of another length."""
    weigh = None
    if job.class_weight is not None and what == "data":
        weigh = getattr(framework, "weighted", None)
        if weigh is None:
            raise InputError(
                f"class_weight is for Keras models, and some members are of {framework.NAME}. "
                f"Give these a loss that weighs the classes."
            )
    arrays = framework.arrays
    as_loader = getattr(framework, "as_loader", None)
    known: dict[int, Any] = {}  # the same object for the same data: arrays are stored once

    def change(data: Any) -> Any:
        if isinstance(data, SharedLoader):
            return data
        if id(data) not in known:
            changed = data if as_loader is None else as_loader(data, again=what == "validation")
            if weigh is not None:
                changed = weigh(changed, job.class_weight, is_loader(changed, arrays, what))
            if job.steps_per_epoch is not None and what == "data" and is_loader(changed, arrays, what):
                changed = Stretch(changed, job.steps_per_epoch)
            known[id(data)] = changed
        return known[id(data)]

    return change


class Stretch:
    """A loader in epochs of so many steps: each goes on where the last one stopped; at its end it begins anew."""

    def __init__(self, loader: Any, steps: int) -> None:
        self._loader = loader
        self._steps = steps
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        taken = 0
        while taken < self._steps:
            if self._batches is None:
                called = callable(self._loader) and not hasattr(self._loader, "__iter__")
                self._batches = iter(self._loader() if called else self._loader)
                fresh = True
            else:
                fresh = False
            batch = next(self._batches, None)
            if batch is None:
                self._batches = None
                if fresh:
                    return
                continue
            yield batch
            taken += 1


def check(lane: Lane, feed: Feed, job: Job, *, what: str = "data") -> None:
    """Find all that can be wrong with data before the first step, and make room for the metrics."""
    data = getattr(job, what)
    first = feed.first()
    own = isinstance(data, Each)
    pairs = {
        id(value): (name, value)
        for name, value in zip(job.names, per_member(data, job.names, what), strict=True)
        if name in lane.places and isinstance(value, tuple) and len(value) == 2
    }
    if lane.engine.checks_targets and (pairs or isinstance(feed, LoaderFeed)):
        shape = lane.engine.output_shape(first, lane.names[0])
        for name, (_, target) in pairs.values():
            lane.engine.check_targets(shape, target, name if own else None)
        if isinstance(feed, LoaderFeed):
            feed.check = lane.engine.label_check(shape)
            first = feed.first()  # again, now checked
    lane.engine.check(first, lane.names[0])


def shifts(lanes: Sequence[tuple[Lane, Feed]], job: Job) -> list[Shift]:
    """Every lane at work on its part of the job; validation data are checked."""
    checked: dict[int, Feed] = {}
    if job.validation is not None:
        for lane, feed in feeds([lane for lane, _ in lanes], job, what="validation"):
            check(lane, feed, job, what="validation")
            checked[id(lane)] = feed
    epochs = dict(zip(job.names, per_member(job.epochs, job.names, "epochs"), strict=True))
    shares = dict(zip(job.names, per_member(job.share, job.names, "share"), strict=True))
    limit = job.steps_per_epoch
    found = []
    for lane, feed in lanes:
        own = np.array([epochs[name] for name in lane.names])
        per_epoch = feed.steps
        if per_epoch is not None and limit is not None:
            per_epoch = np.minimum(per_epoch, limit)
        schedules = lane.members[0].framework.Schedules(
            lane.schedules, lane.columns, lane.engine.task, per_epoch, own, names=lane.names
        )
        lane.engine.forgive()
        share = max(shares[name] or 1 for name in lane.names)
        found.append(Shift(lane, feed, checked.get(id(lane)), schedules, own, share, steps_per_epoch=limit))
    return found


def halved(studied: Studied, shift: Shift) -> list[Shift]:
    """Two shifts for the members of one that still train, as they stand; the second waits for the first to end."""
    lane = shift.lane
    tensors = lane.tensors()
    training = shift.training()
    middle = -(-len(training) // 2)
    found = []
    for wave, names in enumerate((training[:middle], training[middle:])):
        why = f"a lane of {len(training)} ran out of memory"
        part = replace(lane.part, names=tuple(names), reason=why, wave=lane.part.wave + wave)
        rows = np.array([lane.places[name] for name in names])
        slots = [int(np.flatnonzero(lane.slots == row)[0]) for row in rows]
        feed = shift.feed.select(slots)
        half = studied.assembly.lane(studied, part)
        half.engine.check(feed.first(), names[0])
        half.engine.load({name: array[rows] for name, array in tensors.items()})
        half.steps, half.epochs = lane.steps[rows], lane.epochs[rows]
        state = shift.schedules.state()
        schedules = half.members[0].framework.Schedules(
            half.schedules,
            half.columns,
            half.engine.task,
            None if shift.known_steps is None else shift.known_steps[rows],
            shift.epochs[rows],
            names=names,
        )
        schedules.restore([state[row] for row in rows] if isinstance(state, list) and state else state)
        made = replace(
            shift,
            lane=half,
            feed=feed,
            validation=shift.validation and shift.validation.select(slots),
            schedules=schedules,
            epochs=shift.epochs[rows],
        )
        made.started, made.taken = shift.started[rows], shift.taken[rows]
        made.epochs_before = shift.epochs_before[rows]
        found.append(made)
    return found


def made(studied: Studied, parts: Sequence[Part], job: Job) -> list[tuple[Lane, Feed]]:
    """The lanes of parts, fed, checked and ready to train."""
    fed = feeds([studied.assembly.lane(studied, part) for part in parts], job)
    for lane, feed in fed:
        check(lane, feed, job)
        lane.ready(feed.first(), "train")
    return fed


def read_by_loaders(lanes: Sequence[Lane], job: Job) -> bool:
    """Whether the data of anybody come from a loader."""
    values = dict(zip(job.names, per_member(job.data, job.names, "data"), strict=True))
    return any(is_loader(values[name], _arrays(lane), "data") for lane in lanes for name in lane.names)


def has_loaders(members: Sequence[Member], job: Job) -> bool:
    """Whether any data, for training or for validation, come from a loader."""
    found = {}
    for what in ("data", "validation"):
        for member, value in zip(members, per_member(getattr(job, what), job.names, what), strict=True):
            if value is not None and id(value) not in found:
                found[id(value)] = is_loader(value, member.framework.arrays, what)
    return any(found.values())


def side_by_side(lanes: Sequence[Lane], job: Job) -> bool:
    """Whether several lanes read one loader, and so must be fed in step."""
    return len(lanes) > 1 and any(
        data is not None and not isinstance(data, Each) and is_loader(data, _arrays(lanes[0]), what)
        for what, data in (("data", job.data), ("validation", job.validation))
    )


def _arrays(lane: Lane) -> Any:
    return lane.members[0].framework.arrays


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)
