"""Members of fleets whose numbers went bad: those that are set aside, and those that stop the graph."""

from collections.abc import Mapping, Sequence

from modelfleet.errors import AllFailedError
from modelfleet.failures import Failure
from modelfleet.frameworks.errors import REASONS
from modelfleet.graph.orders import StepReport
from modelfleet.graph.units import Units
from modelfleet.history import History


def failed_members(reports: Sequence[StepReport], units: Units, *, epoch: int, step: int) -> dict[str, Failure]:
    """Return the failures of a step, by the members' names in the history."""
    return {
        units.name_of(node, member): Failure(epoch, step, REASONS[trouble])
        for report in reports
        for node, own in report.failed.items()
        for member, trouble in own.items()
    }


def stopped_by(failed: Mapping[str, Failure], history: History) -> AllFailedError:
    """Return the error of a graph that can't go on without some members."""
    name, failure = next(iter(failed.items()))
    others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return AllFailedError(
        f"member {name!r}{others} failed in epoch {failure.epoch}, step {failure.step:,}: {failure.reason}. Its "
        f"gradient reaches nodes that it shares with other members, so the graph stopped before this step. Often "
        f"a lower lr helps, or clip_norm=1.0; look for NaN in the data; or leave the member out, or freeze what "
        f"it shares.",
        history,
    )
