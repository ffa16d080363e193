"""Trials of a plain member's model on a copy of it, so that neither its buffers nor its Python state change."""

import copy
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import nn

from modelfleet.frameworks.torch.base import explained
from modelfleet.frameworks.torch.devices import restoring_generators
from modelfleet.frameworks.torch.fused.steps import Steps
from modelfleet.frameworks.torch.global_modes import KeepingModes
from modelfleet.frameworks.torch.modes import in_mode
from modelfleet.frameworks.torch.parallel.row_independence import divide_by_rows, rows_are_independent
from modelfleet.frameworks.torch.plain.contexts import PlainContexts
from modelfleet.frameworks.torch.plain.member import PlainMember
from modelfleet.frameworks.torch.python_state.undo import undoing_side_effects
from modelfleet.frameworks.torch.random.streams import DrawShapes
from modelfleet.trees import leaves, map_tree
from modelfleet.types import Tree

Result = TypeVar("Result")


class PlainTrials:
    """Trials of one plain member."""

    def __init__(self, member: PlainMember, contexts: PlainContexts) -> None:
        self._member = member
        self._contexts = contexts
        self._divided: dict[Hashable, DrawShapes | str] = {}  # by the form of a batch

    def run(self, name: str, data: Tree, run: Callable[[nn.Module, Tree], Result]) -> Result | None:
        """Return the result of `run(model, data)`, or None if the model can't be copied.

        Raises:
            InputError: The model can't take the data.
        """
        task = self._member.task
        for with_grad in (torch.no_grad, torch.enable_grad):  # a forward may differentiate by its input
            model = scratch_copy(self._member.model)
            if model is None:
                return None
            with (
                explained(name, self._member.model, data),
                KeepingModes(self._member.device.type),
                undoing_side_effects(("self", model), ("the loss", task.loss and task.loss.plain)),
                restoring_generators(self._member.device),
                in_mode(model, train=False),
                self._contexts.autocast(),
                with_grad(),
            ):
                try:
                    return run(model, map_tree(torch.clone, data))
                except RuntimeError as error:
                    if with_grad is torch.enable_grad or "grad" not in str(error):
                        raise
        return None

    def divide(self, rows: Tree, inputs: Tree) -> DrawShapes | str:
        """Return what the rows of a batch draw, or why they can't be computed apart."""
        # A single row does not show what each row draws, so its form is its own.
        form = len(leaves(rows)[0]) == 1, *(leaf.shape[1:] for leaf in leaves(rows))
        if form not in self._divided:
            model = scratch_copy(self._member.model)
            if model is None:
                return "the model can't be copied to be tried. Train it on one device"
            steps = Steps(model, self._member.task, self._member.layout)
            self._divided[form] = divide_by_rows(steps, self._member.state, {}, rows, inputs)
        return self._divided[form]

    def are_independent(self, inputs: Tree) -> bool:
        """Return True if the output for a row depends on that row alone; False if that can't be tried."""
        model = scratch_copy(self._member.model)
        if model is None:
            return False
        steps = Steps(model, self._member.task, self._member.layout)
        return rows_are_independent(steps, self._member.state, {}, inputs)


def scratch_copy(model: nn.Module) -> nn.Module | None:
    """Return a copy of a model that reads the same parameters, or None if it can't be copied."""
    memo: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # a user's attributes may hold anything
        return None
