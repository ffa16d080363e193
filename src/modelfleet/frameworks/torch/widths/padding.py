"""Calls of torch functions on padded tensors, while the widest member's Python computes for all.

What always holds: the own numbers of a member are the first ones along each axis of a tensor, and all others are
zero. Their gradients are zero, too. Each torch function that the Python calls either keeps it so by itself, or is
computed by a rule that does (`rules.py`). Functions without a rule are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch.random.operations import current_streams
from modelfleet.frameworks.torch.tracing.calls import Arguments, Path, name_of
from modelfleet.frameworks.torch.tracing.recording import Call as OneCall
from modelfleet.frameworks.torch.tracing.replaying import Change
from modelfleet.frameworks.torch.widths.padded_calls import Axes, Call, Size

_WRITERS = ("Tensor.__setitem__", "Tensor.__set__")  # return no tensor, and have no rule
OWN = "own sizes"
VARIANT = "variant"
"""Names of columns among the members' numbers."""


@dataclass
class Padding:
    """What a step of members of unequal widths calls, and the numbers that it needs of each variant."""

    calls: Sequence[Call]
    columns: dict[Size, int] = field(default_factory=dict)
    """Sizes of axes by variant, and other numbers that follow from them, with the number of their column."""

    def table(self, variant: int) -> Tensor:
        """Return the numbers `(column,)` of a variant."""
        return torch.tensor([size[variant] for size in self.columns], dtype=torch.float64)

    def changes(
        self, numbers: Mapping[str, Tensor], others: Mapping[int, Change], rules: "Rules"
    ) -> dict[int, Change]:
        """Return what to do in place of the calls of padded tensors, for `Replay`.

        Args:
            numbers: The members' numbers, without the member axis that vmap hides.
            others: What to do in place of the calls that take the members' own numbers.
            rules: The rule of each function.
        """
        step = _Step(self, numbers)
        changed = dict(others)
        for number, call in enumerate(self.calls):
            if call.padded and (call.outputs or call.own.name in _WRITERS):
                changed[number] = _change(call, step, others.get(number), rules)
        return changed


class _Step:
    """A step's view of the columns and masks of the member that is mapped over all."""

    def __init__(self, padding: Padding, numbers: Mapping[str, Tensor]) -> None:
        self._padding, self._numbers = padding, numbers
        self._masks: dict[tuple[Axes, tuple[int, ...]], Tensor] = {}

    def own(self, size: Size, *, stacked: bool = False) -> Tensor:
        """Return a column's number; of all members, `(member,)`, if stacked."""
        rows = self._numbers[OWN]
        rows = _stacked(rows) if stacked else rows
        number = self._padding.columns.setdefault(size, len(self._padding.columns))
        if number < rows.shape[-1]:
            return rows[..., number]
        # Asked for the first time, in a trial.
        variant = self._numbers[VARIANT]
        variant = _stacked(variant) if stacked else variant
        column = torch.tensor(size, dtype=rows.dtype, device=rows.device)
        return column.index_select(0, variant.reshape(-1)).view(variant.shape)

    def mask(self, axes: Axes, shape: Sequence[int]) -> Tensor:
        """Return a mask that is True for a member's own numbers, and broadcasts to the shape."""
        key = axes, tuple(size for size, axis in zip(shape, axes, strict=True) if axis is not None)
        if key not in self._masks:
            found: Tensor | None = None
            for index, axis in enumerate(axes):
                if axis is None:
                    continue
                own = self.own(axis)
                inside = torch.arange(shape[index], device=own.device) < own
                inside = inside.view(-1, *[1] * (len(axes) - 1 - index))
                found = inside if found is None else found & inside
            assert found is not None
            self._masks[key] = found
        return self._masks[key]


class PaddedCall:
    """One call of a torch function on padded tensors, for its rule."""

    def __init__(
        self, call: Call, record: OneCall, arguments: Arguments, step: _Step, numbers: Change | None
    ) -> None:
        self.func = arguments.function
        self.args, self.kwargs = arguments.positional()
        self.tensors = [leaf for _, leaf in arguments.leaves() if isinstance(leaf, Tensor)]
        self.shapes, self.out_shapes = call.shapes, call.output_shapes
        self.axes, self.out = call.inputs, call.outputs
        self.numbers: dict[Path, Size] = call.numbers
        self.own = step.own
        self.mask = step.mask
        self.has_numbers = numbers is not None
        self._record, self._numbers = record, numbers
        if call.shapes != tuple(tuple(tensor.shape) for tensor in self.tensors):
            raise self.refuse("is called on other shapes while it is traced")

    @property
    def name(self) -> str:
        """Return the function's own name."""
        return getattr(self.func, "__name__", "")

    def run(self, *args: Any) -> Any:
        """Call the function, by default with the arguments that it was called with; with the members' numbers."""
        given = args or self.args
        if self._numbers is None:
            return self.func(*given, **self.kwargs)
        return self._numbers(Arguments(self.func, given, self.kwargs), self._record)

    def refuse(self, why: str) -> CannotFuseError:
        """Return the error for a call that has no rule."""
        return CannotFuseError(f"members of unequal widths are not fused here: {name_of(self.func)} {why}")

    def refuse_longer(self) -> None:
        """Raise if a tensor of the widest member has no room for that of another one."""
        for axes, shape in zip(self.out, self.out_shapes, strict=True):
            for own, size in zip(axes, shape, strict=True):
                if own is not None and max(own) > size:
                    raise self.refuse(
                        f"makes an axis of {size} for the widest member, and of {max(own)} for another"
                    )

    def axes_of(self, tensor: Tensor) -> Axes:
        """Return the axes of a tensor that is among the arguments."""
        return next(axes for own, axes in zip(self.tensors, self.axes, strict=True) if own is tensor)

    def filled(self, tensor: Tensor, axes: Axes, value: float = 0) -> Tensor:
        """Return a tensor with another number in its padding. Its gradients there are zero."""
        return tensor.masked_fill(~self.mask(axes, tensor.shape), value) if any(axes) else tensor

    def cleared(self, result: Tensor, axes: Axes) -> Tensor:
        """Return a result with zeros in its padding; in place if the function was."""
        if not any(axes):
            return result
        if self.tensors and result is self.tensors[0]:
            return result.masked_fill_(~self.mask(axes, result.shape), 0)
        return self.filled(result, axes)

    def drawing(self, axes: Axes, shape: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context in which draws of this shape are at a member's own positions."""
        return current_streams().at_own_positions(axes, shape, lambda size: self.own(size, stacked=True))

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by its position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


Rule = Callable[[PaddedCall], Any]
Rules = Mapping[Callable[..., Any], Rule]


def _change(call: Call, step: _Step, numbers: Change | None, rules: Rules) -> Change:
    def change(arguments: Arguments, record: OneCall) -> Any:
        padded = PaddedCall(call, record, arguments, step, numbers)
        rule = rules.get(arguments.function)
        if rule is None or (padded.tensors and not padded.args):
            raise padded.refuse("has no rule for a padded axis")
        padded.refuse_longer()
        return rule(padded)

    return change


def _stacked(tensor: Tensor) -> Tensor:
    """Return a tensor with the member axis that vmap hides."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor
