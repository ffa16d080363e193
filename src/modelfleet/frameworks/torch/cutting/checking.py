"""Compare stages with the model that was cut: outputs in both modes, with other numbers of rows, and gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from modelfleet.frameworks.pieces import CannotCutError
from modelfleet.frameworks.torch.building import seeding
from modelfleet.frameworks.torch.cutting.measuring import gradients
from modelfleet.frameworks.torch.task import call
from modelfleet.types import Tree

Run = Callable[[Tree], Any]
"""Computes a model's output from its inputs by running the stages one after the other."""


def check(model: nn.Module, stages: Sequence[nn.Module], run: Run, examples: Sequence[Tree]) -> None:
    """Raise CannotCutError if the stages compute something else than the model does.

    Args:
        model: The model, whose parameters are those of the stages. Its buffers change.
        stages: The stages.
        run: Runs them.
        examples: Inputs of different numbers of rows.
    """
    for training in (True, False):
        for module in (model, *stages):
            module.train(training)
        mode = "training" if training else "evaluation"
        for example in examples:
            expected, expected_gradients = _computed(model, lambda x: call(model, x), example)
            found, found_gradients = _computed(model, run, example)
            if not _alike(found, expected):
                raise CannotCutError(
                    f"in {mode} mode its stages compute other outputs than it does itself, so its forward depends "
                    f"on more than its inputs and weights, such as on an `if` or a counter that tracing can't see"
                )
            if not _alike(found_gradients, expected_gradients):
                raise CannotCutError(
                    f"in {mode} mode its stages have other gradients than it has itself; its forward may compute "
                    f"under torch.no_grad, which torch.fx can't see"
                )


def _computed(model: nn.Module, run: Run, example: Tree) -> tuple[list[Any], Sequence[Tensor | None]]:
    """Return the leaves of an output, and the gradients of the parameters. Leaves the buffers as they were."""
    buffers = [(own, own.clone()) for own in model.buffers()]
    with seeding(0):
        output = _pytree.tree_leaves(run(example))
        tensors = [leaf for leaf in output if isinstance(leaf, Tensor)]
        found = gradients(tensors, [own for own in model.parameters() if own.requires_grad])()
    with torch.no_grad():
        for own, before in buffers:
            own.copy_(before)
    return output, found


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
