"""Slices of a lane: neighbouring slots whose members are updated by the same rule.

Forward and backward are one program for all members of a lane. Only the update differs from optimizer to
optimizer, so it runs once for each slice, on views of the stacked state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from modelfleet.frameworks.stacked import runs
from modelfleet.frameworks.torch.optimizers.stacked import Optimizer
from modelfleet.trees import map_tree
from modelfleet.types import State, Tree

UPDATED = ("params", "buffers", "member", "sums", "metrics")
"""Parts of a state that an update reads or changes, besides the optimizer's tensors."""


@dataclass(frozen=True)
class Rule:
    """Update of a member's parameters: its optimizer, and whether gradients are clipped before."""

    optimizer: Optimizer
    clip: bool = False


class HasRule(Protocol):
    """A task that has an optimizer."""

    @property
    def optimizer(self) -> Optimizer:
        """Return the optimizer."""
        ...

    @property
    def clip(self) -> bool:
        """Return True if gradients are clipped."""
        ...


class Rules:
    """Update rules of a lane's members.

    Args:
        tasks: The task of each member. Its optimizer and its `clip` are the member's rule.
        known: Rules that have numbers already.
    """

    def __init__(self, tasks: Sequence[HasRule], known: Sequence[Rule] = ()) -> None:
        self.all = list(known)
        """Different rules of the lane, by number."""
        numbers: dict[int, int] = {}  # by task, since most members have the same
        for task in tasks:
            if id(task) not in numbers:
                rule = Rule(task.optimizer, task.clip)
                if rule not in self.all:
                    self.all.append(rule)
                numbers[id(task)] = self.all.index(rule)
        self.numbers = np.array([numbers[id(task)] for task in tasks], dtype=np.int64)
        """Number of each member's rule, `(member,)`."""

    def of(self, position: int) -> Rule:
        """Return the rule of the member at a position."""
        return self.all[self.numbers[position]]

    def together(self, positions: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return indices into some positions, those of members of one rule together."""
        numbers = self.numbers[np.asarray(positions, np.int64)]
        return [np.flatnonzero(numbers == number) for number in dict.fromkeys(numbers.tolist())]

    def initial(self, params: Mapping[str, Tensor], hyper: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the optimizers' tensors before the first step, by `key/parameter`.

        A member whose own optimizer does not have a tensor has zeros there.
        """
        found: dict[str, Tensor] = {}
        width = len(self.numbers)
        for own in self.together(range(width)):
            for name, whole in params.items():
                rows = torch.from_numpy(own).to(whole.device)
                some = {key: column[rows] for key, column in hyper.items()}
                for key, tensor in self.of(own[0]).optimizer.initial(whole[rows], some).items():
                    if len(own) == width:
                        found[f"{key}/{name}"] = tensor
                        continue
                    zeros = tensor.new_zeros(width, *tensor.shape[1:])
                    found.setdefault(f"{key}/{name}", zeros)[rows] = tensor
        return found

    def slices(self, positions: np.ndarray) -> list["Slice"]:
        """Return the slices of slots that belong to the members at these positions."""
        return slices_of(self.numbers[positions], [rule.optimizer.tensor_names for rule in self.all])


class Slice(NamedTuple):
    """Neighbouring slots whose members have the same rule."""

    rule: int
    """Number of the rule."""
    tensor_names: tuple[str, ...]
    """Names of the optimizer's tensors, or what they have before a slash. The state has those of all rules."""
    rows: tuple[int, int] | None = None
    """First slot, and number of slots; None for all slots of a state."""

    @property
    def alone(self) -> "Slice":
        """Return the slice as it is in a state of its slots only."""
        return self._replace(rows=None)

    def of(self, tree: Tree) -> Tree:
        """Return views of the slice's rows of every tensor `(slot, …)`."""
        if self.rows is None:
            return tree
        start, length = self.rows
        return map_tree(lambda tensor: tensor.narrow(0, start, length), tree)

    def state(self, state: State) -> State:
        """Return views of everything in a state that an update of this slice reads or changes.

        They have the same form in every lane, whatever the optimizers of its other members are.
        """
        optimizer = {
            path: tensor
            for path, tensor in state["optimizer"].items()
            if path.partition("/")[0] in self.tensor_names
        }
        return self.of({**{part: state[part] for part in UPDATED if part in state}, "optimizer": optimizer})

    def packed(self, state: State) -> State:
        """Return views of a packed state (`Programs._packed`), with the buffers of this slice's rule only."""
        buffers = {kind: state["packed"][kind] for kind in ("", *self.tensor_names)}
        if self.rows is None and list(buffers) == list(state["packed"]):
            return state
        return self.of({**state, "packed": buffers})


def slices_of(numbers: np.ndarray, tensor_names: Sequence[tuple[str, ...]]) -> list[Slice]:
    """Return the slices of slots, from the number of each slot's rule, and the tensor names of each rule."""
    found = runs(numbers)
    return [
        Slice(number, tensor_names[number], None if len(found) == 1 else (start, stop - start))
        for number, start, stop in found
    ]
