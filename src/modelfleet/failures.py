"""Failures of members: why each was set aside, and the error of a fit in which none is left."""

from collections.abc import Mapping
from dataclasses import dataclass

from modelfleet.errors import AllFailedError
from modelfleet.frameworks.errors import REASONS


@dataclass(frozen=True)
class Failure:
    """Reason why a member was set aside.

    Attributes:
        epoch: The epoch in which it failed, counted from 1.
        step: The step of that fit at which it failed.
        reason: The reason in words, such as "loss is NaN".
    """

    epoch: int
    step: int
    reason: str

    @property
    def diverged(self) -> bool:
        """True if the member's numbers went bad; False if an exception was raised or a worker died."""
        return self.reason in REASONS.values()

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step:,}: {self.reason}"


def all_failed(failed: Mapping[str, Failure], history: object, cause: BaseException | None) -> AllFailedError:
    """Return the error of a fit whose members have all failed: such a fit must not look like a success.

    Args:
        failed: The failure of every member.
        history: The history of the fit.
        cause: The exception of a member's step or data, if there is one.
    """
    # An exception, or a worker that died, says more about the cause than numbers that became NaN.
    name = min(failed, key=lambda name: (failed[name].diverged, failed[name].epoch, failed[name].step))
    failure = failed[name]
    advice = "Often a lower lr helps, or clip_norm=1.0; look for NaN in the data. " if failure.diverged else ""
    everybody = f"All {len(failed):,} members failed" if len(failed) > 1 else "It was the only member"
    error = AllFailedError(
        f"member {name!r} failed in epoch {failure.epoch}, step {failure.step:,}: {failure.reason}. {advice}"
        f"{everybody}: the history of this error has every reason.",
        history,
    )
    error.__cause__ = None if failure.diverged else cause
    return error
