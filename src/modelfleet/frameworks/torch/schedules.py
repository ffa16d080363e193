"""Learning-rate schedules: each member's hyperparameters at each of its steps.

A named schedule is a formula of the member's step, computed for all members at once. A factory makes a scheduler
of `torch.optim.lr_scheduler`, which runs for each member on a real optimizer with one dummy parameter. What it
changes there (the learning rate, momentum, betas) is read back.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler

from modelfleet.errors import InputError
from modelfleet.formatting import without_period
from modelfleet.frameworks.torch.optimizers.hyperparameters import flat_names
from modelfleet.frameworks.torch.optimizers.stacked import Optimizer
from modelfleet.frameworks.torch.task import Task
from modelfleet.types import ScheduleLike
from modelfleet.unknown_names import unknown

Factory = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
Columns = dict[str, np.ndarray]
STEPS_KEPT = 128  # of a scheduler, whose numbers are known without stepping it again from its start

# Options of each named schedule, with their defaults.
_OPTIONS: Mapping[str, Mapping[str, float | None]] = {
    "constant": {},
    "linear": {"final": 0.0},
    "cosine": {"final": 0.0},
    "step": {"every": None, "factor": 0.1},
    "onecycle": {"pct_start": 0.3, "div_factor": 25.0, "final_div_factor": 1e4},
}
_RANGES: Mapping[str, tuple[str, Callable[[float], bool]]] = {
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
    """Named schedule of the learning rate, with a linear warm-up from 0.

    Args:
        name: What follows the warm-up:

            - `"constant"`;
            - `"linear"` and `"cosine"`: down to `final`, a fraction of the learning rate (0);
            - `"step"`: times `factor` (0.1) after every `every` epochs (a third of all), counted from the start;
            - `"onecycle"`: torch's OneCycleLR with the learning rate as its peak, and its `pct_start`,
              `div_factor` and `final_div_factor`. Momentum does not change.
        warmup: Number of steps, or a fraction of all steps if below 1.
        **options: Options of the named schedule.

    Raises:
        InputError: The name or an option is unknown, or an option's value is out of range.

    Example:
        ```python
        fleet.compile("adamw", "cross_entropy", schedule=mf.Schedule("cosine", warmup=0.05, final=0.1))
        ```
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
            expected, fits = _RANGES[option]
            if value is not None and not (math.isfinite(value) and fits(value)):
                raise InputError(f"schedule {name!r}: {option} is {value!r}, expected {expected}.")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "warmup", warmup)
        object.__setattr__(self, "options", {**_OPTIONS[name], **options})

    @property
    def arguments(self) -> dict[str, float | str | None]:
        """Return the arguments that make an equal schedule."""
        return {"name": self.name, "warmup": self.warmup, **self.options}

    @property
    def spans(self) -> bool:
        """Return True if the schedule depends on the number of steps of a fit or an epoch."""
        return self.name != "constant" or 0 < self.warmup < 1


def resolve(schedule: ScheduleLike) -> Schedule | Factory:
    """Return the `Schedule` of None or a name, and a `Schedule` or a factory as it is.

    Raises:
        InputError: The schedule is none of these, or its name is unknown.
    """
    if schedule is None:
        return Schedule("constant")
    if isinstance(schedule, str):
        return Schedule(schedule)
    if isinstance(schedule, Schedule) or callable(schedule):
        return schedule
    raise InputError(
        f"schedule is {schedule!r}, expected a name ({', '.join(_OPTIONS)}), a Schedule, or a function that "
        f"makes a scheduler for an optimizer, such as "
        f"functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)."
    )


