"""Errors that engines raise for their steps, and codes that say why a member was set aside."""

from collections.abc import Mapping, Sequence

from modelfleet.errors import FleetError, InputError

# Values of `Engine.trouble`.
FINE, LOSS, GRADIENT, SCALE = 0, 1, 2, 3
REASONS = {
    LOSS: "its loss became NaN or infinite",
    GRADIENT: "its gradient became NaN or infinite",
    SCALE: "its float16 gradients overflowed at every loss scale",
}


class NotCompiledError(InputError):
    """Raised if a member has to be compiled first."""


class CannotFuseError(FleetError):
    """Raised if one program can't step several members. The message names the operation that prevents it.

    Attributes:
        shared: True if the cause is state that the members would share even if they took turns.
        together: Numbers of the lane's variants that can be fused with each other; None if it is not known.
    """

    def __init__(
        self, message: str, *, shared: bool = False, together: Sequence[Sequence[int]] | None = None
    ) -> None:
        super().__init__(message)
        self.shared = shared
        self.together = together


class StepError(FleetError):
    """Raised if steps of some members raised. Their state is unchanged; all other members took their step.

    Attributes:
        causes: The exception of each failed member, by slot.
    """

    def __init__(self, causes: Mapping[int, Exception]) -> None:
        super().__init__("; ".join(f"slot {slot}: {type(e).__name__}: {e}" for slot, e in causes.items()))
        self.causes = dict(causes)
