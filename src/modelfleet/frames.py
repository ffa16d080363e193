"""Tables of a history as pandas frames, and the packages that tables and pictures need."""

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from modelfleet.errors import FleetError, MissingExtraError

if TYPE_CHECKING:
    from pandas import DataFrame


class _MissingPackageError(MissingExtraError):
    """Raised if a package is missing that no extra of modelfleet installs."""

    def __init__(self, package: str, purpose: str) -> None:
        FleetError.__init__(
            self,
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Install it with: pip install {package}",
        )


def import_package(module: str, purpose: str) -> ModuleType:
    """Return a module of a package that modelfleet does not require.

    Raises:
        MissingExtraError: The package is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is there; something that it needs is not
        raise _MissingPackageError(package, purpose) from error


def make_frame(
    columns: Mapping[str, Mapping[str, list[Any]]],
    hyperparameters: Mapping[str, Mapping[str, object]],
    first: Sequence[str],
    last: Sequence[str],
) -> "DataFrame":
    """Return a frame with the rows of all members. A hyperparameter with a column's name gets a prefix.

    Args:
        columns: Each member's columns by name, all of one length.
        hyperparameters: Each member's hyperparameters. A list has one value for each row.
        first: The columns before the hyperparameters, "member" and "epoch" among them.
        last: The columns after them. A member that does not have one of them has NaN there.
    """
    pandas = import_package("pandas", "history.frame()")
    taken = {*first, *last}
    keys = dict.fromkeys(key for name in columns for key in hyperparameters.get(name, {}))
    renamed = {key: f"hyperparameter_{key}" if key in taken else key for key in keys}
    found: dict[str, list[object]] = {column: [] for column in (*first, *renamed.values(), *last)}
    for name, own in columns.items():
        rows = len(own["epoch"])
        found["member"] += [name] * rows
        for key, column in renamed.items():
            value = hyperparameters.get(name, {}).get(key)
            found[column] += value if isinstance(value, list) else [value] * rows
        for column in (*first[1:], *last):
            found[column] += own.get(column, [math.nan] * rows)
    return pandas.DataFrame(found)
