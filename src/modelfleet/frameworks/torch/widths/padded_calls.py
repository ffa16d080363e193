"""Calls of members of unequal widths, side by side: which axes are padded, and how much of them is a member's own.

Each width's forward is recorded once, alone (`tracing/recording.py`). The widest member's recording beside those
of the others says which axis of which tensor is padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch.tracing.calls import Path
from modelfleet.frameworks.torch.tracing.recording import OUTSIDE, RESULT, Comparison, Described, Recording
from modelfleet.frameworks.torch.tracing.recording import Call as OneCall

Size = tuple[Any, ...]
"""One number for each variant of the members: the size of an axis, or another number of a call."""
Axes = tuple[Size | None, ...]
"""For each axis of a tensor, the own sizes of the variants; None if all are equal."""


@dataclass
class Call:
    """One call of a torch function, by all variants."""

    own: OneCall
    """The call of the widest variant."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors in its arguments."""
    output_shapes: tuple[tuple[int, ...], ...]
    inputs: list[Axes] = field(default_factory=list)
    """For each tensor in the arguments, its axes."""
    outputs: list[Axes] = field(default_factory=list)
    numbers: dict[Path, Size] = field(default_factory=dict)
    """Integers in the arguments that are not the same in all variants."""

    @property
    def padded(self) -> bool:
        """Return True if an axis or a number is not the same in all variants."""
        return bool(self.numbers) or any(any(axes) for axes in (*self.inputs, *self.outputs))


def side_by_side(recording: Recording, found: Comparison) -> list[Call]:
    """Return the calls of all variants, without what they return at the end.

    Args:
        recording: The recording of the widest variant, whose Python runs for all.
        found: In what the recordings of all variants differ.

    Raises:
        CannotFuseError: The variants return other shapes, or use other tensors from outside.
    """
    calls = [_call(own) for own in recording.calls]
    at = [_places(call.own) for call in calls]
    for difference in found.shapes:
        call, places = calls[difference.call], at[difference.call]
        if call.own.name == "return":
            one, other = list(dict.fromkeys(difference.values))[:2]
            raise CannotFuseError(f"its output is {one}, and {other} for others")
        axes = _axes(difference.values)
        if difference.path[:1] == (RESULT,):
            call.outputs[places[1].index(difference.path[1:])] = axes
            continue
        number = places[0].index(difference.path)
        if dict(call.own.arguments)[difference.path].origin.kind == OUTSIDE:
            raise CannotFuseError(
                f"its widths differ, and so does a tensor in {call.own.name} that is no parameter or buffer"
            )
        call.inputs[number] = axes
    for difference in found.integers:
        if difference.path[:1] != (RESULT,):
            calls[difference.call].numbers[difference.path] = difference.values
    return calls[:-1]


def _call(own: OneCall) -> Call:
    shapes, results = (
        tuple(leaf.shape for _, leaf in leaves if isinstance(leaf, Described))
        for leaves in (own.arguments, own.results)
    )
    inputs: list[Axes] = [(None,) * len(shape) for shape in shapes]
    outputs: list[Axes] = [(None,) * len(shape) for shape in results]
    return Call(own, shapes, results, inputs, outputs)


def _places(own: OneCall) -> tuple[list[Path], list[Path]]:
    given, results = (
        [path for path, leaf in leaves if isinstance(leaf, Described)] for leaves in (own.arguments, own.results)
    )
    return given, results


def _axes(shapes: Sequence[tuple[int, ...]]) -> Axes:
    return tuple(None if len(set(sizes)) == 1 else tuple(sizes) for sizes in zip(*shapes, strict=True))
