"""Splitting arrays into training and validation data."""

from collections.abc import Mapping

from modelfleet.each import Each, per_member
from modelfleet.errors import InputError
from modelfleet.feeds import is_loader
from modelfleet.feeds.checking import as_arrays
from modelfleet.members import Member
from modelfleet.trees import map_tree
from modelfleet.types import Data


def split_validation(data: Data, fraction: float, members: Mapping[str, Member]) -> tuple[Data, Data]:
    """Split off the last rows of every member's arrays, as Keras does.

    Args:
        data: Arrays, or `each(...)` of arrays.
        fraction: The part of the rows that becomes validation data, between 0 and 1.
        members: The members of the fleet.

    Returns:
        The training data and the validation data.

    Raises:
        InputError: The data are a loader, or one of the two would have no rows.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise InputError(f"validation_split is {fraction!r}; expected a number between 0 and 1, such as 0.2.")
    names = list(members)
    known: dict[int, tuple[Data, Data]] = {}  # by the id of a data set: members may share one
    for name, value in zip(names, per_member(data, names, "data"), strict=True):
        if id(value) not in known:
            label = f"data of member {name!r}" if isinstance(data, Each) else "data"
            known[id(value)] = _split(value, fraction, members[name], label)
    if not isinstance(data, Each):
        return known[id(data)]
    pairs = {name: known[id(value)] for name, value in zip(names, per_member(data, names, "data"), strict=True)}
    return Each({name: pair[0] for name, pair in pairs.items()}), Each({n: pair[1] for n, pair in pairs.items()})


def _split(value: Data, fraction: float, member: Member, label: str) -> tuple[Data, Data]:
    arrays = member.framework.arrays
    if is_loader(value, arrays, label):
        raise InputError(
            f"validation_split is for arrays, and {label} is a loader. Give a second loader as validation."
        )
    tree, rows = as_arrays(value, arrays, label)
    kept = int(rows * (1 - fraction))
    if kept in (0, rows):
        raise InputError(
            f"validation_split={fraction} leaves {kept} rows to train on and {rows - kept} to validate with: "
            f"{label} has {rows}. Choose another fraction, or give more rows."
        )
    return map_tree(lambda leaf: leaf[:kept], tree), map_tree(lambda leaf: leaf[kept:], tree)
