"""Schedules: what each device of a graph of models does, in which order, and the proof that it ends.

This package computes with plain values only. It knows no framework and starts nothing.
"""

from modelfleet.schedules.building import ScheduleName, build
from modelfleet.schedules.checking import check
from modelfleet.schedules.operations import Kind, Operation, Schedule
from modelfleet.schedules.simulation import simulate
from modelfleet.schedules.spec import EdgeSpec, GraphSpec, NodeSpec
from modelfleet.schedules.tensors import peak_bytes
from modelfleet.schedules.timeline import EdgeTotals, Event, NodeTotals, Timeline

__all__ = [
    "EdgeSpec",
    "EdgeTotals",
    "Event",
    "GraphSpec",
    "Kind",
    "NodeSpec",
    "NodeTotals",
    "Operation",
    "Schedule",
    "ScheduleName",
    "Timeline",
    "build",
    "check",
    "peak_bytes",
    "simulate",
]
