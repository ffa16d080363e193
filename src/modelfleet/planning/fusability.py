"""Fusing: which groups can be fused on their data, and which strategies are refused."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from modelfleet.devices import Device
from modelfleet.errors import FleetWarning, StrategyError
from modelfleet.formatting import without_period
from modelfleet.frameworks.errors import CannotFuseError
from modelfleet.lanes import LaneSpec
from modelfleet.lanes.spec import join_reasons
from modelfleet.members import Member
from modelfleet.planning import width_classes
from modelfleet.runs.opening import LaneOpener
from modelfleet.types import Strategy
from modelfleet.unknown_names import unknown

STRATEGIES: tuple[str, ...] = get_args(Strategy)


def check_strategy(strategy: str) -> None:
    """Raise an error that names the nearest strategy if there is none of this name."""
    if strategy not in STRATEGIES:
        raise unknown("strategy", strategy, STRATEGIES)


def split_unfusable(opener: LaneOpener, specs: Sequence[LaneSpec], strategy: Strategy) -> list[LaneSpec]:
    """Return specs whose lanes can take steps: members that can't be fused get a lane each.

    Raises:
        StrategyError: The strategy is "fused", and some members can't be.
    """
    found: list[LaneSpec] = []
    for spec in specs:
        try:
            found.append(opener.open(spec).spec)
        except CannotFuseError as error:
            first = spec.members[0]
            if strategy == "fused":
                raise StrategyError(
                    f"member {first!r} and those like it can't be fused: {without_period(error)}. "
                    f'Drop strategy="fused" and let them take turns.'
                ) from error
            parts = _by_variant(opener, spec, error)
            if len(parts) > 1:
                found += split_unfusable(opener, parts, strategy)
                continue
            if error.shared and opener.kind == "train":
                warnings.warn(
                    f"members {first!r} and {spec.members[1]!r} take turns and share state that they change: "
                    f"{without_period(error)}. "
                    f"Their numbers depend on each other. Give each its own loss or objective, by "
                    f"compile(..., members=[name]), or its own copy of what is shared.",
                    FleetWarning,
                    stacklevel=2,
                )
            single = replace(spec, fused=False, apart_because=f"not fused: {error}", split=None)
            found += [opener.open(replace(single, members=(name,))).spec for name in spec.members]
    return found


def _by_variant(opener: LaneOpener, spec: LaneSpec, error: CannotFuseError) -> list[LaneSpec]:
    """Return a lane for each width or variant of a lane's members, with the reason why they can't share one."""
    reason = join_reasons(spec.apart_because, f"not fused with {spec.members[0]!r}: {error}")
    # Those of one width may still be fused, although they differ in numbers.
    widths = width_classes.by_width(opener.groups, spec)
    variants = widths if len(widths) > 1 else opener.groups.variants(spec)
    together = error.together or [[number] for number in range(len(variants))]
    names = [tuple(name for number in own for name in variants[number]) for own in together]
    parts = [replace(spec, members=own, apart_because=reason) for own in names]
    return [replace(parts[0], apart_because=spec.apart_because), *parts[1:]]


def refuse_unfused(specs: Sequence[LaneSpec]) -> None:
    """Raise StrategyError for `strategy="fused"` if the specs are not one group."""
    for spec in specs:
        if spec.apart_because is not None:
            raise StrategyError(
                f"not all members can be fused: {spec.apart_because}. "
                f'Remove the difference, or drop strategy="fused" and let them take turns.'
            )


def refuse_on_cluster(strategy: Strategy) -> None:
    """Raise StrategyError for a strategy that needs this machine's devices, since actors take all steps."""
    if strategy not in ("auto", "processes", "data_parallel"):
        raise StrategyError(
            f'strategy="{strategy}" is for the devices of this machine, and the fleet is on a Ray cluster. '
            f'Use "auto" or "processes" there.'
        )


def refuse_data_parallel(members: Sequence[Member], devices: Sequence[Device]) -> None:
    """Raise StrategyError if `strategy="data_parallel"` is impossible, whatever the models are."""
    if len(devices) < 2:
        raise StrategyError(
            f'strategy="data_parallel" spreads each member over several devices, and there is only '
            f'{", ".join(map(str, devices))}. Name more, as in devices="cuda:0,cuda:1".'
        )
    for member in members:
        if not hasattr(member.framework, "ProcessGroup"):
            raise StrategyError(
                f'strategy="data_parallel" is for torch models, and member {member.name!r} is a '
                f"{member.framework.NAME} model. Let whole members share the devices: leave the strategy out."
            )


def split_indivisible(opener: LaneOpener, specs: Sequence[LaneSpec]) -> list[LaneSpec]:
    """Return specs whose lanes can be spread over devices by rows. Variants that draw differently are split.

    Raises:
        StrategyError: Some members need all rows of a batch at once.
    """
    found: list[LaneSpec] = []
    for spec, one in zip(specs, opener.open_all(specs), strict=True):
        try:
            reason = one.lane.engine.why_rows_stay_together(one.feed.first())
        except CannotFuseError as error:
            parts = _by_variant(opener, spec, error)
            if len(parts) == 1:
                raise
            found += split_indivisible(opener, parts)
            continue
        if reason is not None:
            name = one.lane.names[0]
            raise StrategyError(f'strategy="data_parallel" is not possible for member {name!r}: {reason}.')
        found.append(spec)
    return found
