"""The threads that each of several logical CPU devices has for its steps."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from modelfleet.devices import Device, threads_of
from modelfleet.lanes import Lane


@contextmanager
def cores(lanes: Iterable[Lane]) -> Iterator[Callable[[], None]]:
    """While lanes of several logical CPUs run in threads of this process: gives what each thread is to call first.

    Afterwards steps have as many threads as before.
    """
    devices: dict[Device, None] = {}
    tellable: dict[int, tuple[Any, int]] = {}
    for lane in lanes:
        device = lane.part.device
        framework: Any = lane.members[0].framework  # which may have more names than an adapter must
        if device is not None and device.kind == "cpu":
            devices[device] = None
            if hasattr(framework, "use_threads"):
                tellable[id(framework)] = framework, framework.threads()
    if len(devices) < 2:
        yield lambda: None
        return
    count = threads_of(list(devices))

    def begin() -> None:
        for framework, before in tellable.values():
            framework.use_threads(min(count, before))

    try:
        yield begin
    finally:
        for framework, before in tellable.values():
            framework.use_threads(before)
