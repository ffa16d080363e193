"""Loaders of a fit: where each is, so that a checkpoint can hold it and a resumed run sees the same batches."""

import warnings
from collections.abc import Sequence

from modelfleet.errors import FleetWarning
from modelfleet.feeds import Feed
from modelfleet.feeds.loader_state import with_prefix
from modelfleet.frameworks import global_generators
from modelfleet.runs.lane_run import LaneRun


class Loaders:
    """Loaders of all lanes of a fit.

    Args:
        runs: The runs of the lanes. Runs may join later.
    """

    def __init__(self, runs: Sequence[LaneRun]) -> None:
        self._runs = runs
        self._warned = False

    def state(self) -> global_generators.State:
        """Return where the loaders of this process are at the start of their next epoch."""
        return {
            f"feed-{number}/{name}": state
            for number, run, feed in self._feeds()
            if run.remote is None
            for name, state in feed.state().items()
        }

    def rewind(self, generators: global_generators.State, *, first: bool) -> None:
        """Set the random generators so that loaders shuffle as they did in the epoch that is resumed.

        Args:
            generators: The generators at the start of that epoch, with what `state` returned.
            first: True if it is the first epoch. All loaders are looked into before that.
        """
        global_generators.restore(generators)
        for number, _, feed in self._feeds():
            feed.rewind(with_prefix(generators, f"feed-{number}/"))
        for _, _, feed in self._feeds() if first else ():
            feed.first()

    def warn_of_remote(self) -> None:
        """Warn once if a worker reads a loader whose place only the worker knows."""
        remote = [run for _, run, feed in self._feeds() if run.remote is not None and feed.has_state]
        if remote and not self._warned:
            self._warned = True
            warnings.warn(
                f"the data of member {remote[0].names[0]!r} are a loader with its own generator, or with "
                f"steps_per_epoch, which a worker reads. A checkpoint does not hold where it is, so a resumed run "
                f'will see other batches. Use strategy="interleaved", or a loader without these.',
                FleetWarning,
                stacklevel=2,
            )

    def _feeds(self) -> list[tuple[int, LaneRun, Feed]]:
        """Return the feeds of all lanes, those of the validation data last, each with a number and its run."""
        found = [*((run, run.feed) for run in self._runs), *((run, run.validation) for run in self._runs)]
        return [(number, run, feed) for number, (run, feed) in enumerate(found) if feed is not None]
