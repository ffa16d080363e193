"""Learning-rate schedules: each member's hyperparameters at each of its steps.

A named schedule is a formula of the member's step, computed for all members at once. A factory makes a
scheduler of `torch.optim.lr_scheduler`, which runs for each member on a real optimizer over one dummy
parameter; what it changes there (the learning rate, momentum, betas) is read back.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler

from modelfleet.errors import InputError, unknown
from modelfleet.frameworks.torch.hyperparameters import flat_names
from modelfleet.frameworks.torch.optimizers import Optimizer
from modelfleet.words import without_period

Factory = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
Columns = dict[str, np.ndarray]

# The options of each named schedule, with their defaults.
_OPTIONS: Mapping[str, Mapping[str, float | None]] = {
    "constant": {},
    "linear": {"final": 0.0},
    "cosine": {"final": 0.0},
    "step": {"every": None, "factor": 0.1},
    "onecycle": {"pct_start": 0.3, "div_factor": 25.0, "final_div_factor": 1e4},
}
_EXPECTED: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "warmup": ("steps, or a fraction of all steps below 1", lambda value: value >= 0),
    "final": ("a fraction of the learning rate, 0 or more", lambda value: value >= 0),
    "every": ("a number of epochs, 1 or more", lambda value: value >= 1),
    "factor": ("a number, 0 or more", lambda value: value >= 0),
    "pct_start": ("a fraction between 0 and 1", lambda value: 0 < value < 1),
    "div_factor": ("a number above 0", lambda value: value > 0),
    "final_div_factor": ("a number above 0", lambda value: value > 0),
}


@dataclass(frozen=True, init=False)
class Schedule:
    """A named course of the learning rate, with a linear warm-up from 0.

    `warmup` is a number of steps, or below 1 a fraction of all steps; the rest of the steps is for:

    - `"constant"`;
    - `"linear"` and `"cosine"`: down to `final`, a fraction of the learning rate (0);
    - `"step"`: times `factor` (0.1) after every `every` epochs (a third of all), counted from the very start;
    - `"onecycle"`: torch's OneCycleLR with the learning rate as its peak, and its `pct_start`, `div_factor`
      and `final_div_factor`. Momentum stays as it is.

    For example `Schedule("cosine", warmup=0.05, final=0.1)`.
    """

    name: str
    warmup: float
    options: Mapping[str, float | None]

    def __init__(self, name: str, warmup: float = 0, **options: float | None) -> None:
        if name not in _OPTIONS:
            raise unknown("schedule", name, _OPTIONS)
        for option, value in {"warmup": warmup, **options}.items():
            if option != "warmup" and option not in _OPTIONS[name]:
                raise unknown(f"option of the schedule {name!r}", option, [*_OPTIONS[name], "warmup"])
            expected, fits = _EXPECTED[option]
            if value is not None and not (math.isfinite(value) and fits(value)):
                raise InputError(f"schedule {name!r}: {option} is {value!r}, expected {expected}.")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "warmup", warmup)
        object.__setattr__(self, "options", {**_OPTIONS[name], **options})

    @property
    def spans(self) -> bool:
        """Whether it goes by how many steps a fit or an epoch has."""
        return self.name != "constant" or 0 < self.warmup < 1


def resolve(schedule: object) -> Schedule | Factory:
    """The schedule that was asked for: None and names become a `Schedule`, a factory stays what it is."""
    if schedule is None:
        return Schedule("constant")
    if isinstance(schedule, str):
        return Schedule(schedule)
    if isinstance(schedule, Schedule) or callable(schedule):
        return schedule
    raise InputError(
        f"schedule is {schedule!r}, expected a name ({', '.join(_OPTIONS)}), a Schedule, or what makes a "
        f"scheduler of an optimizer, as functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)."
    )


class Schedules:
    """The hyperparameters of every member at every step.

    `schedule` is one for all or a list with one per member; `columns` are the hyperparameters `(member,)` as
    compiled; `steps_per_epoch` and `epochs` `(member,)` say how long each member trains. A schedule that spans the
    fit raises `InputError` if `steps_per_epoch` is None, for data of unknown length. What a factory made
    steps once per epoch, as torch loops do, except OneCycleLR and CyclicLR, which step per batch.
    """

    def __init__(
        self,
        schedule: object,
        columns: Columns,
        optimizer: Optimizer,
        steps_per_epoch: np.ndarray | None,
        epochs: np.ndarray,
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        members = len(columns["lr"])
        names = names or [str(row) for row in range(members)]
        own = [resolve(one) for one in (schedule if isinstance(schedule, list) else [schedule] * members)]
        named: dict[str, dict[int, Schedule]] = {}
        self._runs: dict[int, _Run] = {}
        for row, one in enumerate(own):
            if not isinstance(one, Schedule):
                hyper = {name: float(column[row]) for name, column in columns.items()}
                self._runs[row] = _Run(one, optimizer, hyper, names[row])
            elif (one.name, one.warmup) != ("constant", 0):
                if steps_per_epoch is None and one.spans:
                    raise InputError(
                        f"member {names[row]!r}: the schedule {one.name!r} goes by the number of steps, and the "
                        f"data do not say how many they have. Give fit steps_per_epoch, or a loader with a length."
                    )
                named.setdefault(one.name, {})[row] = one
        per_epoch = np.ones(members, dtype=np.int64) if steps_per_epoch is None else steps_per_epoch
        self._courses = [_Course(schedules, per_epoch, epochs) for schedules in named.values()]
        self._optimizer = optimizer
        self._names = names
        # `_columns`: what the factories make of them; named schedules scale its learning rates for each step.
        self._columns = self._current = columns
        self._read_back()

    @property
    def by_step(self) -> bool:
        """Whether the columns may change from one step to the next, not only from epoch to epoch."""
        return bool(self._courses) or any(run.per_batch for run in self._runs.values())

    def at(self, step: np.ndarray) -> Columns:
        """The hyperparameters for each member's step, counted from 0; the same object if none changed."""
        moved = [run.go_to(int(step[row])) for row, run in self._runs.items() if run.per_batch]
        if any(moved):
            self._read_back()
        if not self._courses:
            return self._columns
        lr = self._columns["lr"].copy()
        for course in self._courses:
            lr[course.rows] *= course.scale(step[course.rows])
        # Only `lr` can differ if the other columns are still the same objects.
        same = all(self._current[name] is column for name, column in self._columns.items() if name != "lr")
        if not (same and np.array_equal(lr, self._current["lr"])):
            self._current = {**self._columns, "lr": lr}
        return self._current

    def end_epoch(self, values: Sequence[Mapping[str, float]]) -> None:
        """Tell the schedulers that an epoch is over, with each member's metrics; none: it took no part."""
        waiting = [(row, run) for row, run in self._runs.items() if not run.per_batch and values[row]]
        for row, run in waiting:
            run.tell(run.needed(values[row]))
        if waiting:
            self._read_back()

    def state(self) -> list[list[float | None]]:
        """What a checkpoint must keep, as JSON can: what each member's scheduler was told at each epoch."""
        told: list[list[float | None]] = [[] for _ in self._names]
        for row, run in self._runs.items():
            told[row] = list(run.told)
        return told

    def restore(self, state: Sequence[Sequence[float | None]]) -> None:
        """Bring the schedulers to where `state` was taken, by telling new ones the same again."""
        for row, run in self._runs.items():
            run.start()
            for value in state[row]:
                run.tell(value)
        self._read_back()

    def _read_back(self) -> None:
        if not self._runs:
            return
        fresh = {name: column.copy() for name, column in self._columns.items()}
        for row, run in self._runs.items():
            for name, value in run.read():
                fresh[name][row] = value
                if value and name in self._optimizer.unused:
                    raise InputError(
                        f"member {self._names[row]!r}: the schedule sets {name} to {value}, but it is 0 for "
                        f"all members of this {self._optimizer.name}. Give compile a {name} to be changed."
                    )
        changed = {key: new for key, new in fresh.items() if not np.array_equal(new, self._columns[key])}
        if changed:
            self._columns = {**self._columns, **changed}


