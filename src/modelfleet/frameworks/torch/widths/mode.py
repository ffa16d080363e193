"""Context in which the widest member's Python computes for members that are padded to its width.

What always holds: the own numbers of a member are the first ones along each axis of a tensor, and all others are
zero. Their gradients are zero, too. Each torch function that the Python calls either keeps it so by itself, or is
computed by a rule that does (`rules.py`). Functions without a rule are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch.random.streams import Streams
from modelfleet.frameworks.torch.tracing.calls import CallMode, Function, Path, key_of, name_of
from modelfleet.frameworks.torch.widths.padded_calls import Axes, Call, Size, tensors_of


class Columns:
    """Numbers that differ between variants: sizes of axes, and others that follow from them.

    Those that were asked for once are in a table, so that a step looks all of them up at once.
    """

    def __init__(self) -> None:
        self.known: dict[Size, int] = {}

    def table(self, variants: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the numbers `(variant, column)`."""
        columns = [torch.tensor(size, dtype=dtype, device=device) for size in self.known]
        return torch.stack(columns, 1) if columns else torch.zeros(variants, 0, dtype=dtype, device=device)


class OwnNumbers:
    """A step's view of the columns: the numbers of each member.

    Args:
        columns: All columns.
        rows: `(member, column)`, or `(column,)` for the one member that is mapped over all.
        variant: The variant of each member, `(member,)` or `()`.
    """

    def __init__(self, columns: Columns, rows: Tensor, variant: Tensor) -> None:
        self._columns, self._rows, self._variant = columns, rows, variant

    def __call__(self, size: Size) -> Tensor:
        """Return the numbers of a column."""
        number = self._columns.known.setdefault(size, len(self._columns.known))
        if number < self._rows.shape[-1]:
            return self._rows[..., number]
        # Asked for the first time, in a trial.
        column = torch.tensor(size, dtype=self._rows.dtype, device=self._rows.device)
        return column.index_select(0, self._variant.reshape(-1)).view(self._variant.shape)


class PaddedCall:
    """One call of a torch function on padded tensors, for its rule."""

    def __init__(
        self,
        call: Call,
        func: Function,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        mode: "PaddedMode",
    ) -> None:
        self.func = func
        self.args, self.kwargs, self.tensors = tuple(args), dict(kwargs), tensors
        self.shapes, self.out_shapes = call.shapes, call.output_shapes
        self.axes, self.out = call.inputs, call.outputs
        self.numbers: dict[Path, Size] = call.numbers
        self.own = mode.own
        self._mode = mode

    @property
    def name(self) -> str:
        """Return the function's own name."""
        return getattr(self.func, "__name__", "")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, by default with the arguments that it was called with."""
        return self.func(*(args or self.args), **(kwargs or self.kwargs))

    def refuse(self, why: str) -> CannotFuseError:
        """Return the error for a call that has no rule."""
        return CannotFuseError(f"members of unequal widths are not fused here: {name_of(self.func)} {why}")

    def mask(self, axes: Axes, shape: Sequence[int]) -> Tensor:
        """Return a mask that is True for a member's own numbers, and broadcasts to the shape."""
        return self._mode.mask(axes, shape)

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

    def drawing(self, axes: Axes, shape: Sequence[int]) -> Any:
        """Return a context in which draws of this shape are at a member's own positions."""
        return self._mode.streams.at_own_positions(axes, shape)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by its position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


Rule = Callable[[PaddedCall], Any]


class PaddedMode(CallMode):
    """Context that computes for padded members (see the module).

    Args:
        calls: What the Python calls, as recorded.
        rules: The rule of each function.
        own: The numbers of the member that is mapped over all.
        streams: The streams that the step draws from.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        rules: Mapping[Callable[..., Any], Rule],
        own: OwnNumbers,
        streams: Streams,
    ) -> None:
        super().__init__()
        self.own, self.streams = own, streams
        self._calls, self._rules = calls, rules
        self._number = 0
        self._masks: dict[tuple[Axes, tuple[int, ...]], Tensor] = {}

    def seen(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute a call by its rule, if anything in it is padded."""
        number, self._number = self._number, self._number + 1
        call = self._calls[number] if number < len(self._calls) else None
        tensors = tensors_of(function, args, kwargs)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if call is None or call.own.key != key_of(function) or call.shapes != shapes:
            raise CannotFuseError(
                f"members of unequal widths are not fused here: its Python calls {name_of(function)} with other "
                f"arguments than before"
            )
        if not call.padded or not call.outputs:
            return function(*args, **kwargs)
        padded = PaddedCall(call, function, args, kwargs, tensors, self)
        rule = self._rules.get(function)
        if rule is None or (tensors and not args):
            raise padded.refuse("has no rule for a padded axis")
        return rule(padded)

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
