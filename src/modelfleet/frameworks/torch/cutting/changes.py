"""What a forward pass changes of a model: its tensors, and the values that its Python keeps."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelfleet.frameworks.torch.python_state.snapshot import PythonSnapshot


@dataclass(frozen=True)
class Changes:
    """What is there after a pass.

    Attributes:
        tensors: Copies of the parameters, the buffers and other tensors that the model holds, by name.
        tracked: Names of those that autograd would go back through at the next pass.
        python: Names of other values that have changed, such as `self.calls`.
    """

    tensors: Mapping[str, Tensor]
    tracked: frozenset[str]
    python: frozenset[str]


class State:
    """The state of a model before some passes, to see what they change, and to undo it.

    Args:
        model: The model, in the mode of the passes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._snapshot = PythonSnapshot([("self", model)])
        self._before = [(own, own.detach().clone(), own.grad_fn) for own in self._tensors().values()]

    def changes(self) -> Changes:
        """Return what has changed since the state was taken."""
        tensors = self._tensors()
        # A buffer that was replaced is compared by its values.
        others = {name for name in self._snapshot.changed() if name.removeprefix("self.") not in tensors}
        return Changes(
            {name: own.detach().clone() for name, own in tensors.items()},
            frozenset(name for name, own in tensors.items() if own.grad_fn is not None),
            frozenset(others),
        )

    def restore(self) -> None:
        """Undo every change."""
        self._snapshot.restore()
        with torch.no_grad():
            for own, before, history in self._before:
                if own.grad_fn is not history:
                    own.detach_()
                if not torch.equal(own, before):
                    own.copy_(before)

    def _tensors(self) -> dict[str, Tensor]:
        held = (own for own in self._snapshot.tensors.values() if own.layout == torch.strided)
        others = {f"tensor {number} of its Python": own for number, own in enumerate(held)}
        return others | dict(self._model.named_parameters()) | dict(self._model.named_buffers())
