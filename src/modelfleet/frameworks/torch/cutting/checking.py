"""Compare stages with the model that was cut: outputs, gradients, and what changes of the model.

That is done in both modes, with other numbers of rows, and in two passes in a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from modelfleet.formatting import without_period
from modelfleet.frameworks.pieces import CannotCutError
from modelfleet.frameworks.torch.building import seeding
from modelfleet.frameworks.torch.cutting.changes import Changes, State
from modelfleet.frameworks.torch.cutting.measuring import gradients
from modelfleet.frameworks.torch.task import call
from modelfleet.types import Tree

Run = Callable[[Tree], Any]
"""Computes a model's output from its inputs by running the stages one after the other."""


@dataclass(frozen=True)
class _Pass:
    """A pass forward and backward: the leaves of the output, the parameters' gradients, and what has changed."""

    output: Sequence[Any]
    gradients: Sequence[Tensor | None]
    changes: Changes


def check(model: nn.Module, stages: Sequence[nn.Module], run: Run, examples: Sequence[Tree]) -> None:
    """Raise CannotCutError if the stages do something else than the model does.

    Args:
        model: The model, whose parameters are those of the stages.
        stages: The stages.
        run: Runs them.
        examples: Inputs of different numbers of rows.
    """
    before = State(model)
    try:
        for training in (True, False):
            for module in (model, *stages):
                module.train(training)
            mode = "training" if training else "evaluation"
            for number, example in enumerate(examples):
                _compare(model, run, example, mode, passes=1 if number else 2)
    finally:
        before.restore()


def _compare(model: nn.Module, run: Run, example: Tree, mode: str, passes: int) -> None:
    """Raise CannotCutError if the stages differ from the model in one of some passes in a row."""
    own = partial(call, model)
    try:
        _once(model, own, example, State(model))  # a first pass may fill caches, which is no difference
        state = State(model)
        expected = _passed(model, own, example, state, passes)
        found = _passed(model, run, example, state, passes)
    except Exception as error:  # a forward may raise anything, and so may autograd at a second pass
        raise CannotCutError(f"in {mode} mode a pass fails: {without_period(error)}") from error
    for one, other in zip(found, expected, strict=True):
        problem = _difference(one, other)
        if problem is not None:
            raise CannotCutError(f"in {mode} mode {problem}")


def _passed(model: nn.Module, run: Run, example: Tree, state: State, count: int) -> list[_Pass]:
    """Return some passes in a row, and leave everything as it was before them."""
    try:
        return [_once(model, run, example, state) for _ in range(count)]
    finally:
        state.restore()


def _once(model: nn.Module, run: Run, example: Tree, state: State) -> _Pass:
    with seeding(0):
        output = _pytree.tree_leaves(run(example))
        tensors = [leaf for leaf in output if isinstance(leaf, Tensor)]
        found = gradients(tensors, [own for own in model.parameters() if own.requires_grad])()
    # As they are now: the next pass may change what is returned.
    kept = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in output]
    return _Pass(kept, found, state.changes())


def _difference(found: _Pass, expected: _Pass) -> str | None:
    """Return what the stages do differently from the model; None if nothing."""
    if not _alike(found.output, expected.output):
        return (
            "its stages compute other outputs than it does itself, so its forward depends on more than its inputs "
            "and weights, such as on an `if` or a counter that tracing can't see"
        )
    if not _alike(found.gradients, expected.gradients):
        return (
            "its stages have other gradients than it has itself; its forward may compute under torch.no_grad, "
            "which torch.fx can't see"
        )
    own, others = found.changes, expected.changes
    names = own.tensors.keys() | others.tensors.keys()
    changed = [name for name in sorted(names) if not _is_close(own.tensors.get(name), others.tensors.get(name))]
    if changed:
        return (
            f"its stages leave {changed[0]!r} with other values than it does itself; its forward may change it "
            f"under an `if self.training` or in Python, which tracing can't see"
        )
    if own.tracked != others.tracked:
        return (
            f"its stages change {min(own.tracked ^ others.tracked)!r} with other gradients than it does itself; "
            f"its forward may change it under torch.no_grad, which torch.fx can't see"
        )
    if own.python != others.python:
        return (
            f"running it changes {min(own.python ^ others.python)}, and running its stages does not, or the other "
            f"way round; tracing can't see what a forward keeps in Python"
        )
    return None


def _alike(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(map(_is_close, found, expected))


def _is_close(found: Any, expected: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return found is expected or bool(found == expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    if not expected.numel():
        return True
    # Of the largest number: small ones may be differences of large ones.
    finite = torch.nan_to_num(expected.detach().abs(), posinf=0.0)
    tolerance = 100 * torch.finfo(expected.dtype).eps * max(1.0, float(finite.max()))
    return torch.allclose(found, expected, rtol=1e-3, atol=tolerance, equal_nan=True)
