"""Run many models on few devices, each with the numbers it would have had alone.

import modelfleet as mf

fleet = mf.Fleet.build(make_net, 50, seed=0)
fleet.compile("adamw", "cross_entropy", metrics=["accuracy"], lr=mf.each(rates))
history = fleet.fit((x, y), validation=(xv, yv), epochs=10, batch_size=32)
net = fleet[history.best("val_accuracy")]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# At once: otherwise `modelfleet.each` would become the module of that name when that is imported.
from modelfleet.each import Each, each

__version__ = "0.1.0"

if TYPE_CHECKING:
    from modelfleet.callbacks import Callback, Checkpoint, EarlyStopping
    from modelfleet.ensembles.ensemble import Ensemble, EnsembleAnswer
    from modelfleet.errors import (
        AllFailedError,
        BusyError,
        ClosedError,
        DeadlineError,
        FleetError,
        FleetWarning,
        InputError,
        MissingExtraError,
        QueueFullError,
        RankLostError,
        RowsError,
        StoreError,
        StrategyError,
    )
    from modelfleet.exchange.average import Average, Outer
    from modelfleet.exchange.base import Exchange
    from modelfleet.exchange.distill import Distill
    from modelfleet.exchange.exploit import Exploit
    from modelfleet.exchange.gossip import Gossip
    from modelfleet.exchange.run import ExchangeRun
    from modelfleet.failures import Failure
    from modelfleet.feeds.tables import by
    from modelfleet.fleet import Fleet
    from modelfleet.frameworks.torch.schedules import Schedule
    from modelfleet.graph.chain import Chain
    from modelfleet.graph.graph import Graph
    from modelfleet.graph.split import Split, split
    from modelfleet.graph.topology import Edge
    from modelfleet.history import History
    from modelfleet.loading import load
    from modelfleet.planning.plan import Plan
    from modelfleet.replicas.mapping import Answers, imap, map
    from modelfleet.replicas.pool import Replicas
    from modelfleet.replicas.stats import Stats
    from modelfleet.workers.ray import connect

# The module of each public name, imported when the name is first used: `import modelfleet` stays light.
_MODULES = {
    "AllFailedError": "errors",
    "Answers": "replicas.mapping",
    "Average": "exchange.average",
    "BusyError": "errors",
    "FleetWarning": "errors",
    "Callback": "callbacks",
    "Chain": "graph.chain",
    "Checkpoint": "callbacks",
    "ClosedError": "errors",
    "DeadlineError": "errors",
    "Distill": "exchange.distill",
    "EarlyStopping": "callbacks",
    "Edge": "graph.topology",
    "Ensemble": "ensembles.ensemble",
    "EnsembleAnswer": "ensembles.ensemble",
    "Failure": "failures",
    "Fleet": "fleet",
    "FleetError": "errors",
    "Graph": "graph.graph",
    "Exchange": "exchange.base",
    "ExchangeRun": "exchange.run",
    "Exploit": "exchange.exploit",
    "Gossip": "exchange.gossip",
    "History": "history",
    "InputError": "errors",
    "MissingExtraError": "errors",
    "Outer": "exchange.average",
    "Plan": "planning.plan",
    "QueueFullError": "errors",
    "RankLostError": "errors",
    "Replicas": "replicas.pool",
    "RowsError": "errors",
    "Schedule": "frameworks.torch.schedules",
    "Split": "graph.split",
    "Stats": "replicas.stats",
    "StoreError": "errors",
    "StrategyError": "errors",
    "by": "feeds.tables",
    "connect": "workers.ray",
    "imap": "replicas.mapping",
    "load": "loading",
    "map": "replicas.mapping",
    "split": "graph.split",
}

__all__ = [
    "AllFailedError",
    "Answers",
    "Average",
    "BusyError",
    "Callback",
    "Chain",
    "Checkpoint",
    "ClosedError",
    "DeadlineError",
    "Distill",
    "Each",
    "EarlyStopping",
    "Edge",
    "Ensemble",
    "EnsembleAnswer",
    "Exchange",
    "ExchangeRun",
    "Exploit",
    "Failure",
    "Fleet",
    "FleetError",
    "FleetWarning",
    "Gossip",
    "Graph",
    "History",
    "InputError",
    "MissingExtraError",
    "Outer",
    "Plan",
    "QueueFullError",
    "RankLostError",
    "Replicas",
    "RowsError",
    "Schedule",
    "Split",
    "Stats",
    "StoreError",
    "StrategyError",
    "by",
    "connect",
    "each",
    "imap",
    "load",
    "map",
    "split",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'modelfleet' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"modelfleet.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
