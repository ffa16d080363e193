"""Whether the rows of a batch can be computed apart from each other, and what each of them draws then.

On several devices a row must get what it would have got on one, and beside padding what it would have got without:
its own dropout and noise, and nothing of other rows. It is found by trying a model on batches and parts.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelfleet.frameworks.torch import arrays
from modelfleet.frameworks.torch.programs import borrowed
from modelfleet.frameworks.torch.random import Coins, Draws, Part, Still, Streams
from modelfleet.frameworks.torch.state import State
from modelfleet.frameworks.torch.steps import Steps
from modelfleet.frameworks.torch.task import call, logits
from modelfleet.trees import leaves, map_tree

Run = Callable[[Any, Any], Any]
Shape = tuple[int, ...]

NORMS = "Use LayerNorm or GroupNorm in place of BatchNorm, freeze it (module.eval()), or train it on one device"
DRAWING = "Draw numbers for all rows alike, or with an axis for the rows, or train it on one device"


def divide(steps: Steps, state: State, shared: dict[str, Tensor], data: Any, inputs: Any) -> Draws | str:
    """What a train step draws, and for which rows; or why it can't be cut by rows, and what to do about it.

    `data` and `inputs` are `(row, …)`: the batch, and what of it goes into the model. The first member is tried.
    """
    rows = len(leaves(data)[0])
    if rows == 1:  # two of them tell what is drawn for each
        data, inputs = (map_tree(lambda leaf: torch.cat([leaf, leaf]), tree) for tree in (data, inputs))
    trial = _Trial(steps, state, shared, max(2, rows))
    with borrowed(steps.model, train=True):
        try:
            _, after, shapes = trial.still(_loss_of(steps), data)
        except Exception:  # what is wrong with it is told where it is traced
            return ()
        changed = [name for name, buffer in after.items() if not _same(buffer, state["buffers"][name][0])]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            return f"a train step changes the buffer {changed[0]!r}{more} by the rows of the whole batch. {NORMS}"
        try:
            _, _, few = trial.still(_loss_of(steps), data, trial.half)
        except Exception as error:
            return f"the model does not take half of a batch's rows: {error}. Train it on one device"
        draws = _by_rows(shapes, trial.rows, few, trial.half)
        if isinstance(draws, str):
            return draws
        seen = False
        with suppress(Exception):  # an objective may call the model otherwise
            if rows > 1 and trial.feels_other_rows(inputs):
                return f"the model's output for a row depends on the other rows of its batch. {NORMS}"
            if draws:
                seen, alike = trial.draws_alike(inputs)
                if not alike:
                    return f"the model's random numbers for a row are not where the row is. {DRAWING}"
    if not seen and any(axis is not None and shape[axis] > 1 for shape, axis in draws):
        return f"the model draws random numbers of which it can't be seen whose row's they are. {DRAWING}"
    return draws


def bears_padding(steps: Steps, state: State, shared: dict[str, Tensor], x: Any, real: int) -> bool:
    """Whether the first rows of a batch `(row, …)` have the outputs and draws that they have by themselves."""
    x = map_tree(lambda leaf: arrays.padded_otherwise(leaf, real), x)
    trial = _Trial(steps, state, shared, len(leaves(x)[0]))
    with borrowed(steps.model, train=True):
        try:
            padded, alone = (trial.tossed(x, slice(end)) for end in (None, real))
        except Exception:  # a model that needs whole batches feels padding
            return False
    return all(
        p.shape[0] == trial.rows and torch.allclose(p[:real], a, rtol=1e-4, atol=1e-5, equal_nan=True)
        for p, a in zip(leaves(padded), leaves(alone), strict=True)
    )


@dataclass(frozen=True)
class _Trial:
    """The first member on a whole batch of so many rows, and on halves of it."""

    steps: Steps
    state: State
    shared: dict[str, Tensor]
    rows: int

    @property
    def half(self) -> int:
        return (self.rows + 1) // 2

    def still(self, run: Run, data: Any, end: int | None = None) -> tuple[Any, dict[str, Tensor], list[Shape]]:
        """What a run on the first rows gives where nothing is left to chance; the buffers after it, and the shapes
        of what it draws."""
        streams = Still(*self._key())
        result, buffers = self._observe(run, data, slice(end), streams)
        return result, buffers, streams.shapes

    def feels_other_rows(self, inputs: Any) -> bool:
        """Whether the first rows have other outputs without the others."""
        whole, few = (self.still(_outputs, inputs, end)[0] for end in (None, self.half))
        return not self._agree(whole, few, slice(self.half))

    def draws_alike(self, inputs: Any) -> tuple[bool, bool]:
        """Whether it can be seen what the last rows draw, and whether it is the same without the others."""
        shapes, few = (self.still(_outputs, inputs, end)[2] for end in (None, self.half))
        draws = _by_rows(shapes, self.rows, few, self.half)
        if isinstance(draws, str):
            return False, False
        start, count = (torch.tensor(number, device=self._key()[0].device) for number in (self.half, self.rows))
        part = Part(start, count, self.rows - self.half, draws)
        whole, last = self.tossed(inputs, slice(None)), self.tossed(inputs, slice(self.half, None), part)
        seen = any(self._by_row(leaf) for leaf in leaves(whole))
        return seen, self._agree(whole, last, slice(self.half, None))

    def tossed(self, inputs: Any, rows: slice, part: Part | None = None) -> Any:
        """The outputs for some rows where every draw is a coin."""
        return self._observe(_outputs, inputs, rows, Coins(*self._key(), part))[0]

    def _observe(self, run: Run, data: Any, rows: slice, streams: Streams) -> tuple[Any, dict[str, Tensor]]:
        return self.steps.observe(self.state, self.shared, run, map_tree(lambda leaf: leaf[rows], data), streams)

    def _key(self) -> tuple[Tensor, Tensor]:
        return self.state["member"]["seed"][0], self.state["member"]["step"][0]

    def _agree(self, whole: Any, part: Any, rows: slice) -> bool:
        for left, right in zip(leaves(whole), leaves(part), strict=False):
            if self._by_row(left):
                bound = 1e-3 if left.element_size() >= 4 else 5e-2  # halves round that roughly
                expected = left[rows]
                if expected.shape != right.shape:
                    return False
                if not torch.allclose(expected, right, bound, bound, equal_nan=True):
                    return False
        return True

    def _by_row(self, leaf: Tensor) -> bool:
        return leaf.dim() > 0 and len(leaf) == self.rows and leaf.is_floating_point()


def _loss_of(steps: Steps) -> Run:
    return lambda model, batch: steps.task.run(model, batch, None)


def _outputs(model: Any, x: Any) -> Any:
    return logits(call(model, x))


def _by_rows(whole: Sequence[Shape], rows: int, few: Sequence[Shape], fewer: int) -> Draws | str:
    """Which axes of some draws have the rows, by the shapes that they have for so many rows and for fewer."""
    if len(whole) != len(few):
        times = f"{len(whole)} times for {rows} rows, and {len(few)} times for {fewer}"
        return f"the model draws random numbers {times}. {DRAWING}"
    found: list[tuple[Shape, int | None]] = []
    for left, right in zip(whole, few, strict=True):
        if left == right:
            found.append((left, None))
            continue
        axes = [axis for axis, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]]
        each = left[axes[0]] // rows if len(left) == len(right) and len(axes) == 1 else 0
        if not each or (left[axes[0]], right[axes[0]]) != (each * rows, each * fewer):
            shapes = f"{left} for {rows} rows, and {right} for {fewer}"
            return f"the model draws random numbers of shapes that no row has a part in: {shapes}. {DRAWING}"
        found.append(((*left[: axes[0]], each, *left[axes[0] + 1 :]), axes[0]))
    return tuple(found)


def _same(left: Tensor, right: Tensor) -> bool:
    return bool(((left == right) | ((left != left) & (right != right))).all())
