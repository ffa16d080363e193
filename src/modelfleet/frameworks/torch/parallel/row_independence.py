"""Find out whether the rows of a batch can be computed independently of each other, and what each row draws.

On several devices, a row must get the same result as on one, and next to padding the same as without: its own
dropout and noise, and nothing from other rows. To find out, a model's train step is tried on whole batches and on
parts of them, and the losses, gradients and buffers are compared. The weights are random in these trials, because
a model's own weights may hide what it does: a head, a scale or a gate often starts at zero.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from modelfleet.formatting import without_period
from modelfleet.frameworks.torch import arrays
from modelfleet.frameworks.torch.fused.state import State
from modelfleet.frameworks.torch.fused.steps import Steps
from modelfleet.frameworks.torch.model_locks import locked_in_mode
from modelfleet.frameworks.torch.random.streams import BatchRows, DrawShapes, Streams
from modelfleet.frameworks.torch.random.trial_streams import ConstantStreams, ExtremeStreams
from modelfleet.frameworks.torch.task import call, logits
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Tree

Run = Callable[..., Any]
Shape = tuple[int, ...]
Result = TypeVar("Result")

MAX_ROWS = 16  # of a batch in a trial
USE_OTHER_NORMS = (
    "Use LayerNorm or GroupNorm instead of BatchNorm, freeze it (module.eval()), or train the model on one device"
)
DRAW_PER_ROW = (
    "Draw the same numbers for all rows, or draw with an axis for the rows, or train the model on one device"
)
RETURN_MEAN = "Return the mean over the batch's rows, or train the model on one device"


def divide_by_rows(
    steps: Steps, state: State, shared: dict[str, Tensor], data: Tree, inputs: Tree
) -> DrawShapes | str:
    """Return what a train step draws, and for which rows; or why it can't be divided by rows, and what to do.

    Args:
        steps: The steps of the lane. Its first member is tried.
        state: The stacked state.
        shared: The tensors that all members share.
        data: The batch, `(row, …)`.
        inputs: The part of the batch that goes into the model.
    """
    data, inputs = (map_tree(_few_rows, tree) for tree in (data, inputs))
    draws: DrawShapes = ()
    with locked_in_mode(steps, train=True):
        for attempts in _trials(steps, state, shared, len(leaves(data)[0])):
            try:
                found = _first_that_runs(
                    attempts, lambda trial: _divide(trial, trial.cast(data), trial.cast(inputs))
                )
            except NotImplementedError as error:
                return f"{error}. Draw with other operations, or train the model on one device"
            except Exception:  # tracing will say what is wrong
                return ()
            if isinstance(found, str):
                return found
            draws = found
    return draws


def _few_rows(leaf: Tensor) -> Tensor:
    # It takes two rows to see what each draws.
    return leaf[:MAX_ROWS] if len(leaf) > 1 else torch.cat([leaf, leaf])


def _divide(trial: "_Trial", data: Tree, inputs: Tree) -> DrawShapes | str:
    *_, after = trial.step(_loss, data, slice(None), constant := trial.constant_streams())
    changed = [name for name, buffer in after.items() if not _equal(buffer, trial.state["buffers"][name][0])]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"a train step changes the buffer {changed[0]!r}{more} based on all rows. {USE_OTHER_NORMS}"
    try:
        trial.step(_loss, data, slice(trial.half), few := trial.constant_streams())
    except Exception as error:
        return f"the model does not accept half of a batch's rows: {without_period(error)}. Train it on one device"
    draws = row_axes(constant.shapes, trial.rows, few.shapes, trial.half)
    if isinstance(draws, str):
        return draws
    if any(draws[number][1] is not None for number in constant.permutations):
        return (
            "the model shuffles the rows of its batch. Leave them in their order, or train the model on one device"
        )
    visible = False
    with suppress(Exception):  # an objective may call the model in another way
        if trial.mixes_rows(inputs):
            return f"the model's output for a row depends on the other rows of its batch. {USE_OTHER_NORMS}"
        if draws:
            visible, same = trial.draws_the_same(inputs)
            if not same:
                return f"the model's random numbers for a row are not at the row's position. {DRAW_PER_ROW}"
    if not visible and any(axis is not None and shape[axis] > 1 for shape, axis in draws):
        return (
            f"the model draws random numbers, and it is unknown which row each of them belongs to. {DRAW_PER_ROW}"
        )
    if not trial.adds_up(data, draws):
        return f"its loss on a batch is not the mean of its rows' losses. {RETURN_MEAN}"
    return draws


def ignores_padding(steps: Steps, state: State, shared: dict[str, Tensor], data: Tree, real: int) -> bool:
    """Return True if a step on a batch equals a step on its first `real` rows, with the rest at weight 0.

    The batch is (x, y) or (x, y, sample_weight). The loss, the gradients, the sums of the metrics and the buffers
    are compared.
    """
    x, *rest = data
    x = map_tree(lambda leaf: arrays.padded_otherwise(leaf, real), x)
    rest = map_tree(lambda leaf: torch.cat([leaf[:real], leaf[:1].expand_as(leaf[real:])]), rest)
    size = len(leaves(rest)[0])

    def ignores(trial: _Trial) -> bool:
        weights = (torch.arange(size, device=leaves(rest)[0].device) < real).to(trial.dtype)
        batch = trial.cast((x, *rest))
        padded = trial.step(_loss, batch, slice(None), trial.extreme_streams(), weights)
        alone = trial.step(_loss, batch, slice(real), trial.extreme_streams(), weights[:real])
        return close(padded, alone, trial.tolerance)

    with locked_in_mode(steps, train=True):
        try:
            return all(_first_that_runs(attempts, ignores) for attempts in _trials(steps, state, shared, size))
        except Exception:  # a model that needs whole batches does not ignore padding
            return False


def rows_are_independent(steps: Steps, state: State, shared: dict[str, Tensor], inputs: Tree) -> bool:
    """Return True if the first member's output for a row of `inputs` `(row, …)` depends on that row alone."""
    rows = len(leaves(inputs)[0])
    with locked_in_mode(steps, train=False):
        try:
            return not any(
                _first_that_runs(attempts, lambda trial: trial.mixes_rows(trial.cast(inputs)))
                for attempts in _trials(steps, state, shared, rows)
            )
        except Exception:  # a model that needs whole batches does not ignore padding
            return False


