"""Own shapes of a lane's members whose widths are not equal, and states padded to the widest of them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.stacked import Positions
from modelfleet.frameworks.torch.fused import state as states
from modelfleet.types import State

Shape = tuple[int, ...]


class Widths:
    """Shapes of the tensors of members of unequal widths, of which one is the widest in every size.

    Args:
        members: The members of a lane, by name.
        variants: The variant of each. Members of one variant have the same shapes.

    Raises:
        CannotFuseError: No member is the widest in every size.
    """

    def __init__(self, members: Sequence[tuple[str, nn.Module]], variants: Sequence[int]) -> None:
        self.layout = states.transposed(members[0][1])
        self._shapes: list[dict[str, Shape]] = []  # by width
        self._names: list[str] = []  # of a member of each width
        firsts: list[int] = []
        known: dict[int, int] = {}  # by variant, the width
        for position, ((name, model), variant) in enumerate(zip(members, variants, strict=True)):
            if variant in known:
                continue
            shapes = _shapes(model, self.layout)
            known[variant] = self._shapes.index(shapes) if shapes in self._shapes else len(self._shapes)
            if known[variant] == len(self._shapes):
                self._shapes.append(shapes)
                self._names.append(name)
                firsts.append(position)
        self._of_position = [known[variant] for variant in variants]
        numbers = [sum(map(math.prod, shapes.values())) for shapes in self._shapes]
        self._widest = numbers.index(max(numbers))
        self.template = firsts[self._widest]
        """Position of a member that is the widest."""
        self.widest_name = self._names[self._widest]
        self._refuse_wider()
        widest = self._shapes[self._widest]
        self._unequal = {name for name in widest if any(own[name] != widest[name] for own in self._shapes)}

    def _refuse_wider(self) -> None:
        widest = self._shapes[self._widest]
        for name, own in zip(self._names, self._shapes, strict=True):
            for tensor, shape in own.items():
                if any(size > most for size, most in zip(shape, widest[tensor], strict=True)):
                    raise CannotFuseError(
                        f"{self.widest_name!r} has the most parameters, but {tensor!r} of {name!r} is larger: "
                        f"{shape}, not {widest[tensor]}"
                    )

    @property
    def several(self) -> bool:
        """Return True if the widths are not all equal."""
        return len(self._shapes) > 1

    def __len__(self) -> int:
        return len(self._shapes)

    def of(self, position: int) -> int:
        """Return the width of a member, as a number that the methods below take."""
        return self._of_position[position]

    def by_width(self, positions: Positions) -> list[tuple[int, list[int]]]:
        """Return the rows of some positions by width."""
        found: dict[int, list[int]] = {}
        for row, position in enumerate(positions):
            found.setdefault(self._of_position[position], []).append(row)
        return list(found.items())

    def own_shape(self, path: str, width: int) -> Shape | None:
        """Return the shape that a tensor of a width is stored in; None if all widths have the same."""
        name = path.rpartition("/")[2]  # `exp_avg/0.weight` has the shape of the parameter
        return self._shapes[width][name] if name in self._unequal else None

    def padded(self, path: str, tensor: Tensor) -> Tensor:
        """Return tensors `(member, …)` of one width in the widest member's shape, with zeros around."""
        shape = self.own_shape(path, self._widest)
        if shape is None or tensor.dim() < 2 or tuple(tensor.shape[1:]) == shape:
            return tensor
        whole = tensor.new_zeros(len(tensor), *shape)
        block = tuple(slice(size) for size in tensor.shape)
        whole[block] = tensor
        return whole

    def cut(self, state: State, width: int) -> State:
        """Return views of the padded states of members of one width, in their own shapes."""
        return {
            part: {path: self.cut_one(path, tensor, width) for path, tensor in own.items()}
            for part, own in state.items()
        }

    def cut_one(self, path: str, tensor: Tensor, width: int) -> Tensor:
        """Return a view of the own numbers in a padded tensor `(member, …)` of members of one width."""
        shape = self.own_shape(path, width)
        if shape is None or tensor.dim() < 2:
            return tensor
        return tensor[(slice(None), *map(slice, shape))]

    def stack(self, tensors: Sequence[Tensor], name: str, positions: Positions, device: torch.device) -> Tensor:
        """Return one tensor of each of some members as one `(member, …)`, padded to the widest."""
        shape, turned = self.own_shape(name, self._widest), name in self.layout
        if shape is None:
            return states.stack(tensors, device, transpose=turned)
        whole = torch.zeros(len(tensors), *shape, dtype=tensors[0].dtype, device=device)
        for _, rows in self.by_width(positions):
            own = states.stack([tensors[row] for row in rows], device, transpose=turned)
            whole[(torch.tensor(rows, device=device), *(slice(size) for size in own.shape[1:]))] = own
        return whole


def _plain_shapes(model: nn.Module) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _shapes(model: nn.Module, layout: frozenset[str]) -> dict[str, Shape]:
    """Return the shapes of a model's parameters and buffers, as they are stored."""
    return {
        name: (*shape[:-2], shape[-1], shape[-2]) if name in layout else shape
        for name, shape in _plain_shapes(model).items()
    }
