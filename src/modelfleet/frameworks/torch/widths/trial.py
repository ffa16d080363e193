"""Trial of a padded step: what each width computes in it must be what it computes alone.

Before a lane of unequal widths is used, one step of each width is computed in float64 on random weights, alone and
padded beside the others. Losses, gradients, buffers and outputs must agree. So a model that a rule does not fit is
not fused, whatever the reason.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch.fused.arguments import Key, numbers_key
from modelfleet.frameworks.torch.fused.steps import Recorded, Steps
from modelfleet.frameworks.torch.fused.steps_protocol import How, Tensors
from modelfleet.frameworks.torch.model_locks import locked_in_mode
from modelfleet.frameworks.torch.python_state.undo import undoing_side_effects
from modelfleet.frameworks.torch.tracing.trace import as_if_compiling
from modelfleet.frameworks.torch.widths.padding import OWN, VARIANT, Padding
from modelfleet.frameworks.torch.widths.widths import Widths
from modelfleet.trees import map_tree, paths
from modelfleet.types import State, Tree

Value = TypeVar("Value")
TOGETHER = How(shared_data=True, fused=True)
ALONE = How(shared_data=True, fused=False)


class WidthTrial:
    """Trial of one step of members of unequal widths.

    Args:
        steps: The steps of the widest member, which run for all.
        alone: The steps of a member of each number.
        members: The names of these members, with their widths.
        weights: Their weights `(1, …)`, in their own shapes.
        widths: The widths of the lane.
        shared: The tensors that all members share.
    """

    def __init__(
        self,
        steps: Steps,
        alone: Sequence[Steps],
        members: Sequence[tuple[str, int]],
        weights: Sequence[State],
        widths: Widths,
        shared: Tensors,
    ) -> None:
        self._steps, self._alone, self._members, self._widths = steps, alone, members, widths
        self._weights, self._shared = weights, shared

    def run(self, kind: str, padding: Padding, numbers: Tensors, data: Tree, weights: Tensor | None) -> None:
        """Try a step on a batch of one member.

        Args:
            kind: "train", "evaluate" or "predict".
            padding: The calls of the step. The columns that it needs are added to it.
            numbers: The other numbers of each number `(number, …)`, by site.
            data: The batch `(row, …)`.
            weights: The weights of its rows, `(row,)`.

        Raises:
            CannotFuseError: The step can't be computed with padding.
        """
        error: Exception | None = None
        for dtype in (torch.float64, None):  # not every model can be cast to float64
            attempt = _Attempt(self, kind, dtype, data, weights)
            expected: list[Tree] = []
            try:
                for number in range(len(self._alone)):
                    expected.append(attempt.alone(number))
                attempt.compare(padding, numbers, expected)
            except Exception as raised:  # a model's forward may raise anything
                if isinstance(raised, CannotFuseError) and len(expected) == len(self._alone):
                    raise
                error = raised
            else:
                return
        raise CannotFuseError(f"its widths differ, and a trial of it raised {error}") from error


class _Attempt:
    """The trial in one precision."""

    def __init__(
        self, trial: WidthTrial, kind: str, dtype: torch.dtype | None, data: Tree, weights: Tensor | None
    ) -> None:
        self._steps, self._own_steps, self._members = trial._steps, trial._alone, trial._members
        self._widths, self._kind, self._dtype = trial._widths, kind, dtype
        self._shared, self._data = self._cast(trial._shared), self._cast(data)
        self._row_weights = weights
        self._states = [self._random_state(number, own) for number, own in enumerate(trial._weights)]

    def alone(self, number: int) -> Tree:
        """Return the result of one number's step alone."""
        steps = self._own_steps[number]
        with undoing_side_effects(*steps.roots()), locked_in_mode(steps, train=self._kind == "train"):
            return self._run(steps, self._states[number], ALONE)

    def compare(self, padding: Padding, numbers: Tensors, alone: Sequence[Tree]) -> None:
        """Raise CannotFuseError if a step of all numbers, padded, is not what each computes alone."""
        steps, key = self._steps, numbers_key(self._kind, self._data, self._row_weights, shared=True)
        state: State = {
            part: {
                name: torch.cat([self._widths.padded(name, own[part][name]) for own in self._states])
                for name in tensors
            }
            for part, tensors in self._states[0].items()
        }
        seeds = state["member"]["seed"]
        own = torch.zeros(len(seeds), 0, dtype=state["member"]["step"].dtype, device=seeds.device)
        state["numbers"] = {**numbers, OWN: own, VARIANT: torch.arange(len(seeds), device=seeds.device)}
        kept = steps.recordings.get(key), steps.padding.get(key)
        with undoing_side_effects(*steps.roots()), locked_in_mode(steps, train=self._kind == "train"):
            self._record(padding, key)
            try:
                found = self._run(steps, state, TOGETHER)
            finally:
                _restore(steps.recordings, key, kept[0])
                _restore(steps.padding, key, kept[1])
        for number, expected in enumerate(alone):
            self._compare(number, map_tree(lambda t, at=number: t[at : at + 1], found), expected)

    def _record(self, padding: Padding, key: Key) -> None:
        """Record the step that runs for all in this precision: numbers of members are cast to what it records."""
        steps = self._steps
        number = self._own_steps.index(steps)
        steps.records = True
        try:
            with as_if_compiling():
                self._run(steps, self._states[number], ALONE)
        except Recorded as done:
            steps.recordings[key], steps.padding[key] = done.recording, padding
        finally:
            steps.records = False

    def _compare(self, number: int, found: Tree, expected: Tree) -> None:
        """Compare what one variant has computed padded with what it has computed alone."""
        width = self._members[number][1]
        if self._kind == "train":
            for part in ("gradients", "buffers"):
                own, alone = found.pop(part), expected.pop(part)
                for name, padded in own.items():
                    wanted = alone.get(name, torch.zeros_like(self._widths.cut_one(name, padded, width)))
                    if not self._is_padding_of(padded, wanted, name, width):
                        raise CannotFuseError(self._refusal(number, f"{part.removesuffix('s')} of {name!r}"))
        for (path, own), (_, wanted) in zip(paths(found), paths(expected), strict=True):
            if own.shape != wanted.shape or not self._close(own, wanted):
                raise CannotFuseError(self._refusal(number, path or "output"))

    def _is_padding_of(self, padded: Tensor, wanted: Tensor, name: str, width: int) -> bool:
        """Return True if a padded tensor holds another one, with zeros around."""
        own = self._widths.cut_one(name, padded, width)
        if own.shape != wanted.shape or not self._close(own, wanted):
            return False
        around = padded.clone()
        self._widths.cut_one(name, around, width).zero_()
        return not around.any()

    def _refusal(self, number: int, what: str) -> str:
        return (
            f"padded to the width of {self._widths.widest_name!r}, {self._members[number][0]!r} does not compute "
            f"what it computes alone: its {what} differs"
        )

    def _close(self, own: Tensor, expected: Tensor) -> bool:
        if not own.is_floating_point():
            return torch.equal(own, expected)
        tolerance = 1e-9 if self._dtype is not None else 1e-3
        if (
            any(t.dtype in (torch.float16, torch.bfloat16) for t in (own, expected))
            or self._steps.task.precision != "float32"
        ):
            tolerance = 5e-2
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        return torch.allclose(own, expected.to(own.dtype), rtol=tolerance, atol=tolerance * scale, equal_nan=True)

    def _run(self, steps: Steps, state: State, how: How) -> Tree:
        state, data, shared = map_tree(torch.clone, (state, self._data, self._shared))
        if self._kind == "predict":
            return steps.predict(state, shared, data, how)
        count = len(state["member"]["seed"])
        weights = None if self._row_weights is None else self._row_weights.expand(count, -1)
        run = steps.gradients if self._kind == "train" else steps.evaluate
        return run(state, shared, data, weights, how)

    def _random_state(self, number: int, weights: State) -> State:
        """Return random weights of a member `(1, …)`: its own may hide what it does, if they start at zero."""
        random = torch.Generator().manual_seed(number)

        def drawn(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor.clone()
            fan = tensor[0].numel() / max(tensor.shape[1], 1) if tensor.dim() > 2 else 1
            numbers = torch.randn(tensor.shape, generator=random, dtype=torch.float64) / max(fan, 1) ** 0.5
            return self._cast(numbers.to(tensor))

        device = self._shared_device(weights)
        exact = torch.float32 if device.type == "mps" else torch.float64
        return {
            "params": map_tree(drawn, weights["params"]),
            "frozen": map_tree(drawn, weights["frozen"]),
            "buffers": self._cast(map_tree(torch.clone, weights["buffers"])),
            "member": {
                "seed": torch.tensor([1000 + number], device=device),
                "step": torch.full((1,), 3.0, dtype=exact, device=device),
            },
        }

    @staticmethod
    def _shared_device(weights: State) -> torch.device:
        return next(tensor.device for own in weights.values() for tensor in own.values())

    def _cast(self, tree: Tree) -> Tree:
        def one(leaf: Tensor) -> Tensor:
            change = self._dtype is not None and leaf.is_floating_point()
            return leaf.to(self._dtype) if change else leaf

        return map_tree(one, tree)


def _restore(table: dict[Key, Value], key: Key, before: Value | None) -> None:
    if before is None:
        table.pop(key, None)
    else:
        table[key] = before