class Schedules:
    """Hyperparameters of every member at every step (see `adapter_protocol.Adapter.Schedules`).

    Schedulers of a factory step once per epoch, as in torch loops, except OneCycleLR and CyclicLR, which step per
    batch.

    Args:
        schedules: One schedule per member.
        columns: Hyperparameters `(member,)` as compiled.
        tasks: One task per member.
        steps_per_epoch: Steps per epoch `(member,)`; None for data of unknown length.
        epochs: Number of epochs `(member,)`.
        names: Names of the members, for errors.
        initial_epoch: Epochs of the schedules that are done already. A scheduler that needs losses, as
            ReduceLROnPlateau does, has none of them, and begins.

    Raises:
        InputError: A schedule depends on the number of steps, and `steps_per_epoch` is None.
    """

    def __init__(
        self,
        schedules: Sequence[ScheduleLike],
        columns: Columns,
        tasks: Sequence[Task],
        steps_per_epoch: np.ndarray | None,
        epochs: np.ndarray,
        *,
        names: Sequence[str],
        initial_epoch: int = 0,
    ) -> None:
        epochs = epochs + initial_epoch
        self._steps_before = 0 if steps_per_epoch is None else initial_epoch * steps_per_epoch
        named: dict[str, dict[int, Schedule]] = {}
        self._schedulers: dict[int, _Scheduler] = {}  # by position
        for position, one in enumerate(map(resolve, schedules)):
            if not isinstance(one, Schedule):
                hyper = {name: float(column[position]) for name, column in columns.items()}
                self._schedulers[position] = made = _Scheduler(
                    one, tasks[position].optimizer, hyper, names[position]
                )
                for _ in range(0 if made.per_batch or made.takes_loss else initial_epoch):
                    made.end_epoch(None)
            elif (one.name, one.warmup) != ("constant", 0):
                if steps_per_epoch is None and one.spans:
                    raise InputError(
                        f"member {names[position]!r}: the schedule {one.name!r} depends on the number of steps, "
                        f"and the length of the data is not known. Give fit steps_per_epoch, or a "
                        f"loader with a length."
                    )
                named.setdefault(one.name, {})[position] = one
        per_epoch = np.ones(len(names), dtype=np.int64) if steps_per_epoch is None else steps_per_epoch
        self._formulas = [_Formula(own, per_epoch, epochs) for own in named.values()]
        self._names = names
        # `_columns` has the values of the schedulers. Named schedules scale its learning rates at each step.
        self._columns = self._current = columns
        self._read_back()

    @property
    def by_step(self) -> bool:
        """Return True if the columns may change from one step to the next, not only from epoch to epoch."""
        return bool(self._formulas) or any(one.per_batch for one in self._schedulers.values())

    def at(self, step: np.ndarray) -> Columns:
        """Return the hyperparameters at each member's step, counted from 0; the same object if none changed."""
        step = step + self._steps_before
        moved = [one.go_to(int(step[position])) for position, one in self._schedulers.items() if one.per_batch]
        if any(moved):
            self._read_back()
        if not self._formulas:
            return self._columns
        lr = self._columns["lr"].copy()
        for formula in self._formulas:
            lr[formula.positions] *= formula.scale(step[formula.positions])
        # Only `lr` can differ if the other columns are still the same objects.
        same = all(self._current[name] is column for name, column in self._columns.items() if name != "lr")
        if not (same and np.array_equal(lr, self._current["lr"])):
            self._current = {**self._columns, "lr": lr}
        return self._current

    def end_epoch(self, values: Sequence[Mapping[str, float]]) -> None:
        """Step the schedulers at the end of an epoch, with each member's metrics; empty if it took no part."""
        stepping = [(i, one) for i, one in self._schedulers.items() if not one.per_batch and values[i]]
        for position, scheduler in stepping:
            scheduler.end_epoch(scheduler.loss(values[position]))
        if stepping:
            self._read_back()

    def state(self) -> list[list[float | None]]:
        """Return the loss that each member's scheduler got at each epoch, or None, as JSON."""
        losses: list[list[float | None]] = [[] for _ in self._names]
        for position, scheduler in self._schedulers.items():
            losses[position] = list(scheduler.losses)
        return losses

    def restore(self, state: Sequence[Sequence[float | None]]) -> None:
        """Restore the schedulers, by stepping new ones with the same losses."""
        for position, scheduler in self._schedulers.items():
            scheduler.start()
            for loss in state[position]:
                scheduler.end_epoch(loss)
        self._read_back()

    def _read_back(self) -> None:
        """Copy the hyperparameters that the schedulers set into the columns."""
        if not self._schedulers:
            return
        fresh = {name: column.copy() for name, column in self._columns.items()}
        for position, scheduler in self._schedulers.items():
            for name, value in scheduler.read():
                fresh[name][position] = value
                if value and name in scheduler.rule.unused:
                    raise InputError(
                        f"member {self._names[position]!r}: the schedule sets {name} to {value}, but it is 0 for "
                        f"all members of this {scheduler.rule.name}. Give compile a {name} above 0, which the "
                        f"schedule can change."
                    )
        changed = {
            key: new for key, new in fresh.items() if not np.array_equal(new, self._columns[key], equal_nan=True)
        }
        if changed:
            self._columns = {**self._columns, **changed}


