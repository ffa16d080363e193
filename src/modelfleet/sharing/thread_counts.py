"""Threads of logical CPU devices: each device gets its part of the cores for its steps."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from modelfleet.devices import Device, parse_devices, threads_of
from modelfleet.lanes import Lane


@contextmanager
def divided_cores(lanes: Iterable[Lane]) -> Iterator[Callable[[], None]]:
    """Divide the cores between several logical CPUs while their lanes run in threads of this process.

    Yields a function that each thread calls first. Afterwards steps have as many threads as before.
    """
    devices: dict[Device, None] = {}
    adjustable: dict[int, tuple[Any, int]] = {}
    for lane in lanes:
        (device,) = parse_devices(lane.device) or ()
        framework: Any = lane.members[0].framework  # may have more names than an adapter must
        if device.kind == "cpu":
            devices[device] = None
            if hasattr(framework, "use_threads"):
                adjustable[id(framework)] = framework, framework.threads()
    if len(devices) < 2:
        yield lambda: None
        return
    count = threads_of(list(devices))

    def start_thread() -> None:
        for framework, before in adjustable.values():
            framework.use_threads(min(count, before))

    try:
        yield start_thread
    finally:
        for framework, before in adjustable.values():
            framework.use_threads(before)