def _trials(steps: Steps, state: State, shared: dict[str, Tensor], rows: int) -> Iterator[Iterator["_Trial"]]:
    """Yield trials of the first member: twice with random weights, then with its own.

    Each comes in float64 and, for models that can't be cast, in float32.
    """
    exact = copy.copy(steps)
    exact.task = replace(steps.task, precision="float32")

    def attempts(seed: int | None) -> Iterator[_Trial]:
        for dtype in (torch.float64, torch.float32):
            yield _Trial(exact, _first_member(state, seed, dtype), _randomized(shared, seed, dtype), rows, dtype)

    return map(attempts, (1, 2, None))


def _first_that_runs(attempts: Iterator["_Trial"], run: Callable[["_Trial"], Result]) -> Result:
    """Return the result of the first trial that does not raise. Raise the error of the second if both raise."""
    first = next(attempts)
    try:
        return run(first)
    except Exception:  # not every model can be cast to float64
        return run(next(attempts))


def _first_member(state: State, seed: int | None, dtype: torch.dtype) -> State:
    own = {part: {name: t[:1] for name, t in state[part].items()} for part in ("params", "frozen", "buffers")}
    return {
        "params": _randomized(own["params"], seed, dtype),
        "frozen": _randomized(own["frozen"], seed, dtype),
        "buffers": map_tree(lambda t: _cast(t, dtype).clone(), own["buffers"]),
        "member": {name: state["member"][name][:1] for name in ("seed", "step")},
    }


