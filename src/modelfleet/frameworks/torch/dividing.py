"""Whether the rows of a batch can be computed apart from each other, and what each of them draws then.

On several devices a row must get what it would have got on one, and beside padding what it would have got without:
its own dropout and noise, and nothing of other rows. It is found by trying a model's train step on batches and
parts: its loss, its gradients and its buffers. The weights tried are random, since a model's own may hide what it
does: a head, a scale or a gate often begins at zero.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from modelfleet.words import without_period

Run = Callable[..., Any]
Shape = tuple[int, ...]

MOST_ROWS = 16  # of a batch, for a trial of dividing it
NORMS = "Use LayerNorm or GroupNorm in place of BatchNorm, freeze it (module.eval()), or train it on one device"
DRAWING = "Draw numbers for all rows alike, or with an axis for the rows, or train it on one device"
MEANS = "Return the mean over the batch's rows, or train it on one device"


def divide(steps: Steps, state: State, shared: dict[str, Tensor], data: Any, inputs: Any) -> Draws | str:
    """What a train step draws, and for which rows; or why it can't be cut by rows, and what to do about it.

    `data` and `inputs` are `(row, …)`: the batch, and what of it goes into the model. The first member is tried.
    """
    data, inputs = (map_tree(_few, tree) for tree in (data, inputs))
    draws: Draws = ()
    with borrowed(steps, train=True):
        for attempts in _trials(steps, state, shared, len(leaves(data)[0])):
            try:
                found = _by_any(attempts, lambda trial: _divide(trial, trial.cast(data), trial.cast(inputs)))
            except NotImplementedError as error:
                return f"{error}. Draw by other operations, or train it on one device"
            except Exception:  # what is wrong with it is told where it is traced
                return ()
            if isinstance(found, str):
                return found
            draws = found
    return draws


def _few(leaf: Tensor) -> Tensor:
    return leaf[:MOST_ROWS] if len(leaf) > 1 else torch.cat([leaf, leaf])  # two rows tell what is drawn for each


def _divide(trial: "_Trial", data: Any, inputs: Any) -> Draws | str:
    *_, after = trial.step(_loss, data, slice(None), still := trial.stillness())
    changed = [name for name, buffer in after.items() if not _same(buffer, trial.state["buffers"][name][0])]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"a train step changes the buffer {changed[0]!r}{more} by the rows of the whole batch. {NORMS}"
    try:
        trial.step(_loss, data, slice(trial.half), few := trial.stillness())
    except Exception as error:
        return f"the model does not take half of a batch's rows: {without_period(error)}. Train it on one device"
    draws = _by_rows(still.shapes, trial.rows, few.shapes, trial.half)
    if isinstance(draws, str):
        return draws
    if any(draws[number][1] is not None for number in still.orders):
        return (
            f"the model shuffles the rows of its batch. {DRAWING.partition(', or')[0]}, or train it on one device"
        )
    seen = False
    with suppress(Exception):  # an objective may call the model otherwise
        if trial.feels_other_rows(inputs):
            return f"the model's output for a row depends on the other rows of its batch. {NORMS}"
        if draws:
            seen, alike = trial.draws_alike(inputs)
            if not alike:
                return f"the model's random numbers for a row are not where the row is. {DRAWING}"
    if not seen and any(axis is not None and shape[axis] > 1 for shape, axis in draws):
        return f"the model draws random numbers of which it can't be seen whose row's they are. {DRAWING}"
    if not trial.adds_up(data, draws):
        return f"its loss on a batch is not the mean of its rows' losses. {MEANS}"
    return draws


def bears_padding(steps: Steps, state: State, shared: dict[str, Tensor], data: Any, real: int) -> bool:
    """Whether a step on a batch `(x, y)` is the one on its first rows alone, if the others weigh nothing.

    Compared are the loss, the gradients, the metrics' sums and the buffers.
    """
    x, y = data
    x = map_tree(lambda leaf: arrays.padded_otherwise(leaf, real), x)
    y = map_tree(lambda leaf: torch.cat([leaf[:real], leaf[:1].expand_as(leaf[real:])]), y)
    size = len(leaves(y)[0])

    def alike(trial: _Trial) -> bool:
        weights = (torch.arange(size, device=leaves(y)[0].device) < real).to(trial.dtype)
        batch = trial.cast((x, y))
        padded = trial.step(_loss, batch, slice(None), trial.coins(), weights)
        alone = trial.step(_loss, batch, slice(real), trial.coins(), weights[:real])
        return _alike(padded, alone, trial.bound)

    with borrowed(steps, train=True):
        try:
            return all(_by_any(attempts, alike) for attempts in _trials(steps, state, shared, size))
        except Exception:  # a model that needs whole batches feels padding
            return False


def rows_apart(steps: Steps, state: State, shared: dict[str, Tensor], inputs: Any) -> bool:
    """Whether the outputs for a row of inputs `(row, …)` depend on that row alone, by the first member."""
    rows = len(leaves(inputs)[0])
    with borrowed(steps, train=False):
        try:
            return not any(
                _by_any(attempts, lambda trial: trial.feels_other_rows(trial.cast(inputs)))
                for attempts in _trials(steps, state, shared, rows)
            )
        except Exception:  # a model that needs whole batches feels padding
            return False


def _trials(steps: Steps, state: State, shared: dict[str, Tensor], rows: int) -> Iterator[Iterator["_Trial"]]:
    """The first member with random weights twice, and with its own: each in float64, and as it is."""
    exact = copy.copy(steps)
    exact.task = replace(steps.task, precision="float32")

    def attempts(number: int | None) -> Iterator[_Trial]:
        for dtype in (torch.float64, torch.float32):
            yield _Trial(exact, _first(state, number, dtype), _shaken(shared, number, dtype), rows, dtype)

    return map(attempts, (1, 2, None))


def _by_any(attempts: Iterator["_Trial"], run: Callable[["_Trial"], Any]) -> Any:
    """What the first trial gives that the model can take; the last error if it takes none."""
    first = next(attempts)
    try:
        return run(first)
    except Exception:  # not every model can be cast to float64
        return run(next(attempts))


def _first(state: State, number: int | None, dtype: torch.dtype) -> State:
    own = {part: {name: t[:1] for name, t in state[part].items()} for part in ("params", "frozen", "buffers")}
    return {
        "params": _shaken(own["params"], number, dtype),
        "frozen": _shaken(own["frozen"], number, dtype),
        "buffers": map_tree(lambda t: _cast(t, dtype).clone(), own["buffers"]),
        "member": {name: state["member"][name][:1] for name in ("seed", "step")},
    }


def _shaken(tensors: dict[str, Tensor], number: int | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights of the size that fresh ones have; without a number, the weights as they are, as a copy."""
    generator = torch.Generator().manual_seed(number or 0)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = _cast(tensor, dtype).clone()
        if number is not None and new.is_floating_point():
            drawn = torch.randn(new.shape, generator=generator, dtype=torch.float64)
            size = max(new.shape[-1], new.shape[-2]) if new.dim() > 2 else 0
            drawn = drawn / size**0.5 if size else 1.0 + 0.3 * drawn.tanh()
            new.copy_(drawn)
        found[name] = new
    return found


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and dtype == torch.float64 else tensor


