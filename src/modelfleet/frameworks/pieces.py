"""What an adapter says about a model that is to be cut: its pieces in order, and how to build stages from them.

A *value* is a tensor that one piece makes and others need. The inputs of the model are values, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from modelfleet.types import Model


class CannotCutError(Exception):
    """Raised by an adapter if a model can't be cut. The message says why, and what to do."""


@dataclass(frozen=True)
class Timing:
    """Seconds that a part of a model takes on the example. `backward` is 0 if it was not asked for."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Return the seconds of a whole step."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Piece:
    """A part of a model that stays together. Pieces stand in topological order."""

    name: str
    timing: Timing
    parameters: int = 0
    weight_bytes: int = 0
    """Size of the weights, buffers included."""
    trained_bytes: int = 0
    """Size of the weights that get gradients; 0 if the model is not to be trained."""
    activation_bytes: int = 0
    """Size of what is kept for the backward pass, for a batch like the example."""
    makes: Mapping[str, int] = field(default_factory=dict)
    """Values that later pieces need, with their size in bytes."""
    needs: tuple[str, ...] = ()
    """Values of earlier pieces, and inputs of the model."""

    @property
    def memory(self) -> int:
        """Return the bytes of weights, gradients, two moments of an optimizer, and activations."""
        return self.weight_bytes + 3 * self.trained_bytes + self.activation_bytes


@dataclass(frozen=True)
class BuiltStage:
    """A stage as an adapter builds it."""

    model: Model
    inputs: tuple[str, ...]
    """Values that it is called with, in this order."""
    paths: Mapping[str, str]
    """For each of its parameters and buffers, the name in the model that was cut."""


class Pieces(Protocol):
    """A model in pieces, with what belongs to its example."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """Return the pieces."""
        ...

    @property
    def inputs(self) -> Mapping[str, int]:
        """Return the model's inputs with their bytes, in the order of the example's leaves."""
        ...

    @property
    def reasons(self) -> Sequence[str]:
        """Return sentences that say how the pieces were found."""
        ...

    def build(self, start: int, stop: int, outputs: Sequence[str]) -> BuiltStage:
        """Return the pieces from `start` to before `stop` as a stage that returns these values.

        The stage of the last piece returns the model's output instead.
        """
        ...

    def measure(self, cuts: Sequence[tuple[int, int, Sequence[str]]]) -> Sequence[Timing]:
        """Return the time of each stage, given as for `build`. They are measured in turns."""
        ...

    def check(self, cuts: Sequence[tuple[int, int, Sequence[str]]]) -> None:
        """Run the stages one after the other, each given as for `build`, and compare them with the model.

        Raises:
            CannotCutError: The stages compute something else than the model.
        """
        ...
