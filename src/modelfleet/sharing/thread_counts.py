"""Threads of lanes that run side by side on the CPU: each lane gets its part of the cores for its steps.

If each used all cores, every operation would wait for a core that another lane has: while another process kept one
of two cores busy, a small batched product took 0.08 ms on one thread, and 8 ms on two.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from modelfleet.devices import Device, cores, parse_devices
from modelfleet.lanes import Lane


@contextmanager
def divided_cores(lanes: Iterable[Lane]) -> Iterator[Callable[[], None]]:
    """Divide the cores between lanes that run in threads of this process.

    There is a thread for each logical CPU or, if there is only one, for each of its lanes. Yields a function that
    each thread calls first. Afterwards steps have as many threads as before.
    """
    devices: dict[Device, None] = {}
    at_once: Counter[int] = Counter()  # lanes by wave, since waves come one after the other
    adjustable: dict[int, tuple[Any, int]] = {}
    for lane in lanes:
        (device,) = parse_devices(lane.device) or ()
        framework: Any = lane.members[0].framework  # may have more names than an adapter must
        if device.kind == "cpu":
            devices[device] = None
            at_once[lane.spec.wave] += 1
            if hasattr(framework, "use_threads"):
                adjustable[id(framework)] = framework, framework.threads()
    threads = len(devices) if len(devices) > 1 else max(at_once.values(), default=0)
    if threads < 2:
        yield lambda: None
        return
    count = max(1, cores() // threads)

    def start_thread() -> None:
        for framework, before in adjustable.values():
            framework.use_threads(min(count, before))

    try:
        yield start_thread
    finally:
        for framework, before in adjustable.values():
            framework.use_threads(before)