def _randomized(tensors: dict[str, Tensor], seed: int | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random weights of the magnitude of newly initialized ones; without a seed, a copy of the weights."""
    generator = torch.Generator().manual_seed(seed or 0)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = _cast(tensor, dtype).clone()
        if seed is not None and new.is_floating_point():
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
    """First member of a lane, to be tried on a whole batch of `rows` rows and on parts of it."""

    steps: Steps
    state: State
    shared: dict[str, Tensor]
    rows: int
    dtype: torch.dtype

    @property
    def half(self) -> int:
        return (self.rows + 1) // 2

    @property
    def tolerance(self) -> float:
        """Return how far apart equal results may be, because of rounding."""
        floats = [t for part in ("params", "buffers") for t in self.state[part].values() if t.is_floating_point()]
        if any(t.element_size() < 4 for t in floats):
            return 5e-2
        return 1e-9 if self.dtype == torch.float64 else 1e-4

    def cast(self, data: Tree) -> Tree:
        """Return a copy of a batch in the trial's precision. A forward may write into it."""
        return map_tree(lambda leaf: _cast(leaf, self.dtype).clone(), data)

    def constant_streams(self) -> ConstantStreams:
        return ConstantStreams(*self._seed_and_step())

    def extreme_streams(self, rows: BatchRows | None = None) -> ExtremeStreams:
        return ExtremeStreams(*self._seed_and_step(), rows)

    def step(
        self, run: Run, data: Tree, rows: slice, streams: Streams, *args: Any
    ) -> tuple[Tree, dict[str, Tensor], dict[str, Tensor]]:
        """Return the loss and its sums, the gradients and the buffers of a train step on some rows."""
        own = map_tree(lambda leaf: leaf[rows].clone(), data)
        return self.steps.learn(self.state, self.shared, run, (own, *args), streams)

    def without_chance(self, data: Tree, end: int | None = None) -> tuple[Tree, list[Shape]]:
        """Return the outputs for the first rows with constant random numbers, and the shapes of the draws."""
        streams = self.constant_streams()
        return self._observe(data, slice(end), streams), streams.shapes

    def mixes_rows(self, inputs: Tree) -> bool:
        """Return True if the outputs for the first rows change when the other rows are left out."""
        whole, few = (self.without_chance(inputs, end)[0] for end in (None, self.half))
        return not self._agree(whole, few, slice(self.half))

    def draws_the_same(self, inputs: Tree) -> tuple[bool, bool]:
        """Compare the draws of the last rows with and without the other rows.

        Returns:
            Whether the outputs show what a row draws, and whether the draws are the same.
        """
        shapes, few = (self.without_chance(inputs, end)[1] for end in (None, self.half))
        draws = row_axes(shapes, self.rows, few, self.half)
        if isinstance(draws, str):
            return False, False
        rows = slice(self.half, None)
        whole = self._observe(inputs, slice(None), self.extreme_streams())
        last = self._observe(inputs, rows, self.extreme_streams(self._batch_rows(rows, draws)))
        visible = any(self._has_rows(leaf) for leaf in leaves(whole))
        return visible, self._agree(whole, last, rows)

    def adds_up(self, data: Tree, draws: DrawShapes) -> bool:
        """Return True if a step on the batch is the sum of steps on its parts."""
        # Divided at several points: halves would hide a sum that should be a mean, and rows of different weights
        # may have equal weights in another part.
        whole = self.step(_loss, data, slice(None), self.extreme_streams())
        return all(self._adds_up_at(whole, data, draws, cut) for cut in {1, max(1, self.rows // 3), self.rows - 1})

    def _adds_up_at(
        self, whole: tuple[Tree, dict[str, Tensor], dict[str, Tensor]], data: Tree, draws: DrawShapes, cut: int
    ) -> bool:
        total, count, gradients = 0.0, 0.0, map_tree(torch.zeros_like, whole[1])
        for rows in (slice(cut), slice(cut, None)):
            fraction = torch.tensor(len(range(self.rows)[rows]) / self.rows, dtype=self.dtype)
            streams = self.extreme_streams(self._batch_rows(rows, draws))
            (part, counted), own, _ = self.step(_partial_loss, data, rows, streams, None, fraction)
            total, count = total + part, count + counted
            gradients = {name: gradients[name] + own.get(name, 0.0) for name in gradients}
        mean = total / count, {name: gradient / count for name, gradient in gradients.items()}
        return close((whole[0][0], whole[1]), mean, self.tolerance)

    def _batch_rows(self, rows: slice, draws: DrawShapes) -> BatchRows:
        found = range(self.rows)[rows]
        start, count = (
            torch.tensor(number, device=self._seed_and_step()[0].device) for number in (found[0], self.rows)
        )
        return BatchRows(start, count, len(found), draws)

    def _observe(self, data: Tree, rows: slice, streams: Streams) -> Tree:
        own = map_tree(lambda leaf: leaf[rows].clone(), data)
        return self.steps.observe(self.state, self.shared, _outputs, own, streams)[0]

    def _seed_and_step(self) -> tuple[Tensor, Tensor]:
        return self.state["member"]["seed"][0], self.state["member"]["step"][0]

    def _agree(self, whole: Tree, part: Tree, rows: slice) -> bool:
        for left, right in zip(leaves(whole), leaves(part), strict=False):
            if self._has_rows(left) and not close(left[rows], right, self.tolerance):
                return False
        return True

    def _has_rows(self, leaf: Tensor) -> bool:
        return leaf.dim() > 0 and len(leaf) == self.rows and leaf.is_floating_point()


def _loss(steps: Steps, model: nn.Module, batch: Tree, weights: Tensor | None = None) -> tuple[Tensor, Tree]:
    return steps.task.run(model, batch, weights)


def _partial_loss(
    steps: Steps, model: nn.Module, batch: Tree, weights: Tensor | None, fraction: Tensor
) -> tuple[Tensor, Tensor]:
    total, count, _ = steps.task.partial_loss(model, batch, weights, fraction)
    return total, count


def _outputs(model: nn.Module, x: Tree) -> Tree:
    return logits(call(model, x))


def row_axes(whole: Sequence[Shape], rows: int, few: Sequence[Shape], fewer: int) -> DrawShapes | str:
    """Find the axes of draws that have the rows, from their shapes for `rows` rows and for `fewer`."""
    if len(whole) != len(few):
        times = f"{len(whole)} times for {rows} rows, and {len(few)} times for {fewer}"
        return f"the model draws random numbers {times}. {DRAW_PER_ROW}"
    found: list[tuple[Shape, int | None]] = []
    for left, right in zip(whole, few, strict=True):
        if left == right:
            found.append((left, None))
            continue
        axes = [axis for axis, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]]
        each = left[axes[0]] // rows if len(left) == len(right) and len(axes) == 1 else 0
        if not each or (left[axes[0]], right[axes[0]]) != (each * rows, each * fewer):
            shapes = f"{left} for {rows} rows, and {right} for {fewer}"
            return (
                f"the model draws random numbers in shapes that can't be divided by rows: {shapes}. {DRAW_PER_ROW}"
            )
        found.append(((*left[: axes[0]], each, *left[axes[0] + 1 :]), axes[0]))
    return tuple(found)


def _equal(left: Tensor, right: Tensor) -> bool:
    return bool(((left == right) | ((left != left) & (right != right))).all())


def close(left: Tree, right: Tree, tolerance: float) -> bool:
    """Return True if trees of tensors have the same numbers, within the rounding of the largest."""
    pairs = list(zip(leaves(left), leaves(right), strict=True))
    for one, other in pairs:
        if one.shape != other.shape:
            return False
        one, other = one.to(torch.float64), other.to(torch.float64)
        largest = one.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if one.numel() else 0.0
        if not torch.allclose(one, other, rtol=tolerance, atol=tolerance * max(largest, 1e-3), equal_nan=True):
            return False
    return True