class _Course:
    """One kind of named schedule, for all the members that have it, each with its own options."""

    def __init__(self, schedules: Mapping[int, Schedule], steps_per_epoch: np.ndarray, epochs: np.ndarray) -> None:
        own = list(schedules.values())
        self.rows = np.array(list(schedules))
        self.name = own[0].name
        epochs, steps_per_epoch = epochs[self.rows], steps_per_epoch[self.rows]
        self.steps_per_epoch = np.maximum(steps_per_epoch, 1)
        total = steps_per_epoch * epochs
        warmup = np.array([schedule.warmup for schedule in own], dtype=np.float64)
        self.warmup = np.where(warmup < 1, np.rint(warmup * total), warmup)
        self.length = np.maximum(total - self.warmup, 1)
        self.options = {
            name: np.array([schedule.options[name] for schedule in own], dtype=np.float64)
            for name in _OPTIONS[self.name]
        }
        if self.name == "step":
            every = self.options["every"]
            self.options["every"] = np.where(np.isnan(every), np.maximum(np.ceil(epochs / 3), 1), every)

    def scale(self, step: np.ndarray) -> np.ndarray:
        """What to multiply the learning rates with at these steps, `(row,)`."""
        warm = np.minimum(step / np.maximum(self.warmup, 1), 1)
        return np.where(self.warmup > 0, warm, 1.0) * self._shape(step)

    def _shape(self, step: np.ndarray) -> np.ndarray | float:
        options = self.options
        after = np.maximum(step - self.warmup, 0)
        progress = np.minimum(after / self.length, 1)
        match self.name:
            case "linear":
                return 1 + (options["final"] - 1) * progress
            case "cosine":
                return _cosine(1.0, options["final"], progress)
            case "step":
                return options["factor"] ** (step // self.steps_per_epoch // options["every"])
            case "onecycle":
                low = 1 / options["div_factor"]
                top, end = options["pct_start"] * self.length - 1, self.length - 1
                rise = _cosine(low, 1.0, after / np.where(top > 0, top, np.inf))
                fall = _cosine(1.0, low / options["final_div_factor"], np.minimum((after - top) / (end - top), 1))
                return np.where(after <= top, rise, fall)
        return 1.0


def _cosine(start: np.ndarray | float, end: np.ndarray | float, progress: np.ndarray) -> np.ndarray:
    return end + (start - end) / 2 * (np.cos(np.pi * progress) + 1)


def of_task(
    schedules: Any,
    hyper: Any,
    task: Any,
    per_epoch: np.ndarray | None,
    epochs: np.ndarray,
    *,
    names: Sequence[str],
) -> Schedules:
    """The schedules of members that have a task."""
    return Schedules(schedules, hyper, task.optimizer, per_epoch, epochs, names=names)


class _Run:
    """A scheduler of torch at work for one member."""

    def __init__(self, factory: Factory, optimizer: Optimizer, hyper: Mapping[str, float], name: str) -> None:
        self.factory, self.rule, self.hyper, self.name = factory, optimizer, hyper, name
        self.start()
        self.per_batch = isinstance(self.scheduler, lr_scheduler.OneCycleLR | lr_scheduler.CyclicLR)

    def start(self) -> None:
        """Make a new scheduler, before its first step."""
        self.told: list[float | None] = []
        self.steps = 0
        settings: dict[str, Any] = dict(self.rule.flags)
        for name in self.rule.defaults:
            flats = [self.hyper[flat] for flat in flat_names(name)]
            settings[name] = tuple(flats) if len(flats) > 1 else flats[0]
        parameters = [torch.nn.Parameter(torch.zeros(1))]
        make = self.rule.torch_class or _Bare
        self.optimizer = make(parameters, **settings)
        try:
            self.scheduler = self.factory(self.optimizer)
        except (TypeError, ValueError, KeyError) as error:
            raise InputError(
                f"member {self.name!r}: no scheduler could be made by {self.factory!r}: {without_period(error)}. "
                f"Give its arguments with functools.partial, or a lambda of the optimizer."
            ) from error
        if not isinstance(self.scheduler, lr_scheduler.LRScheduler):
            raise InputError(
                f"member {self.name!r}: {self.factory!r} returned {self.scheduler!r}, expected a scheduler "
                f"of torch.optim.lr_scheduler."
            )
        self.optimizer.step()  # without a gradient it does nothing; schedulers warn if it was never called

    def needed(self, values: Mapping[str, float]) -> float | None:
        """What the scheduler wants to be told of an epoch's metrics: the loss, or nothing."""
        if not isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            return None
        loss = values.get("val_loss", values.get("loss"))
        if loss is None:
            raise InputError(f"member {self.name!r}: ReduceLROnPlateau needs a loss, got {sorted(values)}.")
        return float(loss)

    def tell(self, value: float | None) -> None:
        """Step the scheduler at the end of an epoch, and remember what it was told."""
        self._step(*([] if value is None else [value]))
        self.told.append(value)

    def go_to(self, step: int) -> bool:
        """Bring a scheduler that steps per batch to a step; whether that moved it."""
        moved = self.steps != step
        if step < self.steps:
            self.start()
        while self.steps < step:
            self._step()
        return moved

    def _step(self, *told: float) -> None:
        try:
            self.scheduler.step(*told)  # pyrefly: ignore[bad-argument-type]  # only ReduceLROnPlateau is told
        except ValueError as error:
            raise InputError(f"member {self.name!r}: its scheduler can't go on: {error}") from error
        self.steps += 1

    def read(self) -> list[tuple[str, float]]:
        """The hyperparameters as they now are, by column."""
        group = self.optimizer.param_groups[0]
        return [
            (flat, float(value))
            for name in self.rule.defaults
            for flat, value in zip(
                flat_names(name), group[name] if name == "betas" else (group[name],), strict=True
            )
        ]


class _Bare(torch.optim.Optimizer):
    """An optimizer that only holds hyperparameters, for the rules that torch has no class for."""

    def __init__(self, parameters: list[torch.nn.Parameter], **settings: Any) -> None:
        super().__init__(parameters, settings)

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""
