"""The argument `exchange` of a fit, checked."""

from collections.abc import Sequence

from modelfleet.callbacks import Callback
from modelfleet.errors import InputError, StrategyError
from modelfleet.exchange.base import Exchange
from modelfleet.exchange.distill import Distill
from modelfleet.types import Strategy


def list_exchanges(given: object) -> list[Callback]:
    """Return the exchanges of a fit as a list.

    Raises:
        InputError: Something else was given, or members would distill twice.
    """
    found = [] if given is None else [given] if isinstance(given, Callback) else given
    if not isinstance(found, Sequence) or not all(isinstance(one, Exchange | Distill) for one in found):
        raise InputError(
            f"exchange is {given!r}; expected mf.Average, mf.Gossip, mf.Distill, mf.Exploit or an mf.Exchange of "
            f"yours, or a list of them: exchange=mf.Average(every=1)."
        )
    if sum(isinstance(one, Distill) for one in found) > 1:
        raise InputError(
            "exchange has several Distill. Give one: its weight and temperature hold for all members."
        )
    return list(found)


def refuse_exchange(callbacks: Sequence[Callback], strategy: Strategy, *, clustered: bool) -> None:
    """Raise StrategyError if members can't exchange what they should with this strategy.

    Args:
        callbacks: The exchanges and callbacks of the fit.
        strategy: The strategy that the user chose.
        clustered: True if the fleet is on a Ray cluster.
    """
    distilling = any(isinstance(one, Distill) for one in callbacks)
    if distilling and (clustered or strategy in ("processes", "data_parallel")):
        where = "on a Ray cluster" if clustered else f'with strategy="{strategy}"'
        raise StrategyError(
            f"exchange=Distill is not possible {where}: before every step, each member predicts the batches of "
            f'all others, so they must be in one process. Use strategy="auto", "fused", "interleaved" or '
            f'"threads", and devices of this machine.'
        )
