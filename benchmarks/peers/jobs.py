"""A job from nothing: by one fleet, by a plain torch loop, or by a fleet for each structure."""

from collections.abc import Callable

# torch imports its compiler with the first optimizer that is made, or the first step that is traced. modelfleet
# imports its adapter with the first model. Both are imports like the others: all peers have them before the clock
# starts.
import torch._dynamo  # noqa: F401

import modelfleet.frameworks.torch.engine  # noqa: F401
from benchmarks.entrants import FLEET, PLAIN
from benchmarks.jobs import by_fleet, by_lanes, by_loop, job_of
from benchmarks.peers import Round, compete_in_cases
from benchmarks.promises import LANES

WAYS = {FLEET: by_fleet, PLAIN: by_loop, LANES: by_lanes}


def prepare(name: str, who: str, quick: bool) -> Callable[[str], Round]:
    return lambda case: WAYS[who](job_of(name, case, quick))


if __name__ == "__main__":
    compete_in_cases(prepare)
