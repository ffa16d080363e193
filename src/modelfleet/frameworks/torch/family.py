"""Families: which torch members are tried in one lane, although their structures differ."""

from collections.abc import Hashable

from modelfleet.frameworks.structure import Signature
from modelfleet.frameworks.torch.task import Task
from modelfleet.frameworks.torch.widths.family import without_sizes


def family(own: Signature, task: Task) -> Hashable:
    """Return a value that is equal for members that are tried in one lane."""
    return without_sizes(own), id(task)
