"""When to compile: what compiling a program costs, and what it saves in the steps that are left.

How many calls to predict are to come is not known. As many are expected as there have been (`programs.Runner`).

`MODELFLEET_COMPILE` changes this: `now` compiles before the first step, `never` does not compile.
"""

import os
from typing import Literal, get_args

from modelfleet.devices import cores
from modelfleet.frameworks.torch.compiling import experience
from modelfleet.unknown_names import unknown

CompileMode = Literal["auto", "now", "never"]
MODES: tuple[CompileMode, ...] = get_args(CompileMode)

# What compiling costs and saves, as measured on two cores, until it has been measured on this machine
# (`experience.py`). Only the decision depends on it, never a result.
SECONDS_PER_NODE = 0.04
SECONDS_AT_LEAST = 8.0
FEW_CORES = 4  # on fewer than these, the training leaves little to the compiler, which has the lowest priority:
CROWDED = 3.0  # it takes so many times as long
SECONDS_TO_LOAD = 2.0
SLOWED_FRACTION = 0.3  # of the training's speed, that is lost while a core compiles
SAVED_OF_COMPILABLE = 0.7  # of the time that a step spends in operations that a compiler can merge
COMPILABLE = 0.6  # of a step's time is spent there, until that has been measured (`compilable.py`)
MAX_NODES = 6000  # compiling a larger graph takes minutes


def compile_mode() -> CompileMode:
    """Return the value of `MODELFLEET_COMPILE`.

    Raises:
        FleetError: It has none of the known values.
    """
    value = os.environ.get("MODELFLEET_COMPILE", "auto")
    for mode in MODES:
        if value == mode:
            return mode
    raise unknown("MODELFLEET_COMPILE", value, MODES)


def too_large(operations: int) -> bool:
    """Return True if a graph of so many operations is never compiled, because that would take minutes."""
    return operations > MAX_NODES


def saved_fraction(hardware: str | None = None, *, compilable: float | None = None) -> float:
    """Return the part of a step's time that compiling saves, on the CPU or on a model of accelerator.

    Args:
        hardware: The model of accelerator; None for the CPU.
        compilable: The part that is spent in operations that a compiler can merge. None if it is not known.
    """
    part = COMPILABLE if compilable is None else compilable
    return part * experience.measured(experience.SAVED, SAVED_OF_COMPILABLE, hardware)


def seconds_saved(
    steps_left: int, seconds_per_step: float, hardware: str | None = None, *, compilable: float | None = None
) -> float:
    """Return how much time the remaining steps would save if they were compiled now."""
    return steps_left * seconds_per_step * saved_fraction(hardware, compilable=compilable)


def seconds_won(
    operations: int,
    steps_left: int,
    seconds_per_step: float,
    hardware: str | None = None,
    *,
    compilable: float | None = None,
) -> float:
    """Return how many seconds sooner the remaining steps are done if a graph is compiled beside them, or 0."""
    left = steps_left * seconds_per_step
    compiling = seconds_to_compile(operations, hardware)
    # Steps go on meanwhile, more slowly: they leave a core to the compiler.
    lost = compiling * experience.measured(experience.SLOWED, SLOWED_FRACTION, hardware) + SECONDS_TO_LOAD
    return max(0.0, (left - compiling) * saved_fraction(hardware, compilable=compilable) - lost)


def seconds_to_compile(operations: int, hardware: str | None = None) -> float:
    """Return how long it takes to compile a graph beside the training."""
    measured = experience.measured(experience.COST, 0.0, hardware)
    if measured:
        return max(SECONDS_AT_LEAST, measured * operations)
    return (CROWDED if cores() < FEW_CORES else 1.0) * max(SECONDS_AT_LEAST, SECONDS_PER_NODE * operations)


def time_ratio(operations: int, hardware: str | None = None) -> float:
    """Return how long a step of so many operations will take once it is compiled, relative to now.

    A shorter run is not compiled. But its first steps, which are those that are timed, draw without their loops in
    C, and take longer than those after them by about as much.
    """
    return 1.0 if compile_mode() == "never" or too_large(operations) else 1.0 - saved_fraction(hardware)


def may_pay(steps_left: int, seconds_per_step: float | None, hardware: str | None = None) -> bool:
    """Return True if compiling a step, or loading it from the cache, may pay. Its graph is not known yet."""
    mode = compile_mode()
    if mode != "auto" or seconds_per_step is None:
        return mode == "now"
    return loading_pays(seconds_saved(steps_left, seconds_per_step, hardware))


def loading_pays(saving: float) -> bool:
    """Return True if so many seconds are saved that a program from the cache is worth loading."""
    return saving >= SECONDS_TO_LOAD
