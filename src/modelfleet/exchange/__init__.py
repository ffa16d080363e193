"""Exchange while training: members that learn from each other, at fixed steps or epochs of a fit."""

from modelfleet.exchange.average import Average, Outer
from modelfleet.exchange.base import Exchange
from modelfleet.exchange.distill import Distill
from modelfleet.exchange.exploit import Exploit
from modelfleet.exchange.gossip import Gossip
from modelfleet.exchange.run import ExchangeRun

__all__ = ["Average", "Distill", "Exchange", "ExchangeRun", "Exploit", "Gossip", "Outer"]