class _Formula:
    """Named schedule for all members that have it, each with its own options."""

    def __init__(self, schedules: Mapping[int, Schedule], steps_per_epoch: np.ndarray, epochs: np.ndarray) -> None:
        own = list(schedules.values())
        self.positions = np.array(list(schedules))
        self.name = own[0].name
        epochs, steps_per_epoch = epochs[self.positions], steps_per_epoch[self.positions]
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
        """Return the factors of the learning rates at these steps, `(member,)`."""
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


class _Scheduler:
    """Scheduler of torch, for one member."""

    def __init__(self, factory: Factory, optimizer: Optimizer, hyper: Mapping[str, float], name: str) -> None:
        self.factory, self.rule, self.hyper, self.name = factory, optimizer, hyper, name
        self.start()
        self.per_batch = isinstance(self.scheduler, lr_scheduler.OneCycleLR | lr_scheduler.CyclicLR)
        self.takes_loss = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)

    def start(self) -> None:
        """Make a new scheduler, before its first step."""
        self.losses: list[float | None] = []  # what the scheduler got at the end of each epoch
        self.at = self.steps = 0  # the step that is read, and the steps that the scheduler has taken
        settings: dict[str, Any] = dict(self.rule.flags)
        for name in self.rule.defaults:
            flats = [self.hyper[flat] for flat in flat_names(name)]
            settings[name] = tuple(flats) if len(flats) > 1 else flats[0]
        parameters = [torch.nn.Parameter(torch.zeros(1))]
        make = self.rule.torch_class or _NoOptimizer
        self.optimizer = make(parameters, **settings)
        try:
            self.scheduler = self.factory(self.optimizer)
        except (TypeError, ValueError, KeyError) as error:
            raise InputError(
                f"member {self.name!r}: {self.factory!r} could not make a scheduler: {without_period(error)}. "
                f"Give its arguments with functools.partial, or use a lambda of the optimizer."
            ) from error
        if not isinstance(self.scheduler, lr_scheduler.LRScheduler):
            raise InputError(
                f"member {self.name!r}: {self.factory!r} returned {self.scheduler!r}, expected a scheduler "
                f"of torch.optim.lr_scheduler."
            )
        self.optimizer.step()  # does nothing without a gradient; schedulers warn if it was never called
        self._kept = {0: self._values()}  # by step
        self._over: InputError | None = None  # raised at the step after the last one

    def loss(self, values: Mapping[str, float]) -> float | None:
        """Return the loss of an epoch if the scheduler takes one, as ReduceLROnPlateau does."""
        if not self.takes_loss:
            return None
        loss = values.get("val_loss", values.get("loss"))
        if loss is None:
            raise InputError(f"member {self.name!r}: ReduceLROnPlateau needs a loss, got {sorted(values)}.")
        return float(loss)

    def end_epoch(self, loss: float | None) -> None:
        """Step the scheduler at the end of an epoch, and remember the loss."""
        self._step(*([] if loss is None else [loss]))
        self.at = self.steps
        self.losses.append(loss)

    def go_to(self, step: int) -> bool:
        """Bring a scheduler that steps per batch to a step. Return True if it moved.

        Steps are looked at ahead of time, so it must be quick to go back a little.
        """
        moved = self.at != step
        if step < self.steps and step not in self._kept:
            self.start()
        while self.steps < step:
            self._step()
        self.at = step
        return moved

    def _step(self, *loss: float) -> None:
        if self._over is not None:
            raise self._over
        try:
            self.scheduler.step(*loss)  # pyrefly: ignore[bad-argument-type]  # only ReduceLROnPlateau takes one
        except ValueError as error:
            self._over = InputError(f"member {self.name!r}: its scheduler can't continue: {error}")
            raise self._over from error
        self.steps += 1
        self._kept[self.steps] = self._values()
        self._kept.pop(self.steps - STEPS_KEPT, None)

    def read(self) -> list[tuple[str, float]]:
        """Return the hyperparameters at the current step, by column."""
        return self._kept[self.at]

    def _values(self) -> list[tuple[str, float]]:
        group = self.optimizer.param_groups[0]
        found: list[tuple[str, float]] = []
        for name in self.rule.defaults:
            values = group[name] if name == "betas" else (group[name],)
            found += zip(flat_names(name), map(float, values), strict=True)
        return found


class _NoOptimizer(torch.optim.Optimizer):
    """Optimizer that only holds hyperparameters, for algorithms that torch has no class for."""

    def __init__(self, parameters: list[torch.nn.Parameter], **settings: Any) -> None:
        super().__init__(parameters, settings)

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""
