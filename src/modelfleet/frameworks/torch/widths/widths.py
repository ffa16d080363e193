"""Own shapes of a lane's members whose widths are not equal, and states padded to the widest of them."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.frameworks.torch.fused import state as states
from modelfleet.types import State

Shape = tuple[int, ...]


class Widths:
    """Shapes of the tensors of each variant, of which one is the widest in every size.

    Args:
        models: A model of each variant.
        names: The names of these members, for messages.

    Raises:
        CannotFuseError: No variant is the widest in every size.
    """

    def __init__(self, models: Sequence[nn.Module], names: Sequence[str]) -> None:
        self.models, self.names = list(models), list(names)
        self.layout = states.transposed(models[0])
        self._shapes = [_shapes(model, self.layout) for model in models]
        numbers = [sum(map(math.prod, shapes.values())) for shapes in self._shapes]
        self.widest = numbers.index(max(numbers))
        widest = self._shapes[self.widest]
        for name, own in zip(names, self._shapes, strict=True):
            for tensor, shape in own.items():
                if any(size > most for size, most in zip(shape, widest[tensor], strict=True)):
                    raise CannotFuseError(
                        f"{names[self.widest]!r} has the most parameters, but {tensor!r} of {name!r} is larger: "
                        f"{shape}, not {widest[tensor]}"
                    )
        self._unequal = {name for name in widest if any(own[name] != widest[name] for own in self._shapes)}

    def own_shape(self, path: str, variant: int) -> Shape | None:
        """Return the shape that a variant's tensor is stored in; None if all variants have the same."""
        name = path.rpartition("/")[2]  # `exp_avg/0.weight` has the shape of the parameter
        return self._shapes[variant][name] if name in self._unequal else None

    def padded(self, path: str, tensor: Tensor) -> Tensor:
        """Return tensors `(member, …)` of one variant in the widest variant's shape, with zeros around."""
        shape = self.own_shape(path, self.widest)
        if shape is None or tensor.dim() < 2 or tuple(tensor.shape[1:]) == shape:
            return tensor
        whole = tensor.new_zeros(len(tensor), *shape)
        block = tuple(slice(size) for size in tensor.shape)
        whole[block] = tensor
        return whole

    def cut(self, state: State, variant: int) -> State:
        """Return the padded states of members of one variant in their own shapes."""
        return {
            part: {path: self.cut_one(path, tensor, variant) for path, tensor in own.items()}
            for part, own in state.items()
        }

    def cut_one(self, path: str, tensor: Tensor, variant: int) -> Tensor:
        """Return a view of the own numbers in a padded tensor `(member, …)` of members of one variant."""
        shape = self.own_shape(path, variant)
        if shape is None or tensor.dim() < 2:
            return tensor
        return tensor[(slice(None), *map(slice, shape))]

    def stack(self, found: Sequence[tuple[int, Mapping[str, Tensor]]], name: str, device: torch.device) -> Tensor:
        """Return one tensor of each member, given with the member's variant, as one `(member, …)`."""
        shape = self.own_shape(name, self.widest)
        turned = name in self.layout
        if shape is None:
            return states.stack([own[name] for _, own in found], device, transpose=turned)
        whole = torch.zeros(len(found), *shape, dtype=found[0][1][name].dtype, device=device)
        for variant in sorted({variant for variant, _ in found}):
            rows = [row for row, (other, _) in enumerate(found) if other == variant]
            own = states.stack([found[row][1][name] for row in rows], device, transpose=turned)
            block = (torch.tensor(rows, device=device), *(slice(size) for size in own.shape[1:]))
            whole[block] = own
        return whole


def unequal(models: Sequence[nn.Module]) -> bool:
    """Return True if the tensors of some models do not have the same shapes."""
    first = _plain_shapes(models[0])
    return any(_plain_shapes(model) != first for model in models[1:])


def _plain_shapes(model: nn.Module) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _shapes(model: nn.Module, layout: frozenset[str]) -> dict[str, Shape]:
    """Return the shapes of a model's parameters and buffers, as they are stored."""
    return {
        name: (*shape[:-2], shape[-1], shape[-2]) if name in layout else shape
        for name, shape in _plain_shapes(model).items()
    }
