"""Programs of a lane for one more size of its batches, without tracing."""

from collections.abc import Callable, Mapping, Sequence

import torch

from modelfleet.frameworks.torch.fused.arguments import (
    TRAINING,
    Args,
    Key,
    Shapes,
    family_of,
    readable,
    rows_of,
    steady_inputs,
    width_of,
    without_sizes,
)
from modelfleet.frameworks.torch.fused.runner import ByWidth
from modelfleet.frameworks.torch.fused.steps import Recorded, Steps
from modelfleet.frameworks.torch.fused.steps_protocol import How, LaneSteps
from modelfleet.frameworks.torch.model_locks import locked_in_mode
from modelfleet.frameworks.torch.python_state.snapshot import PythonSnapshot
from modelfleet.frameworks.torch.python_state.undo import restoring_python, restoring_tensors
from modelfleet.frameworks.torch.tracing.other_sizes import (
    LEAST,
    MOST,
    OtherGraphError,
    differing_sizes,
    program_from,
    refuse_other_calls,
)
from modelfleet.frameworks.torch.tracing.recording import Recording
from modelfleet.frameworks.torch.tracing.trace import Program, Step, as_if_compiling, forgetting_sources
from modelfleet.trees import leaves, map_tree, rebuild
from modelfleet.types import Tree

_KINDS = ("packed_gradients", "gradients", "evaluate", "predict")


def from_other_sizes(
    known: Mapping[Key, ByWidth],
    steps: LaneSteps,
    kind: str,
    args: Args,
    stacked: Sequence[bool],
    shared_data: bool,
    run: Step,
    snapshot: PythonSnapshot,
) -> Program | None:
    """Return the program for some arguments, if it follows from those for batches of other sizes.

    Args:
        known: The programs that there are.
        steps: The steps that they are of.
        kind: The step.
        args: The arguments.
        stacked: For each argument, True if its tensors have a member axis.
        shared_data: True if the batch has no member axis.
        run: The step as a function of the arguments.
        snapshot: What the Python of the step reads.
    """
    if kind not in _KINDS or not isinstance(steps, Steps) or "numbers" in args[0]:
        return None
    family = family_of(kind, args, shared_data)
    others = _others(known, family, width_of(args))
    sizes = differing_sizes([*(form for form, _ in others), without_sizes(family)[1]])
    if len(others) < LEAST or sizes is None:
        return None

    def recorded(form: Shapes) -> Recording:
        return _recorded(steps, kind, args, stacked, shared_data, form, snapshot)

    try:
        for form, program in others:
            program.recording = program.recording or recorded(form)
        recording = recorded(without_sizes(family)[1])
        programs = [program for _, program in others]
        refuse_other_calls([*(own.recording for own in programs if own.recording), recording], sizes)
        with forgetting_sources():
            found = program_from(programs, sizes, run, args, stacked, steady_inputs(args))
    except OtherGraphError:
        return None
    except Exception:  # a model's forward may raise anything: tracing says what is wrong
        return None
    found.recording = recording
    return found


def _others(known: Mapping[Key, ByWidth], family: Key, width: int) -> list[tuple[Shapes, Program]]:
    """Return traced programs for batches that differ from those of a family in the same axes."""
    own, form = without_sizes(family)
    found: dict[frozenset[tuple[int, int]], list[tuple[Shapes, Program]]] = {}
    for key, programs in known.items():
        if key[0] != family[0] or width not in programs:
            continue
        rest, other = without_sizes(key)
        program = programs[width].program
        if rest != own or program.graph is None or other == form:
            continue
        axes = frozenset(
            (number, axis)
            for number, shapes in enumerate(zip(form, other, strict=True))
            for axis, (one, two) in enumerate(zip(*shapes, strict=True))
            if one != two
        )
        found.setdefault(axes, []).append((other, program))
    return next((own[:MOST] for own in found.values() if len(own) >= LEAST), [])


def _recorded(
    steps: Steps,
    kind: str,
    args: Args,
    stacked: Sequence[bool],
    shared_data: bool,
    form: Shapes,
    snapshot: PythonSnapshot,
) -> Recording:
    """Run the Python of a step for the first member, on zeros of some shapes, and return its calls."""
    train = kind in TRAINING
    state = next(rows_of((readable(args[0]),), (True,), 1))
    shapes, batch = iter(form), []
    for arg, axis in zip(args[2:], stacked[2:], strict=True):
        own = []
        for leaf in leaves(arg):
            shape = next(shapes)
            if axis:
                shape = (1, *shape[1:]) if shared_data else (1, *shape)
            own.append(torch.zeros(shape, dtype=leaf.dtype, device=leaf.device))
        batch.append(rebuild(arg, own))
    step: Callable[..., Tree] = steps.gradients if train else getattr(steps, kind)
    rest = batch[: 1 if kind == "predict" else 2]
    with (
        restoring_python(snapshot, strictly=False),
        restoring_tensors(snapshot, strictly=False),
        locked_in_mode(steps, train=train),
        as_if_compiling(),
    ):
        steps.records = True
        try:
            step(state, map_tree(torch.clone, args[1]), *rest, How(shared_data, fused=False))
        except Recorded as done:
            return done.recording
        finally:
            steps.records = False
    raise OtherGraphError("nothing was recorded")
