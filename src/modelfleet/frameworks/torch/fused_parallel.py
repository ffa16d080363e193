"""Rows of a fused lane's batches, divided over the ranks of a process group."""

from collections.abc import Hashable

import torch
from torch import Tensor

from modelfleet.frameworks.torch.process_group import ProcessGroup
from modelfleet.frameworks.torch.random.streams import DrawShapes
from modelfleet.frameworks.torch.row_independence import divide_by_rows
from modelfleet.frameworks.torch.steps import Steps
from modelfleet.trees import leaves, map_tree
from modelfleet.types import State, Tree

OwnRows = tuple[Tree, Tensor | None, dict[str, Tensor]]
"""Some rows of a batch, their weights, and their place in the batch, as `Steps.row_gradients` takes them."""


class RowDivision:
    """Division of batches into the rows of each rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._draws: dict[Hashable, DrawShapes] = {}  # by the form of a batch: what its rows draw
        self._places: dict[tuple[int, int, int], dict[str, Tensor]] = {}  # by start, end and rows of a batch

    def reason_against(
        self, steps: Steps, state: State, shared: dict[str, Tensor], rows: Tree, inputs: Tree
    ) -> str | None:
        """Return why batches like this one can't be divided, and what to do; or None, and set `steps.draws`.

        Args:
            steps: The steps of the lane. Its first member is tried.
            state: The stacked state.
            shared: The tensors that all members share.
            rows: A batch, `(row, …)`.
            inputs: The part of the batch that goes into the model.
        """
        # A single row does not show what each row draws, so its form is its own.
        form = len(leaves(rows)[0]) == 1, *(leaf.shape[1:] for leaf in leaves(rows))
        if form not in self._draws:
            found = divide_by_rows(steps, state, shared, rows, inputs)
            if isinstance(found, str):
                return found
            self._draws[form] = found
        steps.draws = self._draws[form]
        return None

    def own_rows(self, group: ProcessGroup, data: Tree, weights: Tensor | None, *, shared: bool) -> OwnRows | None:
        """Return this rank's rows of a batch, or None if it has no rows."""
        start, end = group.rows(leaves(data)[0].shape[0 if shared else 1])
        return None if start == end else self.cut(data, weights, (start, end), shared=shared)

    def cut(self, data: Tree, weights: Tensor | None, rows: tuple[int, int], *, shared: bool) -> OwnRows:
        """Return the rows of a batch from a start to an end."""
        axis, (start, end) = 0 if shared else 1, rows
        count = leaves(data)[0].shape[axis]
        if (start, end, count) not in self._places:
            self._places[start, end, count] = {
                "start": torch.tensor(start, device=self._device),
                "count": torch.tensor(count, device=self._device),
                "share": torch.tensor((end - start) / count, dtype=torch.float32, device=self._device),
            }
        own = map_tree(lambda leaf: leaf.narrow(axis, start, end - start).contiguous(), data)
        weights = None if weights is None else weights[:, start:end].contiguous()
        return own, weights, self._places[start, end, count]
