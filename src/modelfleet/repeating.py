"""Verbs that are repeated: evaluate and predict on data of a form that they have had before.

The first call goes through lanes: it groups, checks, traces and explains. After it, two quicker ways are known.
One is a loop over the models themselves. The other is the program of a fused lane, if its state is still that of
the models. The first calls take turns and are timed; from then on, the quicker way is taken. Whatever is unusual
goes through the lanes again.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import numpy as np

from modelfleet.each import Each
from modelfleet.feeds import DEFAULT_BATCH_SIZE, Batch
from modelfleet.frameworks.contexts import computing, without_callers_contexts
from modelfleet.frameworks.target_checks import IGNORED
from modelfleet.gate import Gate
from modelfleet.lanes import Groups, Lane
from modelfleet.live_lanes import LiveLanes
from modelfleet.members import Member
from modelfleet.runs.opening import OpenLane
from modelfleet.types import Data, Kind

Way = Literal["loop", "fused"]
Answers = dict[str, Any]
TIMED_CALLS = 4  # of each way, before the quicker one is chosen
RECENT_CALLS = 8  # whose times are kept
LOOK_AGAIN = 128  # calls after which the slower way is timed again, if it is not much slower
MUCH_SLOWER = 3.0
MAX_PAUSE = 256  # calls
MAX_REFUSALS = 2  # of a form of data, until it is left to the lanes for good
MAX_KNOWN = 64  # forms of data
MAX_FUSED_ROWS = 1 << 16  # rows times members that a fused lane takes at once
MAX_CHUNK_BYTES = 1 << 22  # of inputs that go through a model at once, if its rows are independent
SHORT_SECONDS = 0.002  # calls that are too short to prepare the process for


@dataclass
class _Known:
    """What is known about a verb on data of one form."""

    groups: Groups
    direct: Any
    """The adapter's `DirectModels`."""
    loop: Callable[..., list[Any] | None]
    """The method of it."""
    lane: Lane | None
    """The only lane, if it is fused."""
    output_shape: tuple[int, ...] | None
    """Shape of a member's output, to check targets against."""
    whole: bool
    """True if batches are larger than the default, because the rows are independent."""
    rereads: int = 0
    """How often in a row the lane's state was not that of the models."""
    pause: int = 0
    """Calls for which the lane is not asked, because the models change again and again."""
    seconds: dict[Way, float] = field(default_factory=dict)
    recent: dict[Way, deque[float]] = field(default_factory=dict)
    calls: dict[Way, int] = field(default_factory=dict)

    def fused(self, lane: Lane, kind: Kind, data: Data) -> list[Any] | None:
        """Return the answers of a fused lane; None if it has none of the usual form."""
        engine, width = lane.engine, len(lane.members)
        arrays: ModuleType = lane.members[0].framework.arrays
        parts: Sequence[Data] = data if kind == "evaluate" else (data,)
        rows = len(parts[0])
        placed = tuple(arrays.place(part, engine.device, copy=True) for part in parts)
        engine.look_again()
        try:
            with without_callers_contexts():
                if kind == "predict":
                    outputs = engine.predict(Batch(placed[0], True, np.full(width, rows)))
                    usual = isinstance(outputs, np.ndarray) and outputs.ndim > 1 and outputs.shape[1] == rows
                    return list(outputs) if usual else None
                if engine.checks_targets:
                    engine.check_targets(self.output_shape, parts[1], None)
                if self.whole and parts[1].dtype.kind == "i" and (parts[1] == IGNORED).any():
                    return None  # the mean over a batch depends on what else is in it
                values = engine.values(engine.evaluate(None, Batch(placed, True, np.full(width, rows))))
        except Exception:  # the lanes say what is wrong, in the user's terms
            return None
        columns = [column.tolist() for column in values.values()]
        return [dict(zip(values, row, strict=True)) for row in zip(*columns, strict=True)]

    @property
    def short(self) -> bool:
        """Return True if the loop is so short that nothing has to be prepared for it."""
        return self.seconds.get("loop", 1.0) < SHORT_SECONDS

    def choose(self) -> Way:
        """Return the way for the next call."""
        ways: tuple[Way, ...] = ("fused", "loop")
        for way in ways:
            if self.calls.get(way, 0) < TIMED_CALLS:
                return way
        best = min(ways, key=self.seconds.__getitem__)
        other = max(ways, key=self.seconds.__getitem__)
        again = sum(self.calls.values()) % LOOK_AGAIN == 0
        return other if again and self.seconds[other] < MUCH_SLOWER * self.seconds[best] else best

    def record(self, way: Way, seconds: float) -> None:
        """Record how long a call took."""
        self.calls[way] = self.calls.get(way, 0) + 1
        if self.calls[way] == 1:
            return  # it tried the models, too
        # The quickest of the last few calls: other processes may have slowed down some of them.
        recent = self.recent.setdefault(way, deque(maxlen=RECENT_CALLS))
        recent.append(seconds)
        self.seconds[way] = min(recent)


class _ReadAgain(Exception):  # noqa: N818  no error
    """Raised if the lanes have to read the models' weights."""


