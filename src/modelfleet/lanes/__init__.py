"""Lanes: which members step together, and how the lanes that step them are built."""

from modelfleet.lanes.builder import LaneBuilder
from modelfleet.lanes.device_pool import DevicePool
from modelfleet.lanes.groups import Groups
from modelfleet.lanes.lane import Lane
from modelfleet.lanes.spec import LaneSpec

__all__ = ["DevicePool", "Groups", "Lane", "LaneBuilder", "LaneSpec"]