@dataclass(frozen=True)
class _Trial:
    """The first member on a whole batch of so many rows, and on halves of it."""

    steps: Steps
    state: State
    shared: dict[str, Tensor]
    rows: int
    dtype: torch.dtype

    @property
    def half(self) -> int:
        return (self.rows + 1) // 2

    @property
    def bound(self) -> float:
        """How far numbers may be apart that should be the same."""
        floats = [t for part in ("params", "buffers") for t in self.state[part].values() if t.is_floating_point()]
        if any(t.element_size() < 4 for t in floats):
            return 5e-2
        return 1e-9 if self.dtype == torch.float64 else 1e-4

    def cast(self, data: Any) -> Any:
        """A batch in the trial's precision, in memory of its own: a forward may write into it."""
        return map_tree(lambda leaf: _cast(leaf, self.dtype).clone(), data)

    def stillness(self) -> Still:
        return Still(*self._key())

    def coins(self, part: Part | None = None) -> Coins:
        return Coins(*self._key(), part)

    def step(self, run: Run, data: Any, rows: slice, streams: Streams, *args: Any) -> tuple[Any, Any, Any]:
        """What a train step on some rows makes: the loss and its sums, the gradients, and the buffers."""
        own = map_tree(lambda leaf: leaf[rows].clone(), data)
        return self.steps.learn(self.state, self.shared, run, (own, *args), streams)

    def still(self, data: Any, end: int | None = None) -> tuple[Any, list[Shape]]:
        """The outputs for the first rows where nothing is left to chance, and the shapes of what was drawn."""
        streams = self.stillness()
        return self._observe(data, slice(end), streams), streams.shapes

    def feels_other_rows(self, inputs: Any) -> bool:
        """Whether the first rows have other outputs without the others."""
        whole, few = (self.still(inputs, end)[0] for end in (None, self.half))
        return not self._agree(whole, few, slice(self.half))

    def draws_alike(self, inputs: Any) -> tuple[bool, bool]:
        """Whether it can be seen what the last rows draw, and whether it is the same without the others."""
        shapes, few = (self.still(inputs, end)[1] for end in (None, self.half))
        draws = _by_rows(shapes, self.rows, few, self.half)
        if isinstance(draws, str):
            return False, False
        rows = slice(self.half, None)
        whole = self._observe(inputs, slice(None), self.coins())
        last = self._observe(inputs, rows, self.coins(self._part(rows, draws)))
        seen = any(self._by_row(leaf) for leaf in leaves(whole))
        return seen, self._agree(whole, last, rows)

    def adds_up(self, data: Any, draws: Draws) -> bool:
        """Whether a step on the batch is what steps on its parts add up to."""
        # Cut at several places: halves would hide what is summed in place of averaged, and rows that weigh unlike
        # may weigh as much in another part.
        whole = self.step(_loss, data, slice(None), self.coins())
        return all(self._adds_up(whole, data, draws, cut) for cut in {1, max(1, self.rows // 3), self.rows - 1})

    def _adds_up(self, whole: Any, data: Any, draws: Draws, cut: int) -> bool:
        parts = []
        for rows in (slice(cut), slice(cut, None)):
            share = torch.tensor(len(range(self.rows)[rows]) / self.rows, dtype=self.dtype)
            parts.append(self.step(_share, data, rows, self.coins(self._part(rows, draws)), None, share))
        total, count, gradients = 0.0, 0.0, map_tree(torch.zeros_like, whole[1])
        for (part, counted), own, _ in parts:
            total, count = total + part, count + counted
            gradients = {name: gradients[name] + own.get(name, 0.0) for name in gradients}
        loss = whole[0][0]
        return _alike((loss, whole[1]), (total / count, {n: g / count for n, g in gradients.items()}), self.bound)

    def _part(self, rows: slice, draws: Draws) -> Part:
        found = range(self.rows)[rows]
        start, count = (torch.tensor(number, device=self._key()[0].device) for number in (found[0], self.rows))
        return Part(start, count, len(found), draws)

    def _observe(self, data: Any, rows: slice, streams: Streams) -> Any:
        own = map_tree(lambda leaf: leaf[rows].clone(), data)
        return self.steps.observe(self.state, self.shared, _outputs, own, streams)[0]

    def _key(self) -> tuple[Tensor, Tensor]:
        return self.state["member"]["seed"][0], self.state["member"]["step"][0]

    def _agree(self, whole: Any, part: Any, rows: slice) -> bool:
        for left, right in zip(leaves(whole), leaves(part), strict=False):
            if self._by_row(left) and not _alike(left[rows], right, self.bound):
                return False
        return True

    def _by_row(self, leaf: Tensor) -> bool:
        return leaf.dim() > 0 and len(leaf) == self.rows and leaf.is_floating_point()


def _loss(steps: Steps, model: Any, batch: Any, weights: Tensor | None = None) -> tuple[Tensor, Any]:
    return steps.task.run(model, batch, weights)


def _share(steps: Steps, model: Any, batch: Any, weights: Tensor | None, share: Tensor) -> tuple[Tensor, Tensor]:
    total, count, _ = steps.task.share(model, batch, weights, share)
    return total, count


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


def _alike(left: Any, right: Any, bound: float) -> bool:
    """Whether trees of tensors have the same numbers, but for the rounding of the largest."""
    pairs = list(zip(leaves(left), leaves(right), strict=True))
    for one, other in pairs:
        if one.shape != other.shape:
            return False
        one, other = one.to(torch.float64), other.to(torch.float64)
        largest = one.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if one.numel() else 0.0
        if not torch.allclose(one, other, rtol=bound, atol=bound * max(largest, 1e-3), equal_nan=True):
            return False
    return True
