"""Make a padded lane's step ready: record each width's Python alone, and try it padded against that.

Before a lane of unequal widths is used, one step of each width is computed in float64 on random weights, alone and
padded beside the others. Losses, gradients, buffers and outputs must agree. So a model that a rule does not fit is
not fused, whatever the reason.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch.fused.steps import Steps
from modelfleet.frameworks.torch.fused.steps_protocol import How, Tensors
from modelfleet.frameworks.torch.model_locks import locked_in_mode
from modelfleet.frameworks.torch.python_state.undo import undoing_side_effects
from modelfleet.frameworks.torch.tracing.recording import Recording
from modelfleet.frameworks.torch.widths.padded_calls import Call, side_by_side
from modelfleet.frameworks.torch.widths.watching import Recorded
from modelfleet.frameworks.torch.widths.widths import Widths
from modelfleet.trees import leaves, map_tree, paths
from modelfleet.types import State, Tree

PAIR = How(shared_data=True, fused=True)
ONE = How(shared_data=True, fused=False)


@contextmanager
def computing(steps: Steps, calls: Sequence[Call] | None) -> Iterator[None]:
    """Run a padded step in this context: its Python makes these calls."""
    assert steps.padding is not None
    before, steps.padding.calls = steps.padding.calls, calls
    try:
        yield
    finally:
        steps.padding.calls = before


def prepare(
    steps: Steps,
    widths: Widths,
    kind: str,
    shared: Tensors,
    data: Tree,
    weights: Tensor | None,
) -> list[Call]:
    """Return the calls of a step's Python, after a trial of it.

    Args:
        steps: The steps of the lane. Its model is the widest member's.
        widths: The lane's widths.
        kind: "gradients", "evaluate" or "predict".
        shared: The tensors that all members share.
        data: The batch of one member, `(row, …)`.
        weights: The weights of its rows, `(row,)`, if there are any.

    Raises:
        CannotFuseError: The step can't be computed with padding.
    """
    error: Exception | None = None
    for dtype in (torch.float64, None):  # not every model can be cast to float64
        trial = _Trial(steps, widths, kind, dtype, shared, data, weights)
        try:
            alone = [trial.alone(variant) for variant in range(len(widths.models))]
        except Exception as raised:
            error = raised
            continue
        calls = side_by_side([recording for recording, _ in alone], widths.names, widths.widest)
        trial.compare(calls, [result for _, result in alone])
        return calls
    raise CannotFuseError(f"its widths differ, and it can't be tried alone: {error}") from error


class _Trial:
    def __init__(
        self,
        steps: Steps,
        widths: Widths,
        kind: str,
        dtype: torch.dtype | None,
        shared: Tensors,
        data: Tree,
        weights: Tensor | None,
    ) -> None:
        self._steps, self._widths, self._kind, self._dtype = steps, widths, kind, dtype
        self._train = kind == "gradients"
        self._shared, self._data = self._cast(shared), self._cast(data)
        self._weights = None if weights is None else self._cast(weights)
        self._states = [self._random_state(variant) for variant in range(len(widths.models))]

    def alone(self, variant: int) -> tuple[Recording, Tree]:
        """Return the recording and the result of one variant's step, alone."""
        model = self._widths.models[variant]
        own = self._steps.of(model)
        own.recorded = Recorded()
        with undoing_side_effects(*own.roots()), locked_in_mode(own, train=self._train):
            result = self._run(own, self._states[variant], ONE)
        if own.counting is not None:
            raise CannotFuseError(f"its forward changes the buffer {own.counting!r} in evaluation mode, too")
        assert own.recorded.recording is not None
        return own.recorded.recording, result

    def compare(self, calls: Sequence[Call], alone: Sequence[Tree]) -> None:
        """Raise CannotFuseError if a step of all variants, padded, is not what each computes alone."""
        steps, widths = self._steps, self._widths
        state: State = {
            part: {
                name: torch.cat([widths.padded(name, own[part][name]) for own in self._states])
                for name in own_names
            }
            for part, own_names in self._states[0].items()
        }
        device = state["member"]["seed"].device
        state["own"] = {"variant": torch.arange(len(self._states), device=device)}
        with (
            undoing_side_effects(*steps.roots()),
            locked_in_mode(steps, train=self._train),
            computing(steps, calls),
        ):
            found = self._run(steps, state, PAIR)
        assert steps.padding is not None
        exact = torch.float32 if device.type == "mps" else torch.float64
        steps.padding.table = steps.padding.columns.table(len(self._states), exact, device)
        for variant, expected in enumerate(alone):
            self._compare(variant, map_tree(lambda t, at=variant: t[at : at + 1], found), expected)

    def _compare(self, variant: int, found: Tree, expected: Tree) -> None:
        """Compare what one variant has computed padded with what it has computed alone."""
        if self._train:
            for part in ("gradients", "buffers"):
                own, alone = found.pop(part), expected.pop(part)
                for name, padded in own.items():
                    wanted = alone.get(name, torch.zeros_like(self._widths.cut_one(name, padded, variant)))
                    if not self._is_padding_of(padded, wanted, name, variant):
                        raise CannotFuseError(self._refusal(variant, f"{part.removesuffix('s')} of {name!r}"))
        for (path, own), (_, wanted) in zip(paths(found), paths(expected), strict=True):
            if own.shape != wanted.shape or not self._close(own, wanted):
                raise CannotFuseError(self._refusal(variant, path or "output"))

    def _is_padding_of(self, padded: Tensor, wanted: Tensor, name: str, variant: int) -> bool:
        """Return True if a padded tensor holds another one, with zeros around."""
        own = self._widths.cut_one(name, padded, variant)
        if own.shape != wanted.shape or not self._close(own, wanted):
            return False
        around = padded.clone()
        self._widths.cut_one(name, around, variant).zero_()
        return not around.any()

    def _refusal(self, variant: int, what: str) -> str:
        return (
            f"padded to the width of {self._widths.names[self._widths.widest]!r}, {self._widths.names[variant]!r} "
            f"does not compute what it computes alone: its {what} differs"
        )

    def _close(self, own: Tensor, expected: Tensor) -> bool:
        if not own.is_floating_point():
            return torch.equal(own, expected)
        exact = all(leaf.dtype == torch.float64 for leaf in leaves(self._states[0]["params"]))
        tolerance = 1e-9 if exact and self._dtype is not None else 1e-3
        if expected.dtype not in (torch.float32, torch.float64):
            tolerance = 5e-2
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        return torch.allclose(own, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)

    def _run(self, steps: Steps, state: State, how: How) -> Tree:
        state, data, shared = map_tree(torch.clone, (state, self._data, self._shared))
        if self._kind == "predict":
            return steps.predict(state, shared, data, how)
        count = len(state["member"]["seed"])
        weights = None if self._weights is None else self._weights.expand(count, -1)
        run = steps.gradients if self._kind == "gradients" else steps.evaluate
        return run(state, shared, data, weights, how)

    def _random_state(self, variant: int) -> State:
        """Return random weights of one variant `(1, …)`: its own may hide what it does, if they start at zero."""
        widths, random = self._widths, torch.Generator().manual_seed(variant)
        model, shared = widths.models[variant], self._shared

        def weight(name: str, tensor: Tensor) -> Tensor:
            stored = tensor.detach().transpose(-1, -2) if name in widths.layout else tensor.detach()
            if not stored.is_floating_point():
                return stored.unsqueeze(0).clone()
            drawn = torch.randn(stored.shape, generator=random, dtype=torch.float64)
            fan = stored.numel() / max(stored.shape[0], 1) if stored.dim() > 1 else 1
            return self._cast((drawn / max(fan, 1) ** 0.5).to(stored).unsqueeze(0))

        def kept(tensor: Tensor) -> Tensor:
            return self._cast(tensor.detach().unsqueeze(0).clone())

        trained = {n: p for n, p in model.named_parameters() if p.requires_grad and n not in shared}
        frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad and n not in shared}
        buffers = {n: b for n, b in model.named_buffers() if n not in shared}
        device = next((t.device for t in (*trained.values(), *buffers.values())), torch.device("cpu"))
        exact = torch.float32 if device.type == "mps" else torch.float64
        return {
            "params": {name: weight(name, tensor) for name, tensor in trained.items()},
            "frozen": {name: weight(name, tensor) for name, tensor in frozen.items()},
            "buffers": {name: kept(tensor) for name, tensor in buffers.items()},
            "member": {
                "seed": torch.tensor([1000 + variant], device=device),
                "step": torch.full((1,), 3.0, dtype=exact, device=device),
            },
        }

    def _cast(self, tree: Tree) -> Tree:
        def one(leaf: Tensor) -> Tensor:
            change = self._dtype is not None and leaf.is_floating_point()
            return leaf.to(self._dtype) if change else leaf

        return map_tree(one, tree)
