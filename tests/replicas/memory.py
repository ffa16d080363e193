"""What a replica of a large model takes in a worker, beside the memory that all of them share."""

import gc
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from modelfleet import frameworks
from modelfleet.devices import parse_devices
from modelfleet.workers import places
from modelfleet.workers.process import dismiss

TWO = parse_devices("cpu:0,cpu:1") or ()


def asked_by_two(framework: Any, small: Any, large: Any, x: np.ndarray) -> list[tuple[float, np.ndarray]]:
    """Two workers with a replica of `large` at the same time: how many times its weights the memory of each grew
    by, and what it answered. `small` is of the same kind, for what a process needs at its first model."""
    dismiss()  # one that has trained before keeps the pages that it has freed
    found = places.of_machine(TWO)
    frozen = getattr(framework, "frozen", lambda model: model)
    shared = [found[0].share(frozen(model), "the model") for model in (small, large)]
    workers = [place.hire() for place in found]
    try:
        for worker, place in zip(workers, found, strict=True):
            worker.start(_growth, (framework.NAME, place.device, *shared, x), "the model")
        told = [worker.receive()[1] for worker in workers]
        grown = [(growth / framework.weight_bytes(large), np.array(answer)) for growth, answer in told]
        for worker in workers:
            worker.answer()
            worker.receive()
        return grown
    finally:
        for worker, place in zip(workers, found, strict=True):
            place.release(worker)
        for value in shared:
            value.close()


def _growth(order: Any) -> Generator[Any, Any, None]:
    name, device, small, large, x = order
    framework = frameworks.adapter(name)
    native = framework.native(framework.choose(parse_devices(device))[0])
    framework.Replica(small.get(), native, "float32")(x)
    before = _own_bytes()
    replica = framework.Replica(large.get(), native, "float32")
    answer = replica(x)
    yield _own_bytes() - before, answer


def _own_bytes() -> int:
    """The memory that this process has written to, and no other has a part in."""
    gc.collect()
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return sum(1024 * int(kilobytes) for kilobytes in re.findall(r"Private_Dirty: +(\d+) kB", rollup))