class Repeating:
    """Answers the verbs of one fleet that are repeated.

    Args:
        lanes: The lanes of the fleet.
        members: The members of the fleet, by name.
        exposed: Members whose models the user may hold, and change.
        gate: Knows whether another verb is running.
    """

    def __init__(
        self, lanes: LiveLanes, members: Mapping[str, Member], exposed: Collection[str], gate: Gate
    ) -> None:
        self._lanes, self._members, self._exposed, self._gate = lanes, members, exposed, gate
        self._known: dict[Hashable, _Known] = {}
        self._refused: dict[Hashable, int] = {}

    def answer(self, kind: Kind, data: Data, batch_size: int | Each | None) -> Answers | None:
        """Return the answers of all members; None if the lanes have to find them."""
        key = _key(kind, data, batch_size)
        known = None if key is None else self._known.get(key)
        if known is None or known.groups is not self._lanes.current_groups:
            return None
        self._gate.enter(kind)
        try:
            if self._gate.nested:
                return None
            answers = self._run(known, kind, data)
        except _ReadAgain:
            return None
        finally:
            self._gate.leave()
        if answers is None or not known.direct.usable:
            self._known.pop(key, None)
            if not known.direct.usable:
                self._refused[key] = self._refused.get(key, 0) + 1
        return None if answers is None else dict(zip(self._members, answers, strict=True))

    def _run(self, known: _Known, kind: Kind, data: Data) -> list[Any] | None:
        models = [member.model for member in self._members.values()]
        if not known.direct.unchanged(models):
            return None
        lane = known.lane
        if lane is None or self._lanes.lanes != [lane]:
            if known.short:
                return known.loop(models, data)
            return self._timed(known, "loop", lambda: known.loop(models, data))
        if known.pause or known.choose() == "loop":
            known.pause = max(0, known.pause - 1)
            return self._timed(known, "loop", lambda: known.loop(models, data))
        if self._lanes.hold_weights_of(self._exposed, same_structure=True):
            known.rereads = 0
            return self._timed(known, "fused", lambda: self._in_order(lane, known.fused(lane, kind, data)))
        # The lanes read the models again. If that was for nothing, wait longer and longer before the next time.
        known.rereads += 1
        known.pause = min(MAX_PAUSE, 4**known.rereads) if known.rereads > 1 else 0
        raise _ReadAgain

    def _in_order(self, lane: Lane, answers: list[Any] | None) -> list[Any] | None:
        """Return a lane's answers in the order of the fleet. In a lane, like members are side by side."""
        return None if answers is None else [answers[lane.positions[name]] for name in self._members]

    def _timed(self, known: _Known, way: Way, run: Callable[[], list[Any] | None]) -> list[Any] | None:
        begun = time.perf_counter()
        if way == "loop" and known.short:
            answers = run()
        else:
            with computing():
                answers = run()
        known.record(way, time.perf_counter() - begun)
        return answers

    def learn(self, kind: Kind, data: Data, batch_size: int | Each | None, opened: Sequence[OpenLane]) -> None:
        """Remember how such a call can be answered, after the lanes have answered it."""
        key = _key(kind, data, batch_size)
        if (
            key is None
            or not _is_plain(kind, data)
            or self._gate.nested
            or self._refused.get(key, 0) >= MAX_REFUSALS
        ):
            return
        members, groups = list(self._members.values()), self._lanes.current_groups
        known = self._known.get(key)
        if (
            known is not None
            and known.groups is groups
            and (known.lane is None or [known.lane] == self._lanes.lanes)
        ):
            return  # the lanes have only read the models' weights again
        frameworks = {member.framework for member in members}
        make: Any = getattr(next(iter(frameworks)), "DirectModels", None)
        lanes = [one.lane for one in opened]
        if groups is None or len(frameworks) > 1 or make is None or any(lane.device != "cpu" for lane in lanes):
            return
        if any(lane.engine.changed for lane in lanes):
            return
        x, rows = _inputs(kind, data), len(_inputs(kind, data))
        size = DEFAULT_BATCH_SIZE if batch_size is None else int(batch_size)  # pyrefly: ignore
        # Larger batches than the default may be used only where that makes no difference.
        whole = rows > size and batch_size is None and all(_independent(one) for one in opened)
        if whole:
            size = max(size, MAX_CHUNK_BYTES * rows // max(1, x.nbytes))
        tasks = [groups.tasks[member.name].task for member in members]
        direct = make([member.model for member in members], tasks, kind, size, whole)
        if not direct.usable:
            self._refused[key] = MAX_REFUSALS
            return
        fused = len(lanes) == 1 and lanes[0].engine.fused and rows <= min(size, MAX_FUSED_ROWS // len(members))
        if len(self._known) >= MAX_KNOWN:
            self._known.pop(next(iter(self._known)))
        shape = None
        if kind == "evaluate" and fused:
            shape = lanes[0].engine.output_shape(opened[0].feed.first(), lanes[0].names[0])
        self._known[key] = _Known(groups, direct, getattr(direct, kind), lanes[0] if fused else None, shape, whole)


def _independent(one: OpenLane) -> bool:
    first = one.feed.first()
    return one.lane.engine.rows_are_independent(one.lane.engine.inputs(first.member(0)))


def _inputs(kind: Kind, data: Data) -> Data:
    return data if kind == "predict" else data[0]


def _key(kind: Kind, data: Data, batch_size: object) -> Hashable | None:
    """Return what decides how a call is answered; None for arguments that only lanes take."""
    if batch_size is not None and type(batch_size) is not int:
        return None
    if kind == "predict":
        return (kind, batch_size, data.shape, data.dtype) if type(data) is np.ndarray else None
    if type(data) is not tuple or len(data) != 2:
        return None
    x, y = data
    if type(x) is not np.ndarray or type(y) is not np.ndarray:
        return None
    return kind, batch_size, x.shape, x.dtype, y.shape, y.dtype


def _is_plain(kind: Kind, data: Data) -> bool:
    """Return True for arrays of numbers, with as many rows each, and one at least."""
    arrays = data if kind == "evaluate" else (data,)
    numbers = all(array.ndim and array.dtype.kind in "fiub" for array in arrays)
    return numbers and len({len(array) for array in arrays}) == 1 and len(arrays[0]) > 0
